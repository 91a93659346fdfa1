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

from jaxdl.config import MemoryConfig
from jaxdl.errors import ConfigError
from jaxdl.models.remat import HOST_MEMORY
from jaxdl.parallel.mesh import BATCH_AXIS


@dataclass(frozen=True)
class JitPlan:
    """How arrays lie on the devices, and how functions of them are compiled.

    Attributes:
        mesh: the devices.
        offload_optimizer: hold the optimizer's state in the host's memory between updates.
    """

    mesh: Mesh
    offload_optimizer: bool = False

    @property
    def replicated(self) -> NamedSharding:
        """Layout of what each device has a copy of."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding:
        """Layout of batches and of each example's metrics: split along the first axis."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXIS))

    def state_layout(self, state: Any) -> Any:
        """Lays a training state out: a copy on each device, of `opt_state` in its host's memory if so asked.

        Args:
            state: arrays or shapes, in a tree whose root names its parts.
        """

        def layout(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            offloaded = self.offload_optimizer and path[0] == jax.tree_util.GetAttrKey("opt_state")
            # Counters are scalars, which some compilers do not place and which save nothing.
            on_host = offloaded and leaf.ndim > 0
            return self.replicated.with_memory_kind(HOST_MEMORY) if on_host else self.replicated

        return jax.tree_util.tree_map_with_path(layout, state)

    def abstract(self, tree: Any, layout: Any) -> Any:
        """Gives the shapes, dtypes and layout of a tree as `jax.ShapeDtypeStruct`s.

        Args:
            tree: arrays or shapes.
            layout: a sharding for each, or one for all.
        """
        layouts = jax.tree.broadcast(layout, tree)
        return jax.tree.map(
            lambda leaf, layout: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout), tree, layouts
        )

    def compile_init(self, init: Callable[[], Any]) -> Callable[[], Any]:
        """Compiles the making of the state, so that each device makes its own part."""
        return jax.jit(init, out_shardings=self.state_layout(jax.eval_shape(init))).lower().compile()

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
        layout = self.state_layout(state)

        def with_state_on_device(state: Any, batch: Any) -> Any:
            return step(jax.device_put(state, self.replicated), batch)

        return (
            jax.jit(
                with_state_on_device if self.offload_optimizer else step,
                in_shardings=(layout, self.batch_sharding),
                out_shardings=(layout, self.replicated),
                donate_argnums=0,
            )
            .lower(self.abstract(state, layout), self.abstract(batch, self.batch_sharding))
            .compile()
        )

    def compile_eval(self, step: Callable[..., Any], weights: Any, batch: Any) -> Callable[..., Any]:
        """Compiles `step(weights, batch) -> metrics by example`."""
        return (
            jax.jit(
                step,
                in_shardings=(self.replicated, self.batch_sharding),
                out_shardings=self.batch_sharding,
            )
            .lower(self.abstract(weights, self.replicated), self.abstract(batch, self.batch_sharding))
            .compile()
        )

    def put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Sends a batch to the devices; the transfer overlaps with the steps in flight."""
        return {
            name: jax.make_array_from_process_local_data(self.batch_sharding, array)
            for name, array in batch.items()
        }


def refuse_offload(config: MemoryConfig, mesh: Mesh) -> None:
    """Refuses to hold in the host's memory what a CPU computes there anyway, or what a device cannot reach.

    Raises:
        ConfigError: the devices have no use for `memory.offload`.
    """
    device = mesh.devices.flat[0]
    if config.offload == "none":
        return
    if device.platform == "cpu":
        raise ConfigError(
            f"memory.offload: {config.offload} saves nothing on a CPU, whose memory is the host's; take none."
        )
    if HOST_MEMORY not in {memory.kind for memory in device.addressable_memories()}:
        raise ConfigError(
            f"memory.offload: {device.device_kind} cannot reach the host's memory in a step; take none."
        )
