"""The exchange of weights within one compiled program, to be called inside `shard_map` over an axis of
workers.

Every function is a tick as one worker sees it; all call it together. What is sent over which link is
written out with `ppermute`, so that the compiled program sends what the formulas say and no more.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxdl.parallel.exchange import master, ring, tree


def ring_tick(
    member: ring.Member, token: ring.Token, delta: Any, tick: jax.Array, axis: str
) -> tuple[ring.Member, ring.Token]:
    """A worker of a token ring learns; the token is at one of them, which passes it on.

    Args:
        member: this worker.
        token: the token where it is here, else anything.
        delta: this worker's update.
        tick: int32 scalar, from 0; the token is at worker `tick` modulo their number.
        axis: the mapped axis.

    Returns:
        The worker and the token, which is now at the next one; elsewhere it is zeros.
    """
    count = lax.axis_size(axis)
    member = ring.update(member, delta)
    visited, passed = ring.visit(member, token)
    here = lax.axis_index(axis) == ring.holder(tick, count)
    # One link carries it, the others nothing; which one, a permutation has to know beforehand.
    links = [_send(holder, (holder + 1) % count, axis) for holder in range(count)]
    return tree.choose(here, visited, member), lax.switch(ring.holder(tick, count), links, passed)


def start_pieces(weights: Any, count: int) -> tuple[ring.Member, ring.Token]:
    """Gives what a worker of a ring of shards has at the start.

    Args:
        weights: a tree of float arrays of one dtype.
        count: workers.

    Returns:
        The worker, whose weights are of shape [count, piece], and the token of a piece: worker `i` starts
        with piece `i`. Its weights are those of all pieces here; `pieces_tick` takes the worker's own.
    """
    flat, _ = ravel_pytree(weights)
    pieces = jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)
    zeros = jnp.zeros(count, jnp.int32)
    return ring.Member(pieces, jnp.zeros_like(pieces), zeros, zeros), ring.Token(pieces, zeros)


def own_token(tokens: ring.Token, axis: str) -> ring.Token:
    """Picks the token that this worker has at the start, of those of all pieces."""
    token: ring.Token = _row(tokens, lax.axis_index(axis))
    return token


def pieces_tick(
    member: ring.Member, token: ring.Token, delta: Any, tick: jax.Array, axis: str
) -> tuple[ring.Member, ring.Token]:
    """A worker of a ring of shards learns, and adds what it has gathered to the piece that is here.

    Args:
        member: this worker, with weights [workers, piece].
        token: that of the piece that is here.
        delta: this worker's update, a tree.
        tick: int32 scalar, from 0.
        axis: the mapped axis.

    Returns:
        The worker, and the token that comes in for the one that leaves.
    """
    count = lax.axis_size(axis)
    flat, _ = ravel_pytree(delta)
    member = ring.update(member, jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1))
    piece = (lax.axis_index(axis) - tick) % count
    visited, passed = ring.visit(_row(member, piece), token)
    member = jax.tree.map(lambda rows, row: rows.at[piece].set(row), member, visited)
    return member, _shift(passed, axis)


def weights_of(pieces: jax.Array, like: Any) -> Any:
    """Gives the weights back as a tree like another, from pieces [workers, piece]."""
    flat, unravel = ravel_pytree(like)
    weights: Any = unravel(pieces.reshape(-1)[: flat.size])
    return weights


def master_tick(center: master.Master, delta: Any, examples: jax.Array, axis: str) -> master.Master:
    """All workers send their updates to worker 0, which adds their mean and sends the weights back.

    Args:
        center: the master, equal on all workers.
        delta: this worker's update.
        examples: float32 scalar, how many it was computed from.
        axis: the mapped axis.

    Returns:
        The master after the update, equal on all workers again.
    """
    count = lax.axis_size(axis)
    arrived = [(delta, examples)]
    arrived += [_send(worker, 0, axis)((delta, examples)) for worker in range(1, count)]
    # What is computed here counts on worker 0 only: elsewhere nothing has arrived.
    total = sum((each for _, each in arrived), jnp.float32(0))
    mean = tree.zeros(delta)
    for each, number in arrived:
        mean = tree.add(mean, tree.scale(each, number / total))
    updated = master.apply(center, mean)
    weights = updated.weights
    for worker in range(1, count):
        sent = _send(0, worker, axis)(updated.weights)
        weights = tree.choose(lax.axis_index(axis) == worker, sent, weights)
    return replace(updated, weights=weights)


def _send(source: int, target: int, axis: str) -> Any:
    """What sends a tree from one worker to another; the others get zeros."""
    return lambda value: jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, [(source, target)]), value)


def _shift(value: Any, axis: str) -> Any:
    count = lax.axis_size(axis)
    links = [(worker, (worker + 1) % count) for worker in range(count)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, links), value)


def _row(value: Any, number: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: leaf[number], value)
