"""A task as a chain of parts that follow each other, and where to cut it into stages."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxdl.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """One part of a task: a block of the network with its own parameters, or a stack of equal ones.

    Attributes:
        path: keys that lead to its parameters and to its statistics, if it has any.
        apply: `(params, model_state, x, batch, keys, train, first) -> (y, model_state)`. x is what the
            link before gave, arrays [batch, ...] in a tree, None for the first; the last gives `(loss,
            weight)`, summed, in training and the metrics by example in evaluation. `keys` are the
            examples' random keys. `first` is the place in the stack of the first layer that `params`
            holds; 0 for a single block.
        reads: names of what it takes from the batch.
        depth: layers of the stack, stored along the first axis of each parameter; None: a single block.
    """

    path: tuple[str, ...]
    apply: Callable[..., tuple[Any, Any]]
    reads: tuple[str, ...] = ()
    depth: int | None = None


@dataclass(frozen=True)
class Piece:
    """What a stage has of a link: all of it, or `count` layers of its stack from `first` on."""

    link: Link
    first: int = 0
    count: int | None = None


def cut(chain: Sequence[Link], stages: int, costs: Sequence[float]) -> list[list[Piece]]:
    """Cuts a chain into stages.

    Single blocks go where they balance the stages. A stack is divided evenly over all stages, with what comes
    before it in the first and what comes after it in the last.

    Args:
        chain: the links in order, with at most one stack.
        stages: number of stages.
        costs: of each link, in any unit; of no weight where there is a stack.

    Raises:
        ConfigError: there are fewer blocks than stages, or the stages do not divide the stack.
    """
    require_stages(chain, stages)
    stacks = _stacks(chain)
    if not stacks:
        return _pieces(chain, balanced(costs, stages))
    stack = chain[stacks[0]]
    count = (stack.depth or 0) // stages
    pieces = [[Piece(stack, stage * count, count)] for stage in range(stages)]
    pieces[0] = [Piece(link) for link in chain[: stacks[0]]] + pieces[0]
    pieces[-1] += [Piece(link) for link in chain[stacks[0] + 1 :]]
    return pieces


def require_stages(chain: Sequence[Link], stages: int) -> None:
    """Refuses a number of stages into which a chain cannot be cut.

    Raises:
        ConfigError: there are fewer blocks than stages, or the stages do not divide the stack.
    """
    stacks = _stacks(chain)
    if not stacks and stages > len(chain):
        raise ConfigError(
            f"parallel.pipeline {stages}: the model has {len(chain)} blocks, so at most that many stages"
        )
    if len(stacks) > 1:
        raise ConfigError("parallel.pipeline: a model with several stacks of layers cannot be cut")
    depth = chain[stacks[0]].depth or 0 if stacks else 0
    if depth % stages:
        fitting = [n for n in range(1, depth + 1) if depth % n == 0]
        raise ConfigError(
            f"parallel.pipeline {stages} does not divide the model's {depth} layers: take one of "
            f"{', '.join(map(str, fitting))}"
        )


def cut_by_hand(chain: Sequence[Link], stages: int, blocks: Sequence[int]) -> list[list[Piece]]:
    """Cuts a chain of single blocks into stages of given numbers of blocks.

    Raises:
        ConfigError: the numbers do not fit the chain and the stages.
    """
    if _stacks(chain):
        raise ConfigError("parallel.cut: equal layers are divided evenly over the stages; take estimated")
    if len(blocks) != stages or sum(blocks) != len(chain):
        raise ConfigError(
            f"parallel.cut {','.join(map(str, blocks))}: the model has {len(chain)} blocks for "
            f"parallel.pipeline {stages} stages, so give {stages} numbers whose sum is {len(chain)}"
        )
    return _pieces(chain, [0, *itertools.accumulate(blocks)])


def _stacks(chain: Sequence[Link]) -> list[int]:
    return [place for place, link in enumerate(chain) if link.depth is not None]


def _pieces(chain: Sequence[Link], edges: Sequence[int]) -> list[list[Piece]]:
    return [[Piece(link) for link in chain[a:b]] for a, b in itertools.pairwise(edges)]


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Divides a row of costs into consecutive parts so that the dearest is as cheap as it can be.

    Returns:
        `parts` + 1 edges: part `i` has the costs from `edges[i]` up to `edges[i + 1]`; none is empty.
    """
    sums = [0.0, *itertools.accumulate(costs)]

    @functools.cache
    def best(end: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """The cost of the dearest part of the first `end` costs, and the edges."""
        if parts == 1:
            return sums[end], (0, end)
        return min(
            (max(best(edge, parts - 1)[0], sums[end] - sums[edge]), (*best(edge, parts - 1)[1], end))
            for edge in range(parts - 1, end)
        )

    return list(best(len(costs), parts)[1])


def run(
    pieces: Sequence[Piece],
    params: Any,
    model_state: Any,
    x: Any,
    batch: dict[str, jax.Array],
    keys: jax.Array | None,
    train: bool,
) -> tuple[Any, Any]:
    """Applies pieces that follow each other.

    Args:
        pieces: those of one stage, or all.
        params: tree with the parameters of these pieces, of a stack only the layers of the piece.
        model_state: likewise of the statistics.
        x: see `Link.apply`.
        batch: likewise.
        keys: likewise.
        train: likewise.

    Returns:
        What the last piece gives, and the next statistics of them all.
    """
    after = model_state
    for piece in pieces:
        path = piece.link.path
        own, state = at(params, path), at(model_state, path)
        x, state = piece.link.apply(own, {} if state is None else state, x, batch, keys, train, piece.first)
        if at(model_state, path) is not None:
            after = put(after, path, state)
    return x, after


def at(tree: Any, path: Sequence[str]) -> Any:
    """Gives the subtree at a path of keys, or None if there is none."""
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return None
        tree = tree[key]
    return tree


def put(tree: Any, path: Sequence[str], subtree: Any) -> Any:
    """Copies a tree of dicts with another subtree at a path."""
    if not path:
        return subtree
    return tree | {path[0]: put(tree[path[0]], path[1:], subtree)}
