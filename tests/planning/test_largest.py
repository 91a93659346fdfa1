"""The search for the largest batch, against trying every size."""

import itertools

import pytest

from jaxdl.planning.largest import largest_that_fits


@pytest.mark.parametrize("curve", ["line", "steps", "square", "wall"])
@pytest.mark.parametrize("usable", [99, 1000, 5003, 80_000])
def test_it_is_what_trying_every_size_finds(curve, usable):
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
        return None if 7 * size > usable else 1  # the compiler tells only that memory ran out

    expected = None
    for size in itertools.count(8, 8):
        found = needed(size)
        if found is None or found > usable:
            break
        expected = size
    calls.clear()
    assert largest_that_fits(needed, unit=8, usable=None if curve == "wall" else usable) == expected
    assert len(calls) == len(set(calls))
    if curve == "line":
        assert len(calls) <= 6
