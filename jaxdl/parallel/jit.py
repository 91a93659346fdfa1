"""The plan that compiles a step with `jax.jit` over a mesh.

Each batch is divided over the mesh's batch axes, the state as `jaxdl.parallel.rules` says. The partitioner
inserts the collectives, so batch normalisation uses the statistics of the whole batch and every value equals
the single-device one.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.config import BATCH_AXES, MemoryConfig
from jaxdl.errors import ConfigError
from jaxdl.models.remat import HOST_MEMORY
from jaxdl.parallel.layout import Layout
from jaxdl.parallel.mesh import batch_share
from jaxdl.parallel.plan import abstract, abstract_batch, put_batch


@dataclass(frozen=True)
class JitPlan:
    """How arrays lie on the devices, and how functions of them are compiled.

    Attributes:
        mesh: the devices.
        layout: how the state is divided.
        offload_optimizer: hold the optimizer's state in the host's memory between updates.
    """

    mesh: Mesh
    layout: Layout
    offload_optimizer: bool = False

    @property
    def replicated(self) -> NamedSharding:
        """Layout of what each device has a copy of."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding:
        """Layout of batches: divided along the first axis."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    @property
    def share(self) -> tuple[int, int]:
        """See `Plan.share`."""
        return batch_share(self.mesh)

    def state_layout(self, state: Any) -> Any:
        """See `Plan.state_layout`."""

        def placed(path: tuple[Any, ...], spec: PartitionSpec, leaf: Any) -> NamedSharding:
            # Counters are scalars, which some compilers do not place and which save nothing.
            on_host = self.offload_optimizer and path[0].name == "opt_state" and leaf.ndim > 0
            return NamedSharding(self.mesh, spec, memory_kind=HOST_MEMORY if on_host else None)

        return jax.tree_util.tree_map_with_path(placed, self.layout.state(state), state)

    def compile_init(self, init: Callable[[], Any]) -> Callable[[], Any]:
        """See `Plan.compile_init`."""
        return jax.jit(init, out_shardings=self.state_layout(jax.eval_shape(init))).lower().compile()

    def compile_train(self, step: Callable[..., Any], state: Any, batch: Any) -> Callable[..., Any]:
        """See `Plan.compile_train`."""
        layout = self.state_layout(state)
        on_device = jax.tree.map(lambda each: NamedSharding(self.mesh, each.spec), layout)

        def with_state_on_device(state: Any, batch: Any) -> Any:
            return step(jax.device_put(state, on_device), batch)

        with self._placed():
            return (
                jax.jit(
                    with_state_on_device if self.offload_optimizer else step,
                    in_shardings=(layout, self.batch_sharding),
                    out_shardings=(layout, self.replicated),
                    donate_argnums=0,
                )
                .lower(abstract(state, layout), self._abstract_batch(batch))
                .compile()
            )

    def compile_eval(self, step: Callable[..., Any], weights: Any, batch: Any) -> Callable[..., Any]:
        """See `Plan.compile_eval`."""
        with self._placed():
            return (
                jax.jit(
                    step,
                    in_shardings=(jax.tree.map(lambda leaf: leaf.sharding, weights), self.batch_sharding),
                    out_shardings=self.replicated,
                )
                .lower(weights, self._abstract_batch(batch))
                .compile()
            )

    def put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """See `Plan.put`."""
        placed: dict[str, jax.Array] = put_batch(batch, self.batch_sharding, self.share[1])
        return placed

    def _abstract_batch(self, batch: Any) -> Any:
        return abstract_batch(batch, self.batch_sharding, self.share[1])

    @contextlib.contextmanager
    def _placed(self) -> Iterator[None]:
        """What the models' constraints on activations look for."""
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(self.layout.rules.for_activations):
            yield


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
