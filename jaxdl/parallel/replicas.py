"""What copies of a step that run side by side, each on its part of a batch, need to know of each other."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.models.logical import AXIS

__all__ = ["ALONE", "AXIS", "Replicas"]


@dataclass(frozen=True)
class Replicas:
    """Copies of a step under `shard_map` or `pmap`; by default there is one, which has the whole batch.

    A plan that lets the compiler divide the step has one copy too: what the compiler does, the step
    cannot see.

    Attributes:
        axis: name of the mapped axis.
        count: copies along it.
    """

    axis: str | None = None
    count: int = 1

    def positions(self, examples: int) -> jax.Array:
        """Gives the places in the whole batch of this copy's examples, int32 [examples]."""
        places = jnp.arange(examples, dtype=jnp.int32)
        return places if self.axis is None else places + jax.lax.axis_index(self.axis) * examples

    def total(self, tree: Any) -> Any:
        """Sums each array over the copies."""
        return tree if self.axis is None else jax.lax.psum(tree, self.axis)

    def mean(self, tree: Any) -> Any:
        """Averages each array over the copies."""
        return tree if self.axis is None else jax.lax.pmean(tree, self.axis)


ALONE = Replicas()
