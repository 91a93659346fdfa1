"""Schedules of a pipeline against the formulas for idleness and memory."""

from itertools import pairwise

import pytest

from jaxdl.parallel.pipeline.chain import balanced
from jaxdl.parallel.pipeline.schedules import (
    Action,
    circular,
    gpipe,
    held,
    idle_share,
    one_forward_one_backward,
    simulate,
)

SIZES = [(1, 1), (2, 1), (2, 4), (4, 4), (4, 16), (8, 3)]


@pytest.mark.parametrize(("stages", "parts"), SIZES)
@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_the_idle_share_is_the_formulas(schedule, stages, parts, backward):
    times = simulate(schedule(stages, parts), {"forward": 1.0, "backward": backward})
    assert len(times) == 2 * stages * parts
    assert idle_share(times) == pytest.approx((stages - 1) / (parts + stages - 1))


@pytest.mark.parametrize(("stages", "parts"), [(2, 2), (2, 4), (4, 4), (4, 16)])
@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_the_idle_share_of_the_circular_loop_is_the_formulas(stages, parts, repeats):
    times = simulate(circular(stages, parts, repeats))
    expected = (stages - 1) / (repeats * parts + stages - 1)
    assert idle_share(times) == pytest.approx(expected)
    assert max(end for _, end in times.values()) == repeats * parts + stages - 1


@pytest.mark.parametrize(("stages", "parts"), SIZES)
def test_gpipe_holds_all_micro_batches_and_1f1b_at_most_as_many_as_stages(stages, parts):
    assert [held(order) for order in gpipe(stages, parts)] == [parts] * stages
    assert [held(order) for order in one_forward_one_backward(stages, parts)] == [
        min(stages - stage, parts) for stage in range(stages)
    ]


def test_each_stage_passes_the_micro_batches_forward_in_their_order():
    for order in (*gpipe(3, 5), *one_forward_one_backward(3, 5)):
        for kind in ("forward", "backward"):
            assert [action.part for action in order if action.kind == kind] == list(range(5))


def test_stages_that_wait_for_each_other_are_found_out():
    with pytest.raises(ValueError, match="for ever"):
        simulate([[Action("backward", 0, 0), Action("forward", 0, 0)]])


@pytest.mark.parametrize(
    ("costs", "parts", "edges"),
    [
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        ([9, 1, 1, 1], 2, [0, 1, 4]),
        ([1, 1, 1, 9], 3, [0, 1, 3, 4]),
        ([2, 3, 4, 5, 6], 3, [0, 2, 4, 5]),
        ([0, 0, 5], 3, [0, 1, 2, 3]),
    ],
)
def test_a_balanced_cut_has_the_cheapest_dearest_stage(costs, parts, edges):
    found = balanced(costs, parts)
    dearest = [max(sum(costs[a:b]) for a, b in pairwise(each)) for each in (found, edges)]
    assert dearest[0] == dearest[1]
    assert found[0] == 0
    assert found[-1] == len(costs)
    assert all(a < b for a, b in pairwise(found))
