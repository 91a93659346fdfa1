"""Plans that run the step on each device with its part of the batch, as `shard_map` or `pmap` map it.

Where `JitPlan` leaves it to the compiler what devices exchange, here the step itself sums: gradients,
loss and weight once an update, and what batch normalisation shares, if anything. With
`parallel.batch_norm local` that is one all-reduce of the gradients and next to nothing else. Everything
else is on each device as a copy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxdl.errors import ConfigError
from jaxdl.parallel.mesh import batch_share
from jaxdl.parallel.plan import abstract, abstract_batch, put_batch
from jaxdl.parallel.replicas import AXIS


@dataclass(frozen=True)
class MappedPlan:
    """A copy of the step on each device.

    Attributes:
        mesh: the devices, of which only those along the batch's axes are many.
        backend: who maps. `pmap` is the older form of the same, with batches of shape [device, examples,
            ...].
    """

    mesh: Mesh
    backend: Literal["shard_map", "pmap"]

    def __post_init__(self) -> None:
        """Refuses what `pmap` cannot do.

        Raises:
            ConfigError: there are several processes.
        """
        if self.backend == "pmap" and jax.process_count() > 1:
            raise ConfigError(
                "parallel.backend pmap is for one process; shard_map does the same over several"
            )

    @property
    def row(self) -> Mesh:
        """The same devices along one axis."""
        return Mesh(self.mesh.devices.reshape(-1), (AXIS,), axis_types=(AxisType.Auto,))

    @property
    def replicated(self) -> NamedSharding:
        """Layout of what each device has a copy of."""
        return NamedSharding(self.row, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding:
        """Layout of batches."""
        return NamedSharding(self.row, PartitionSpec(AXIS))

    @property
    def share(self) -> tuple[int, int]:
        """See `Plan.share`."""
        return batch_share(self.mesh)

    def state_layout(self, state: Any) -> Any:
        """See `Plan.state_layout`."""
        return jax.tree.map(lambda _: self.replicated, state)

    def compile_init(self, init: Callable[[], Any]) -> Callable[[], Any]:
        """See `Plan.compile_init`."""
        return jax.jit(init, out_shardings=self.replicated).lower().compile()

    def compile_train(self, step: Any, state: Any, batch: Any) -> Callable[..., Any]:
        """See `Plan.compile_train`; the step sums over `AXIS`."""
        return self._compile(step, state, batch, donate=True)

    def compile_eval(self, step: Callable[..., Any], weights: Any, batch: Any) -> Callable[..., Any]:
        """See `Plan.compile_eval`."""

        def gathered(weights: Any, batch: Any) -> Any:
            return jax.lax.all_gather(step(weights, batch), AXIS, tiled=True)

        return self._compile(gathered, weights, batch, donate=False)

    def put(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """See `Plan.put`."""
        placed: dict[str, jax.Array] = put_batch(self._shaped(batch), self.batch_sharding, self.share[1])
        return placed

    def _shaped(self, batch: Any) -> Any:
        """What the mapping takes: for `pmap`, the devices have an axis of their own."""
        if self.backend == "shard_map":
            return batch
        count = self.mesh.size
        shapes = jax.tree.map(lambda leaf: (count, leaf.shape[0] // count, *leaf.shape[1:]), batch)
        return {
            name: leaf.reshape(shapes[name])
            if isinstance(leaf, np.ndarray)
            else jax.ShapeDtypeStruct(shapes[name], leaf.dtype)
            for name, leaf in batch.items()
        }

    def _compile(
        self, function: Callable[..., Any], state: Any, batch: Any, *, donate: bool
    ) -> Callable[..., Any]:
        batch = abstract_batch(self._shaped(batch), self.batch_sharding, self.share[1])
        state = abstract(state, self.replicated)
        donated = (0,) if donate else ()
        if self.backend == "pmap":
            mapped: Any = jax.pmap(
                function,
                AXIS,
                in_axes=(None, 0),
                out_axes=None,  # all copies are equal
                devices=list(self.row.devices.flat),
                donate_argnums=donated,
            )
            pmapped: Callable[..., Any] = mapped.lower(state, batch).compile()
            return pmapped
        replicated, divided = PartitionSpec(), PartitionSpec(AXIS)
        # Gradients of what is on each device are each device's own, and the step sums them: with `check_vma`
        # JAX would have summed them already.
        mapped = jax.shard_map(
            function, mesh=self.row, in_specs=(replicated, divided), out_specs=replicated, check_vma=False
        )
        compiled: Callable[..., Any] = jax.jit(mapped, donate_argnums=donated).lower(state, batch).compile()
        return compiled
