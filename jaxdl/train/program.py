"""From a configuration to the pure functions of a run and the plan that will compile them.

Nothing here makes a directory, touches an array or compiles, so all that can
be refused is refused here, and planning can look at the very program that
will run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxdl.commandline.programs import table
from jaxdl.config import Config
from jaxdl.data.loader import updates_in
from jaxdl.errors import ConfigError
from jaxdl.optim.build import build_optimizer
from jaxdl.optim.masks import LayerAxes, path_name, unstacked
from jaxdl.optim.schedules import build_schedule
from jaxdl.parallel.jit import JitPlan, refuse_offload
from jaxdl.parallel.layout import Layout, rows
from jaxdl.parallel.mapped import MappedPlan
from jaxdl.parallel.mesh import batch_shards, make_mesh
from jaxdl.parallel.pipeline.plan import StagePlan
from jaxdl.parallel.plan import Plan, abstract
from jaxdl.parallel.replicas import ALONE, AXIS, Replicas
from jaxdl.parallel.rules import Rules
from jaxdl.precision import init_loss_scale
from jaxdl.train.state import TrainState, init_state
from jaxdl.train.step import EvalStep, TrainStep
from jaxdl.train.task import Task


@dataclass(frozen=True)
class Program:
    """What a run will do.

    Attributes:
        updates: length of the run.
        updates_per_epoch: may be fractional, since batches run across epochs.
        eval_every: updates between evaluations.
        checkpoint_every: updates between checkpoints.
        optimizer: transformation of mean gradients.
        plan: where everything lies and how it is compiled.
        init: makes the first state.
        train_step: `(state, batch) -> (state, metrics)`.
        eval_step: `((params, model_state), batch) -> metrics by example`.
        state: abstract state, laid out by the plan.
    """

    updates: int
    updates_per_epoch: float
    eval_every: int
    checkpoint_every: int
    optimizer: optax.GradientTransformation
    plan: Plan
    init: Callable[[], TrainState]
    train_step: TrainStep
    eval_step: EvalStep
    state: TrainState

    def layout_table(self) -> str:
        """Writes how each parameter is divided."""
        head = ["parameter", "shape", "mesh axis by dimension", "bytes on a device"]
        return table(head, rows(self.state.params, self.state.opt_state))


def stacked_layers(task: Task) -> LayerAxes:
    """Tells which parameters of a task are stacks of layers: those whose first axis is named `layers`."""
    axes = task.axes()
    if axes is None:
        return unstacked
    named = jax.tree_util.tree_leaves_with_path(axes[0], is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    stacked = {path_name(path) for path, names in named if tuple(names)[:1] == ("layers",)}
    return lambda path: int(path in stacked)


def make_plan(config: Config, mesh: Mesh, task: Task) -> tuple[Plan, Replicas]:
    """Chooses the plan of `config.parallel`, and tells the step what copies of it there will be.

    Raises:
        ConfigError: the task cannot be divided as asked.
    """
    parallel = config.parallel
    if config.memory.offloads_optimizer and (parallel.staged or parallel.backend != "jit"):
        raise ConfigError(
            f"memory.offload {config.memory.offload} works with parallel.backend jit and without stages of "
            "their own (parallel.pipeline with gpipe or 1f1b): take none or activations"
        )
    layout = Layout(Rules.of(parallel, mesh), task.axes())
    if parallel.backend != "jit":
        return MappedPlan(mesh, parallel.backend), Replicas(AXIS, mesh.size)
    if parallel.staged:
        share = config.data.batch_size // parallel.parts // batch_shards(mesh)
        return StagePlan.of(parallel, mesh, layout, task.chain(), _abstract_inputs(task, share)), ALONE
    return JitPlan(mesh, layout, offload_optimizer=config.memory.offloads_optimizer), ALONE


def _abstract_inputs(task: Task, examples: int) -> tuple[Any, Any, Any]:
    """Shapes of parameters, statistics and a batch."""
    return *jax.eval_shape(task.init, jax.random.key(0)), task.example(examples)


def prepare(config: Config, task: Task, examples: int, *, devices: list[Any] | None = None) -> Program:
    """Works out a run.

    Args:
        config: the whole run.
        task: model and loss.
        examples: size of the training set.
        devices: described ones to compile for; None takes those at hand.

    Raises:
        ConfigError: the settings do not fit together, the data or the devices.
    """
    batch_size, accumulate = config.data.batch_size, config.memory.accumulate
    updates_per_epoch = examples / batch_size
    # One of the two is set; the configuration sees to that.
    updates = config.train.steps or updates_in(config.train.epochs or 0, examples, batch_size)
    if updates >= 2**31:
        raise ConfigError(
            f"train.epochs: {config.train.epochs:g} epochs of {examples:,} examples by {batch_size} "
            "are more updates than the step counter holds (2^31)."
        )
    epoch = math.ceil(updates_per_epoch)
    if config.profile.start is not None and config.profile.start >= updates:
        raise ConfigError(
            f"profile.start: {config.profile.start}, but the run is over after {updates} updates."
        )
    schedule = build_schedule(
        config.optimizer, batch_size=batch_size, updates=updates, updates_per_epoch=updates_per_epoch
    )
    mesh = make_mesh(config.parallel, batch_size=batch_size, accumulate=accumulate, devices=devices)
    # After the mesh, which refuses devices that are not there: this traces the task.
    optimizer = build_optimizer(config.optimizer, schedule, layer_axes=stacked_layers(task))
    if devices is None:
        refuse_offload(config.memory, mesh)
    plan, replicas = make_plan(config, mesh, task)
    init = partial(
        init_state,
        task,
        optimizer,
        seed=config.seed,
        keep_average=config.optimizer.ema_decay is not None,
        loss_scale=init_loss_scale(config.precision),
    )
    state = jax.eval_shape(init)
    return Program(
        updates=updates,
        updates_per_epoch=updates_per_epoch,
        eval_every=config.train.eval_every or epoch,
        checkpoint_every=config.train.checkpoint_every or epoch,
        optimizer=optimizer,
        plan=plan,
        init=init,
        train_step=TrainStep(
            task,
            optimizer,
            schedule,
            seed=config.seed,
            accumulate=accumulate,
            ema_decay=config.optimizer.ema_decay,
            precision=config.precision,
            replicas=replicas,
        ),
        eval_step=EvalStep(task, config.precision),
        state=abstract(state, plan.state_layout(state)),
    )
