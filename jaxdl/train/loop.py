"""The loop: next batch, step, log, evaluate, save; `train` reads from top to bottom.

The order at an update is deliberate. A training line and an evaluation are
written before the checkpoint of the same step, so a checkpoint never precedes
what it vouches for, and lines beyond the newest checkpoint are removed when a
run is resumed. An evaluation that an interruption cut short is made up for on
resume, so that an interrupted run writes the lines of an uninterrupted one.
"""

import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxdl.commandline import STORED, run_yaml
from jaxdl.config import Config
from jaxdl.data.types import Feed
from jaxdl.errors import EXIT_STOPPED, ConfigError, DataError, DivergedError
from jaxdl.optim.masks import leaf_names
from jaxdl.parallel.mesh import batch_shards
from jaxdl.parallel.processes import beat, on_first, speaks, wait_for_all
from jaxdl.precision import parse_policy
from jaxdl.profiling.hardware import peak_flops
from jaxdl.profiling.trace import trace_window
from jaxdl.train import rundir
from jaxdl.train.checkpoint import Checkpointer
from jaxdl.train.directory import open_directory
from jaxdl.train.evaluate import evaluate
from jaxdl.train.program import prepare
from jaxdl.train.report import Progress, open_reporter
from jaxdl.train.signals import Agreement, StopRequest
from jaxdl.train.skips import Skips
from jaxdl.train.step import Metrics
from jaxdl.train.task import Task

IN_FLIGHT = 2
"""Updates dispatched ahead of the one whose metrics are read: enough to keep a device busy.

A bound is needed: simulated CPU devices deadlock when many steps with
collectives are queued.
"""


def train(
    config: Config,
    task: Task,
    feed: Feed,
    *,
    experiment: str,
    initial: Any = None,
    files: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Trains a task as configured, from the first or the last saved update to the end.

    Args:
        config: the whole run.
        task: model and loss.
        feed: examples to learn from and to evaluate on.
        experiment: name of the program, for the run's directory.
        initial: `(params, model_state)` of NumPy arrays to start from; leaves that are abstract keep their
            random values.
        files: text by name, to be kept in the run's directory.

    Returns:
        The exit code: 0, or 75 if a signal stopped the run after it was saved.

    Raises:
        ConfigError: the settings do not fit together, the data or the devices.
        DataError: an example could not be read.
        DivergedError: an update was not finite.
        CheckpointError: the run could not be saved or restored.
    """
    program = prepare(config, task, feed.examples)
    plan = program.plan
    part, parts = plan.share
    share: Any = {"process_index": part, "process_count": parts}
    multiple = batch_shards(plan.mesh) * config.parallel.parts
    evaluation = feed.eval_batches(multiple_of=multiple, **share)
    progress = Progress() if speaks() else Progress(Path(os.devnull).open("w"))  # noqa: SIM115 - to the end
    if config.parallel.show_layout:
        progress.say(program.layout_table())

    with contextlib.ExitStack() as stack:
        stop = Agreement(stack.enter_context(StopRequest()))
        opened, changes = on_first(lambda: open_directory(config, experiment))
        directory = Path(opened)
        checkpoints = stack.enter_context(Checkpointer(directory / "checkpoints", keep=config.train.keep))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(program.state.params))
        devices = plan.mesh.devices.flat
        progress.say(
            f"{config.model.name} ({parameters:,} parameters) on {config.data.name} ({feed.examples:,} "
            f"examples, {feed.eval_examples:,} to evaluate): {program.updates:,} updates of "
            f"{config.data.batch_size} on {len(devices)} x {devices[0].device_kind}, in {directory}"
        )
        if len(devices) < jax.device_count():
            progress.say(f"{jax.device_count() - len(devices)} of {jax.device_count()} devices are left idle")
        if parse_policy(config.precision.policy).loses_small_updates:
            progress.say(
                f"precision.policy {config.precision.policy} keeps parameters in 16 bits: updates smaller "
                "than half a unit in the last place are lost"
            )
        if feed.dropped:
            progress.say(
                f"data.remainder drop: each epoch leaves out {feed.dropped:,} of "
                f"{feed.examples + feed.dropped:,} examples, which fill no batch"
            )
        for change in changes:
            progress.say(f"changed since the last attempt: {change}")
        restored = checkpoints.restore(program.state) if config.resume else None
        if restored is not None:
            state, step, record = restored.state, restored.step, restored.record
            progress.say(f"going on after update {step}")
            refuse_other_data(record.get("data", {}), feed)
            if step > program.updates:
                raise ConfigError(
                    f"train.steps, train.epochs: the run has made {step} updates already, and "
                    f"{program.updates} are asked for; take at least {step}."
                )
        else:
            if config.resume:
                progress.say("there is no checkpoint to go on from: starting afresh")
            state, step, record = plan.compile_init(program.init)(), 0, {}
            if initial is not None:
                params, model_state = put_over((state.params, state.model_state), initial)
                ema = None if state.ema is None else put_over(state.ema, initial)
                state = replace(state, params=params, model_state=model_state, ema=ema)

        if speaks():
            for name, text in files.items():
                rundir.replace_file(directory / name, text.encode())
        if changes and speaks():
            rundir.replace_file(directory / STORED, run_yaml(config).encode())

        batches = stack.enter_context(
            contextlib.closing(feed.train_batches(seed=config.seed, start=step, **share))
        )
        reporter = stack.enter_context(
            contextlib.closing(
                open_reporter(
                    directory,
                    progress,
                    updates=program.updates,
                    batch_size=config.data.batch_size,
                    start=step,
                    window=record.get("window"),
                    ranked_by=task.ranked_by,
                    units=units_of(task, config, list(devices)),
                )
            )
        )

        skips = Skips(
            share=feed.max_bad,
            examples=feed.examples,
            batch_size=config.data.batch_size,
            total=record.get("skipped_examples", 0),
        )

        def receive(step: int, metrics: dict[str, Any]) -> None:
            stop.hear(metrics)
            skips.hear(metrics)
            beat(step)
            reporter.update(step, metrics)
            skips.check(step)

        in_flight = InFlight(receive, leaf_names(program.state.params), config.precision.max_skipped_updates)
        trace = stack.enter_context(
            trace_window(config.profile, directory / "profile", in_flight.settle, record=speaks())
        )

        def put(batch: dict[str, np.ndarray]) -> Any:
            return plan.put(stop.vote(batch))

        losses: dict[int, float] = {}  # of this attempt's evaluations

        def evaluate_if_due() -> None:
            due = step > 0 and (step % program.eval_every == 0 or step == program.updates)
            if not due or step in reporter.scores:
                return
            in_flight.settle()
            with reporter.pause():
                result = evaluate(
                    eval_step, task.scores, state.evaluated, evaluation, put, lambda: bool(stop), stop.hear
                )
            if result is not None:
                skips.check_evaluation(int(result["count"]), feed.eval_examples)
                losses[step] = result["loss"]
                reporter.evaluation_line(step, result, weights="raw" if state.ema is None else "ema")

        def save() -> None:
            # Only what is known to be finite reaches the disk.
            in_flight.settle()
            epoch, index = divmod(step * config.data.batch_size, feed.examples)
            with reporter.pause():
                reporter.sync()
                checkpoints.save(
                    step,
                    state,
                    record={
                        "config": run_yaml(config),
                        "task": type(task).__name__,
                        "examples_seen": step * config.data.batch_size,
                        "data": feed.identity,
                        # Where the next batch begins; it follows from the step, and is here to be read.
                        "position": {"epoch": epoch, "index": index},
                        "skipped_examples": skips.total,
                        "window": reporter.window,
                    },
                    score=reporter.scores.get(step),
                )

        def save_if_due() -> None:
            if step > 0 and (step % program.checkpoint_every == 0 or step == program.updates):
                save()

        try:
            try:
                with reporter.pause():
                    # No batch is read that is not trained on: a bad example beyond the end must stop no run.
                    first = list(itertools.islice(batches, 1)) if step < program.updates else []
                    example = stop.vote(next(iter(evaluation)))
                    progress.say("compiling ...")
                    began = time.monotonic()
                    train_step = (
                        plan.compile_train(program.train_step, program.state, stop.vote(first[0]))
                        if first
                        else None
                    )
                    eval_step = plan.compile_eval(program.eval_step, program.state.evaluated, example)
                    compile_seconds = time.monotonic() - began
                    progress.say(f"compiled in {compile_seconds:.1f} s")
                    wait_for_all()
                # What the last attempt was stopped in.
                evaluate_if_due()
                save_if_due()
                while train_step is not None and step < program.updates and not stop:
                    with reporter.waiting_for_input():
                        batch = first.pop() if first else next(batches)
                    trace(step)
                    state, metrics = train_step(state, put(batch))
                    step += 1
                    in_flight.add(step, metrics | stop.known(batch))
                    if step % config.train.log_every == 0 or step == program.updates:
                        in_flight.settle()
                        reporter.training_line()
                    evaluate_if_due()
                    save_if_due()
            except DataError:
                if jax.process_count() > 1:
                    reporter.summarize("stopped by unreadable data")
                    # The others would have to save too, and wait for this process's part of the next update.
                    raise
                # The updates so far are sound; once the data is mended, --resume true goes on from them.
                save()
                checkpoints.close()
                reporter.summarize("stopped by unreadable data")
                raise
            if stop:
                save()
        except DivergedError:
            # Also one that came to light only when the updates in flight were to be saved.
            reporter.training_line()
            reporter.summarize("diverged")
            raise
        checkpoints.close()
        if step == program.updates and int(state.step) == 0:
            reporter.summarize("diverged")
            raise DivergedError("no update was finite, so nothing was learnt; see skipped_updates.")
        done = step == program.updates and step in reporter.scores
        if done and not np.isfinite(losses.get(step, 0.0)):
            reporter.summarize("diverged")
            raise DivergedError("the last update was finite, but what it made of the network is not.")
        reporter.summarize(
            "done" if done else "stopped",
            parameters=parameters,
            examples_per_epoch=feed.examples,
            compile_seconds=compile_seconds,
        )
        if done:
            return 0
        progress.say(
            f"{stop.name}: saved after update {step}; to go on, run again with --workdir {directory} "
            "--resume true"
        )
        return EXIT_STOPPED


def refuse_other_data(before: Mapping[str, Any], feed: Feed) -> None:
    """Refuses to go on with data that changed since: their order and labels would be others.

    Args:
        before: `Feed.identity` at the checkpoint.
        feed: what there is now.

    Raises:
        ConfigError: something differs.
    """
    changed = [
        f"{name} {before[name]}, now {value}"
        for name, value in feed.identity.items()
        if before.get(name, value) != value
    ]
    if changed:
        raise ConfigError(
            f"the data are not those that the run was begun with: {'; '.join(changed)}. Restore them, or "
            "start a new run in another --workdir."
        )


def units_of(task: Task, config: Config, devices: Sequence[jax.Device]) -> dict[str, float]:
    """Gives what an example is in tokens and as a share of what all devices can do in a second.

    The share is the model FLOPs utilisation (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311), of the
    makers' peak for the policy's dtype, or of `profile.peak_tflops` where that is set.
    """
    work, policy = task.work(), parse_policy(config.precision.policy)
    units = {"tokens_per_second": float(work.tokens)} if work.tokens else {}
    tf32 = policy.matmul == "tensorfloat32"
    peak = (config.profile.peak_tflops or 0.0) * 1e12
    peak = peak or peak_flops(devices[0].device_kind, policy.compute, tf32=tf32) or 0.0
    if work.flops and peak:
        units["mfu"] = work.flops / (peak * len(devices))
    return units


def put_over(fresh: Any, given: Any) -> Any:
    """Copies given arrays to the dtypes and devices of fresh ones; an abstract leaf keeps the fresh one."""

    def put(old: jax.Array, new: Any) -> jax.Array:
        if isinstance(new, jax.ShapeDtypeStruct):
            return old
        placed: jax.Array = jax.device_put(new.astype(old.dtype), old.sharding)
        return placed

    return jax.tree.map(put, fresh, given)


class InFlight:
    """Updates that were dispatched and whose metrics were not read yet.

    Args:
        receive: called with each update's number and metrics, in order.
        parameters: names of the parameters, in the order of the metric `finite`.
        max_skipped: updates in a row that may be skipped where the loss is scaled.
    """

    def __init__(
        self, receive: Callable[[int, dict[str, Any]], None], parameters: list[str], max_skipped: int
    ) -> None:
        self._receive = receive
        self._parameters = parameters
        self._max_skipped = max_skipped
        self._pending: deque[tuple[int, Metrics]] = deque()

    def add(self, step: int, metrics: Metrics) -> None:
        """Takes in an update, and waits until no more than `IN_FLIGHT` are under way."""
        self._pending.append((step, metrics))
        self.settle(IN_FLIGHT)

    def settle(self, bound: int = 0) -> None:
        """Reads metrics until at most `bound` updates are in flight.

        Raises:
            DivergedError: an update was not finite, and skipping it is no cure.
        """
        while len(self._pending) > bound:
            step, metrics = self._pending.popleft()
            values = jax.device_get(metrics)
            self._receive(step, values)
            tolerated = "loss_scale" in values and values["skipped_in_a_row"] < self._max_skipped
            if not np.all(values["finite"]) and not tolerated:
                raise DivergedError(self._diagnosis(step, values))

    def _diagnosis(self, step: int, values: dict[str, Any]) -> str:
        names = [*self._parameters, "none (the loss or the batch statistics)"]
        text = (
            f"update {step} is not finite: loss {float(values['loss']):g}, gradient norm "
            f"{float(values['gradient_norm']):g}, first bad parameter "
            f"{names[int(np.argmin(values['finite']))]}. Nothing saved holds such values. "
        )
        if "loss_scale" in values:
            text += (
                f"It is number {int(values['skipped_in_a_row'])} in a row (precision.max_skipped_updates) "
                f"and the scale is down to {float(values['loss_scale']):g}, so it is not the cause. "
            )
        return text + (
            "Try a lower optimizer.learning_rate, a longer optimizer.warmup_epochs or an "
            "optimizer.clip_norm, and look at the data of this update."
        )
