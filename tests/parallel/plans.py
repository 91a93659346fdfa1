"""Tasks, plans and runs of a few steps for tests."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from experiments import subjects
from experiments.tagging import Tagging
from jaxdl.config import ImageConfig, ImageDataConfig, MemoryConfig, ParallelConfig, TrainConfig
from jaxdl.models import BatchNormScope, ResNet
from jaxdl.models.circular import Circular
from jaxdl.models.transformer import Encoder
from jaxdl.parallel.jit import JitPlan
from jaxdl.parallel.layout import Layout
from jaxdl.parallel.mesh import make_mesh
from jaxdl.parallel.rules import Rules
from jaxdl.train.program import make_plan
from jaxdl.train.state import TrainState, init_state
from jaxdl.train.step import TrainStep
from jaxdl.train.task import Classification, Task

BATCH, LENGTH, DEPTH = 16, 8, 4
SGD = optax.sgd(0.1, momentum=0.9)


def jit_plan(mesh: Mesh, *, offload_optimizer: bool = False) -> JitPlan:
    """The plan of a task whose arrays carry no names."""
    return JitPlan(mesh, Layout(Rules(dict(mesh.shape))), offload_optimizer)


def encoder(config: ImageConfig, *, width: int = 64) -> Tagging:
    """Four encoder layers with dropout."""
    parallel, pipeline = config.parallel, None
    if parallel.circular:
        pipeline = Circular(parallel.pipeline, parallel.parts, parallel.repeats)
    layer = {"heads": 4, "mlp": 4 * width}
    types = {"dtype": np.float32, "param_dtype": np.float32}
    return Tagging(
        words=128, embed=width, length=LENGTH, encoder=Encoder(DEPTH, layer, pipeline=pipeline), types=types
    )


def resnet(config: ImageConfig, *, width: int = 16) -> Classification:
    """A ResNet of two bottleneck blocks."""
    parallel = config.parallel
    scope = BatchNormScope(parallel.batch_norm_groups)
    model = ResNet((1, 1), bottleneck=True, num_classes=8, width=width, stem="small", batch_norm=scope)
    return Classification(model=model, image_size=8, mean=(0.5,) * 3, std=(0.25,) * 3)


TASKS = {"encoder": encoder, "resnet": resnet}


def configuration(*, accumulate: int = 1, **parallel: Any) -> ImageConfig:
    return ImageConfig(
        data=ImageDataConfig(batch_size=BATCH),
        parallel=ParallelConfig(**parallel),
        memory=MemoryConfig(accumulate=accumulate),
        train=TrainConfig(steps=5),
    )


@dataclass(frozen=True)
class Run:
    """A compiled step of a task under a plan."""

    task: Task
    plan: Any
    step: Any
    abstract: TrainState
    batch: dict[str, np.ndarray]

    @classmethod
    def of(
        cls, name: str, config: ImageConfig, optimizer: Any = SGD, *, devices: Any = None, **settings: Any
    ) -> "Run":
        task = TASKS[name](config, **settings)
        mesh = make_mesh(
            config.parallel, batch_size=BATCH, accumulate=config.memory.accumulate, devices=devices
        )
        plan, replicas = make_plan(config, mesh, task)
        step = TrainStep(
            task, optimizer, lambda _: 0.1, seed=0, accumulate=config.memory.accumulate, replicas=replicas
        )
        abstract = jax.eval_shape(lambda: init_state(task, optimizer, seed=0, keep_average=False))
        part, parts = plan.share
        rows = slice(part * BATCH // parts, (part + 1) * BATCH // parts)
        batch = {key: value[rows] for key, value in subjects.batch(task, BATCH).items()}
        return cls(task, plan, step, abstract, batch)

    def start(self) -> TrainState:
        """The state before the first update."""
        return self.plan.compile_init(
            lambda: init_state(self.task, self.step.optimizer, seed=0, keep_average=False)
        )()

    def compile(self, **settings: Any) -> Any:
        return self.plan.compile_train(self.step, self.abstract, self.batch, **settings)

    def train(self, state: TrainState, updates: int = 5) -> tuple[list[float], TrainState]:
        """Makes some updates with the same batch; gives their losses and the last state."""
        compiled, losses = self.compile(), []
        for _ in range(updates):
            state, metrics = compiled(state, self.plan.put(self.batch))
            losses.append(float(metrics["loss"]))
        return losses, state


def trained(name: str, config: ImageConfig, **settings: Any) -> tuple[Any, list[float], Any]:
    """The initial parameters, the losses of five updates and the last parameters and statistics."""
    run = Run.of(name, config, **settings)
    state = run.start()
    first = fetch(state.params)
    losses, state = run.train(state)
    return first, losses, fetch((state.params, state.model_state))


def fetch(tree: Any) -> Any:
    """The whole arrays, also those of which other processes have parts."""
    return jax.device_get(tree) if jax.process_count() == 1 else process_allgather(tree, tiled=True)


def sequential(config: ImageConfig) -> ImageConfig:
    """The run on one device that a run is to agree with: as many micro-batches, and as many groups."""
    parallel = config.parallel
    shards = jax.device_count() if parallel.batch_norm == "local" else None
    batch_norm = f"groups:{shards}" if shards else parallel.batch_norm
    return replace(
        config,
        parallel=ParallelConfig(data=1, batch_norm=batch_norm),
        memory=MemoryConfig(accumulate=config.memory.accumulate * parallel.parts),
    )
