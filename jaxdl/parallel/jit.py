"""The plan that compiles a step with `jax.jit` over a mesh.

The state is replicated and each batch is split over the mesh's `data` axis.
The partitioner inserts the collectives, so batch normalisation uses the
statistics of the whole batch and every value equals the single-device one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.parallel.mesh import BATCH_AXIS


@dataclass(frozen=True)
class JitPlan:
    """How arrays lie on the devices, and how functions of them are compiled.

    Attributes:
        mesh: the devices.
    """

    mesh: Mesh

    @property
    def state_sharding(self) -> NamedSharding:
        """Layout of parameters, statistics and optimizer state: a copy on each device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding:
        """Layout of batches and of each example's metrics: split along the first axis."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXIS))

    def abstract(self, tree: Any, sharding: NamedSharding) -> Any:
        """Gives the shapes, dtypes and layout of a tree as `jax.ShapeDtypeStruct`s."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    def compile_init(self, init: Callable[[], Any]) -> Callable[[], Any]:
        """Compiles the making of the state, so that each device makes its own part."""
        return jax.jit(init, out_shardings=self.state_sharding).lower().compile()

    def compile_train(self, step: Callable[..., Any], state: Any, batch: Any) -> Callable[..., Any]:
        """Compiles `step(state, batch) -> (state, metrics)`; the given state's memory is reused.

        Args:
            step: the pure training step.
            state: abstract state.
            batch: abstract batch.

        Returns:
            The executable. It accepts these shapes only, so it can never be
            traced or compiled again by accident.
        """
        return (
            jax.jit(
                step,
                in_shardings=(self.state_sharding, self.batch_sharding),
                out_shardings=self.state_sharding,
                donate_argnums=0,
            )
            .lower(self.abstract(state, self.state_sharding), self.abstract(batch, self.batch_sharding))
            .compile()
        )

    def compile_eval(self, step: Callable[..., Any], weights: Any, batch: Any) -> Callable[..., Any]:
        """Compiles `step(weights, batch) -> metrics by example`."""
        return (
            jax.jit(
                step,
                in_shardings=(self.state_sharding, self.batch_sharding),
                out_shardings=self.batch_sharding,
            )
            .lower(self.abstract(weights, self.state_sharding), self.abstract(batch, self.batch_sharding))
            .compile()
        )

    def put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Sends a batch to the devices; the transfer overlaps with the steps in flight."""
        return {
            name: jax.make_array_from_process_local_data(self.batch_sharding, array)
            for name, array in batch.items()
        }
