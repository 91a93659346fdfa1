"""The plan that cuts a model into stages on devices of their own, each compiled by itself.

The stages may differ in everything, so this works for any model that lists its blocks (`Task.chain`). One
process hands out the work in the order of a schedule; the devices run it side by side, since nothing
waits for a result. Within a stage, the devices share batch and parameters as under `JitPlan`.

A micro-batch is what a micro-batch of `memory.accumulate` is, down to its batch statistics, so the
numbers are those of one device that accumulates as often.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.config import ParallelConfig
from jaxdl.errors import ConfigError
from jaxdl.parallel.layout import Layout
from jaxdl.parallel.pipeline.chain import Link, cut, cut_by_hand, require_stages, run
from jaxdl.parallel.pipeline.costs import estimated, measured
from jaxdl.parallel.pipeline.split import STAGE_AXIS, belongs
from jaxdl.parallel.pipeline.stages import Stages
from jaxdl.parallel.pipeline.step import PLACE, StagedTrainStep, Watch
from jaxdl.parallel.plan import abstract


@dataclass(frozen=True)
class StagePlan(Stages):
    """Stages of a model on parts of a mesh, whose work one process hands out.

    Attributes:
        schedule: a name in `jaxdl.parallel.pipeline.schedules.SCHEDULES`.
    """

    schedule: str

    @classmethod
    def of(
        cls,
        config: ParallelConfig,
        mesh: Mesh,
        layout: Layout,
        chain: Sequence[Link],
        shapes: tuple[Any, Any, Any],
    ) -> "StagePlan":
        """Cuts a chain as configured.

        Args:
            config: schedule, micro-batches and where to cut.
            mesh: the devices.
            layout: how arrays are divided.
            chain: the links in order.
            shapes: abstract parameters, statistics and micro-batch of one device.

        Raises:
            ConfigError: there are several processes, or the chain cannot be cut into that many stages.
        """
        if jax.process_count() > 1:
            raise ConfigError(
                f"parallel.schedule {config.schedule} hands out work from one process; over several, "
                "circular works, for models whose layers are equal"
            )
        count = mesh.shape[STAGE_AXIS]
        if config.cut not in ("estimated", "measured"):
            stages = cut_by_hand(chain, count, [int(part) for part in config.cut.split(",")])
        else:
            require_stages(chain, count)
            costs = (measured if config.cut == "measured" else estimated)(chain, *shapes)
            stages = cut(chain, count, costs)
        return cls(mesh, layout, tuple(map(tuple, stages)), config.parts, config.schedule)

    @property
    def share(self) -> tuple[int, int]:
        """See `Plan.share`."""
        return 0, 1

    def state_layout(self, state: Any) -> Any:
        """See `Plan.state_layout`."""
        verdicts = [belongs(pieces) for pieces in self.stages]

        def placed(path: tuple[Any, ...], spec: PartitionSpec) -> NamedSharding:
            keys = tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
            pairs = zip(self.meshes, verdicts, strict=True)
            owners = [mesh for mesh, verdict in pairs if keys and verdict(keys)]
            return NamedSharding(owners[0] if len(owners) == 1 else self.mesh, spec)

        return jax.tree_util.tree_map_with_path(placed, self.layout.state(state))

    def compile_init(self, init: Callable[[], Any]) -> Callable[[], Any]:
        """See `Plan.compile_init`."""
        shapes = jax.eval_shape(init)
        state = abstract(shapes, self.state_layout(shapes))
        split = self.split(state)
        structure = jax.tree.structure(state)
        compiled = []
        for stage in range(len(self.stages)):
            # Each stage draws what all draw and keeps its own; the compiler leaves the rest out. Of a stack,
            # a stage needs its layers only, but draws them all.
            own = split.take(state, stage)

            def make(stage: int = stage, own: Any = own) -> Any:
                leaves = jax.tree.leaves(init())
                places, kept = split.places(stage), jax.tree.leaves(own)
                return jax.tree.unflatten(
                    jax.tree.structure(own),
                    [
                        jax.lax.slice_in_dim(leaves[i], stage * want.shape[0], (stage + 1) * want.shape[0])
                        if leaves[i].shape != want.shape
                        else leaves[i]
                        for i, want in zip(places, kept, strict=True)
                    ],
                )

            shardings = jax.tree.map(lambda leaf: leaf.sharding, own)
            compiled.append(jax.jit(make, out_shardings=shardings).lower().compile())
        return lambda: jax.tree.unflatten(
            structure, jax.tree.leaves(split.join([make() for make in compiled]))
        )

    def compile_train(
        self, step: Any, state: Any, batch: Any, watch: Watch = lambda action: None
    ) -> StagedTrainStep:
        """See `Plan.compile_train`; `watch` is told of what is handed out."""
        state = abstract(state, self.state_layout(state))
        return StagedTrainStep(self, self.schedule, step, state, self._abstract_parts(batch), watch=watch)

    def compile_eval(self, step: Any, weights: Any, batch: Any) -> Callable[..., Any]:
        """See `Plan.compile_eval`."""
        split = self.split(weights)
        inputs = self._abstract_parts(batch)
        x, compiled = None, []
        for stage, pieces in enumerate(self.stages):

            def forward(weights: Any, x: Any, batch: Any, pieces: Any = pieces) -> Any:
                params, model_state = weights
                with step.matmul_precision():
                    y, _ = run(pieces, params, model_state, x, batch, None, train=False)
                return y | {"mask": batch["mask"]} if pieces is self.stages[-1] else y

            sharding = self.batch_sharding(stage)
            with self.placed(stage):
                lowered = jax.jit(forward, out_shardings=sharding).lower(
                    split.take(weights, stage), x, inputs[stage][0]
                )
                compiled.append(lowered.compile())
            if stage + 1 < len(self.stages):
                x = abstract(lowered.out_info, self.batch_sharding(stage + 1))
        whole = NamedSharding(self.meshes[-1], PartitionSpec())
        gather = jax.jit(_in_order, out_shardings=whole)

        def evaluate(weights: Any, parts: Any) -> Any:
            views = [split.take(weights, stage) for stage in range(len(self.stages))]
            results = []
            for part in range(self.parts):
                x: Any = None
                for stage, forward in enumerate(compiled):
                    x = jax.device_put(x, self.batch_sharding(stage))
                    x = forward(views[stage], x, parts[stage][part])
                results.append(x)
            return gather(results)

        return evaluate

    def put(self, batch: dict[str, np.ndarray]) -> list[list[dict[str, jax.Array]]]:
        """See `Plan.put`; gives each stage the micro-batches of what it reads."""
        return [
            [jax.device_put(part, self.batch_sharding(stage)) for part in parts]
            for stage, parts in enumerate(self._parts(batch))
        ]

    def _parts(self, batch: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """By stage and micro-batch, what the stage reads, and the examples' places in the batch."""
        examples = len(next(iter(batch.values())))
        batch = batch | {PLACE: np.arange(examples, dtype=np.int32)}
        reads = [{PLACE, *(name for piece in pieces for name in piece.link.reads)} for pieces in self.stages]
        reads[-1].add("mask")
        return [
            [
                {name: batch[name][part :: self.parts] for name in names if name in batch}
                for part in range(self.parts)
            ]
            for names in map(sorted, reads)
        ]

    def _abstract_parts(self, batch: dict[str, Any]) -> list[list[dict[str, Any]]]:
        # Empty arrays of the shapes: a view of one number costs nothing.
        empty = {name: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) for name, leaf in batch.items()}
        return [
            [abstract(part, self.batch_sharding(stage)) for part in parts]
            for stage, parts in enumerate(self._parts(empty))
        ]


def _in_order(results: list[Any]) -> Any:
    """Joins what micro-batches gave: example `i` of part `p` of `n` is number `i n + p`."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays, 1).reshape(-1, *arrays[0].shape[1:]), *results)
