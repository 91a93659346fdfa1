"""A master with workers: the workers send their updates, the master adds them and sends the weights back.

In the synchronous form all compute with the same weights, and the master adds the mean of the updates of
those that have answered: with gradients for updates that is data parallelism. In the asynchronous form the
master adds each update as it comes and answers at once, so nobody waits; an update that was computed with
weights too old is refused (stale synchronous parallel, Ho et al. 2013; downpour SGD, Dean et al. 2012).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.parallel.exchange import tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Master:
    """What the master has.

    Attributes:
        weights: a tree of arrays.
        version: int32 scalar, updates that are in them.
        refused: int32 scalar, updates that came too late.
    """

    weights: Any
    version: jax.Array
    refused: jax.Array


def start(weights: Any) -> Master:
    """Gives the master before the first update."""
    zero = jnp.zeros((), jnp.int32)
    return Master(weights, zero, zero)


def mean(deltas: Mapping[int, Any], examples: Mapping[int, float]) -> Any:
    """Averages the updates of the workers that answered, each weighted by its examples.

    The divisor is what answered, never what was expected, so a worker that was lost makes the others count
    more.

    Args:
        deltas: updates by worker.
        examples: how many each was computed from.

    Raises:
        ValueError: nobody answered, or with no examples.
    """
    total = sum(examples[worker] for worker in deltas)
    if not total:
        raise ValueError("nobody answered, so there is nothing to average")
    shares = [tree.scale(deltas[worker], examples[worker] / total) for worker in sorted(deltas)]
    summed = shares[0]
    for share in shares[1:]:
        summed = tree.add(summed, share)
    return summed


def apply(master: Master, delta: Any) -> Master:
    """Adds an update to the weights."""
    return Master(tree.add(master.weights, delta), master.version + 1, master.refused)


def receive(master: Master, delta: Any, version: jax.Array, bound: int) -> tuple[Master, jax.Array]:
    """Takes a worker's update if it is not too old; the asynchronous form.

    Args:
        master: the master.
        delta: the update.
        version: that of the weights it was computed with.
        bound: the most updates of others that these may lack.

    Returns:
        The master, and whether it took the update (bool scalar). It counts those it refuses.
    """
    accepted = master.version - version <= bound
    taken, refused = apply(master, delta), Master(master.weights, master.version, master.refused + 1)
    return tree.choose(accepted, taken, refused), accepted
