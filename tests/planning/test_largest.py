"""The search for the largest batch, against trying every size."""

import itertools

import pytest

from jaxdl.planning.largest import largest_that_fits


@pytest.mark.parametrize("hint", [None, 900, 6000])
@pytest.mark.parametrize("curve", ["line", "steps", "square", "wall", "high wall"])
@pytest.mark.parametrize("usable", [99, 1000, 5003, 80_000])
def test_it_is_what_trying_every_size_finds(curve, usable, hint):
    calls = []

    def needed(size):
        calls.append(size)
        assert size % 8 == 0
        match curve:
            case "line":
                return 100 + 7 * size
            case "steps":
                return 100 + 512 * -(-7 * size // 512)
            case "square":
                return 100 + 7 * size + size**2 // 64
        # The compiler tells only that memory ran out.
        if 7 * size > usable:
            return None
        return 7 * size if curve == "high wall" else 1

    expected = None
    for size in itertools.count(8, 8):
        found = needed(size)
        if found is None or found > usable:
            break
        expected = size
    calls.clear()
    told = None if "wall" in curve else usable
    assert largest_that_fits(needed, unit=8, usable=told, hint=hint) == expected
    assert len(calls) == len(set(calls))
    if curve == "line":
        assert len(calls) <= 6
