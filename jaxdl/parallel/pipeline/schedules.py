"""In which order the stages of a pipeline work on the micro-batches, and what that costs in idleness and
memory.

| schedule   | paper                                                | held      | idle share             |
|------------|------------------------------------------------------|-----------|------------------------|
| `gpipe`    | Huang et al. 2018 (https://arxiv.org/abs/1811.06965) | m         | (p - 1) / (m + p - 1)  |
| `1f1b`     | Narayanan et al. 2019 (PipeDream-flush)              | at most p | (p - 1) / (m + p - 1)  |
| `circular` | Narayanan et al. 2021, interleaved                   | m         | (p - 1) / (vm + p - 1) |

for p stages, m micro-batches (of which a stage holds the activations) and v runs of layers a stage. The
first two are orders in which one program hands work to devices (`jaxdl.parallel.pipeline.plan`); the last
is a loop within one program (`jaxdl.models.circular`), whose backward pass is the loop reversed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward"]


@dataclass(frozen=True)
class Action:
    """One pass of one stage over one micro-batch.

    Attributes:
        kind: direction.
        stage: number of the stage.
        part: number of the micro-batch.
        turn: which of the stage's runs of layers, in `circular`.
    """

    kind: Kind
    stage: int
    part: int
    turn: int = 0


Orders = Sequence[Sequence[Action]]
"""What each stage does, in its order."""


def gpipe(stages: int, parts: int) -> list[list[Action]]:
    """All micro-batches forward, then all backward."""
    kinds: tuple[Kind, Kind] = ("forward", "backward")
    return [[Action(kind, stage, part) for kind in kinds for part in range(parts)] for stage in range(stages)]


def one_forward_one_backward(stages: int, parts: int) -> list[list[Action]]:
    """Forward until the first micro-batch can come back, then one backward for each forward."""

    def order(stage: int) -> list[Action]:
        ahead = min(stages - stage - 1, parts)
        forward = [Action("forward", stage, part) for part in range(parts)]
        backward = [Action("backward", stage, part) for part in range(parts)]
        steady = [
            action for pair in zip(forward[ahead:], backward[: parts - ahead], strict=True) for action in pair
        ]
        return forward[:ahead] + steady + backward[parts - ahead :]

    return [order(stage) for stage in range(stages)]


def circular(stages: int, parts: int, repeats: int) -> list[list[Action]]:
    """The forward pass of the loop: each round all micro-batches, a round after the other."""
    return [
        [Action("forward", stage, part, turn) for turn in range(repeats) for part in range(parts)]
        for stage in range(stages)
    ]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""Orders by the value of `parallel.schedule`, as functions of the numbers of stages and micro-batches."""


def simulate(orders: Orders, cost: Mapping[Kind, float] | None = None) -> dict[Action, tuple[float, float]]:
    """Works out when each action begins and ends if it begins as soon as it can and nothing else takes time.

    Args:
        orders: what each stage does.
        cost: time of one pass in each direction; the same for both if it is not given.

    Returns:
        The actions by their beginnings, so each comes after all that it needs.

    Raises:
        ValueError: the stages wait for each other for ever.
    """
    ends: dict[Action, float] = {}
    times: dict[Action, tuple[float, float]] = {}
    waiting = [list(order) for order in orders]
    free = [0.0] * len(orders)
    last = len(orders) - 1
    while any(waiting):
        ready = [
            (max([free[order[0].stage], *(ends[need] for need in _needs(order[0], last))]), order[0].stage)
            for order in waiting
            if order and all(need in ends for need in _needs(order[0], last))
        ]
        if not ready:
            raise ValueError("the stages wait for each other for ever")
        begin, stage = min(ready)
        action = waiting[stage].pop(0)
        free[stage] = ends[action] = begin + (1.0 if cost is None else cost[action.kind])
        times[action] = (begin, ends[action])
    return dict(sorted(times.items(), key=lambda item: (item[1], item[0].stage)))


def _needs(action: Action, last: int) -> list[Action]:
    """What must have ended before an action can begin."""
    kind, stage, part, turn = action.kind, action.stage, action.part, action.turn
    if kind == "backward":
        after = [] if stage == last else [Action("backward", stage + 1, part)]
        return [Action("forward", stage, part), *after]
    if stage > 0:
        return [Action("forward", stage - 1, part, turn)]
    return [Action("forward", last, part, turn - 1)] if turn > 0 else []


def idle_share(times: Mapping[Action, tuple[float, float]]) -> float:
    """Gives the share of the stages' time in which they wait."""
    stages = {action.stage for action in times}
    busy = sum(end - begin for begin, end in times.values())
    return 1 - busy / (len(stages) * max(end for _, end in times.values()))


def held(order: Sequence[Action]) -> int:
    """Gives the most micro-batches whose activations a stage holds at a time, from forward to backward."""
    now, most = 0, 0
    for action in order:
        now += 1 if action.kind == "forward" else -1
        most = max(most, now)
    return most
