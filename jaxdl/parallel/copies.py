"""Gradients over several micro-batches, summed over devices once and not by micro-batch.

Devices that share a batch share its gradient. Where the compiler divides the step, the gradient of a
parameter is one array, so each micro-batch ends with a sum over devices. With a copy of the parameters
for each of them, along an axis of its own, each has a gradient of its own, and one sum comes after the
last micro-batch. A copy is what a device holds of a parameter anyway.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxdl.models.logical import layout_of, mesh_axes
from jaxdl.parallel.replicas import AXIS


@dataclass(frozen=True)
class Copies:
    """Copies along the axis that a plan names `copy`; one where there is no such plan, and then nothing
    is done.

    Attributes:
        axes: mesh axes over which they lie.
        count: how many there are.
    """

    axes: tuple[str, ...] = ()
    count: int = 1

    @classmethod
    def here(cls) -> "Copies":
        """Gives those of the plan within which this is traced."""
        axes = mesh_axes("copy")
        return cls(tuple(axes), math.prod(axes.values()))

    def spread(self, tree: Any) -> Any:
        """Makes the copies: [...] -> [count, ...]."""
        if self.count == 1:
            return tree

        def spread(leaf: jax.Array) -> jax.Array:
            copies = jnp.broadcast_to(leaf, (self.count, *leaf.shape))
            rest = [PartitionSpec.UNCONSTRAINED] * leaf.ndim
            spreaded: jax.Array = jax.lax.with_sharding_constraint(copies, PartitionSpec(self.axes, *rest))
            return spreaded

        return jax.tree.map(spread, tree)

    def split(self, tree: Any) -> Any:
        """Gives each copy the examples that its devices have: [batch, ...] -> [count, batch / count, ...]."""
        if self.count == 1:
            return tree
        return jax.tree.map(lambda leaf: leaf.reshape(self.count, -1, *leaf.shape[1:]), tree)

    def join(self, tree: Any) -> Any:
        """Undoes `split`."""
        if self.count == 1:
            return tree
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)

    def total(self, tree: Any) -> Any:
        """Sums over the copies."""
        return tree if self.count == 1 else jax.tree.map(lambda leaf: leaf.sum(0), tree)

    def mean(self, tree: Any) -> Any:
        """Averages over the copies."""
        return tree if self.count == 1 else jax.tree.map(lambda leaf: leaf.mean(0), tree)

    def each(self, function: Callable[..., Any], in_axes: tuple[int | None, ...]) -> Callable[..., Any]:
        """Maps a function over the copies, along the axis `AXIS`.

        Args:
            function: of arguments without the axis of copies.
            in_axes: 0 for an argument that has it, None for one that does not.
        """
        if self.count == 1:
            return function
        left = tuple(axis for axis in mesh_axes("batch") if axis not in self.axes)

        def one(*arguments: Any) -> Any:
            with layout_of("batch", left):
                return function(*arguments)

        return jax.vmap(one, in_axes, axis_name=AXIS, spmd_axis_name=self.axes)
