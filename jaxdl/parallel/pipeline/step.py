"""A training step in parts, each compiled for the devices of a stage, handed out in a schedule's order."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.parallel.copies import Copies
from jaxdl.parallel.pipeline.chain import run
from jaxdl.parallel.pipeline.schedules import SCHEDULES, Action, simulate
from jaxdl.parallel.pipeline.stages import Stages
from jaxdl.parallel.plan import abstract

PLACE = "place in the batch"
"""Name under which micro-batches carry their examples' places; none that an array of a task has."""

Watch = Callable[[Action], None]
"""Told of each action after it was handed out."""


@dataclass(frozen=True)
class Stage:
    """What is compiled for one stage.

    Attributes:
        spread: `(params) -> params`, a copy for each of the devices that share the batch; None where
            there is one.
        forward: `(params, model_state, counters, x, micro) -> (y, aux, backward's residuals)`.
        backward: `(residuals, gradient of y, total) -> (total, gradient of x)`; adds to the sums of
            gradients.
        zeros: `() -> total` to start from.
        finish: `(total, loss, weight, counters) -> (mean gradients, sum of their squares, mean loss)`.
        propose: `(view of the state, gradients, norm, loss, model_state) -> (view of the next, finite)`.
        settle: `(view, next, accepted) -> next`, where the loss is scaled.
        x: abstract input, on this stage's devices.
        y: abstract output, likewise.
    """

    spread: Any
    forward: Any
    backward: Any
    zeros: Any
    finish: Any
    propose: Any
    settle: Any
    x: Any
    y: Any


class StagedTrainStep:
    """The step `(state, parts) -> (state, metrics)`; the given state's memory is reused.

    Args:
        plan: the stages.
        schedule: a name in `SCHEDULES`.
        step: the pure step, whose parts are compiled for each stage.
        state: abstract state, laid out.
        inputs: abstract micro-batches by stage.
        watch: told of each action after it was handed out.

    Attributes:
        stages: what was compiled.
    """

    def __init__(
        self, plan: Stages, schedule: str, step: Any, state: Any, inputs: Any, *, watch: Watch
    ) -> None:
        self._plan, self._watch, self._split = plan, watch, plan.split(state)
        self._scaled = state.loss_scale is not None
        count, parts = len(plan.stages), plan.parts
        orders = SCHEDULES[schedule](count, parts)
        # A backward pass takes about twice as long as a forward one; the order of each stage is the
        # schedule's in any case.
        self._actions = list(simulate(orders, {"forward": 1.0, "backward": 2.0}))
        views = [self._split.take(state, stage) for stage in range(count)]
        examples = parts * inputs[0][0][PLACE].shape[0]
        self.stages: list[Stage] = []
        x = None
        for stage, view in enumerate(views):
            with plan.placed(stage), step.matmul_precision():
                self.stages.append(_compile_stage(plan, step, stage, view, x, inputs[stage][0], examples))
            if stage + 1 < count:
                x = abstract(self.stages[-1].y, plan.batch_sharding(stage + 1))
        last = plan.replicated(count - 1)
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=last)

        def sums(losses: list[jax.Array], weights: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            return jnp.stack(losses).sum(), jnp.stack(weights).sum()

        self._sums = jax.jit(sums, out_shardings=last).lower([scalar] * parts, [scalar] * parts).compile()
        self._norm = (
            jax.jit(lambda squares: jnp.sqrt(jnp.stack(squares).sum()), out_shardings=last)
            .lower([scalar] * count)
            .compile()
        )
        # Parameters in the order of the whole state, each with the entries of `finite` of the stages that
        # have some of it; the last entry of each stage is that of loss and statistics.
        entries = self._parameter_entries(state)

        def conclude(finites: list[jax.Array], norm: jax.Array, loss: jax.Array, counters: Any) -> Any:
            by_parameter = [jnp.stack([finites[s][i] for s, i in places]).all() for places in entries]
            finite = jnp.stack([*by_parameter, jnp.stack([each[-1] for each in finites]).all()])
            accepted = finite.all()
            return step.metrics(counters, loss, norm, finite, accepted), accepted

        finites = [
            jax.ShapeDtypeStruct((len(jax.tree.leaves(view.params)) + 1,), bool, sharding=last)
            for view in views
        ]
        self._conclude = (
            jax.jit(conclude, out_shardings=last)
            .lower(finites, scalar, scalar, _counters(views[-1]))
            .compile()
        )

    def __call__(self, state: Any, parts: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Makes one update.

        Args:
            state: laid out by the plan.
            parts: what the plan's `put` gave.
        """
        count = len(self.stages)
        views = [self._split.take(state, stage) for stage in range(count)]
        counters = [_counters(view) for view in views]
        model_states = [view.model_state for view in views]
        params = [
            view.params if stage.spread is None else stage.spread(view.params)
            for stage, view in zip(self.stages, views, strict=True)
        ]
        totals = [stage.zeros() for stage in self.stages]
        sent: dict[tuple[int, int], Any] = {}  # what a stage was sent for a micro-batch and has not used yet
        residuals: dict[tuple[int, int], Any] = {}
        losses, weights = [], []
        for action in self._actions:
            own, part = action.stage, action.part
            stage = self.stages[own]
            if action.kind == "forward":
                y, aux, residuals[own, part] = stage.forward(
                    params[own], model_states[own], counters[own], sent.pop((own, part), None),
                    parts[own][part],
                )  # fmt: skip
                rest, model_states[own], *sums = aux
                if own + 1 < count:
                    to = self._plan.batch_sharding(own + 1)
                    sent[own + 1, part] = jax.device_put(_combine(y, rest), to)
                else:
                    losses.append(sums[0])
                    weights.append(sums[1])
                del y, aux, rest, sums
            else:
                gradient = sent.pop((own, part), None)
                totals[own], gradient = stage.backward(residuals.pop((own, part)), gradient, totals[own])
                if own > 0:
                    sent[own - 1, part] = jax.device_put(gradient, self._plan.batch_sharding(own - 1))
                del gradient
            self._watch(action)
        loss, weight = self._sums(losses, weights)
        finished = [
            stage.finish(total, *self._to_stage(own, (loss, weight)), counter)
            for own, (stage, total, counter) in enumerate(zip(self.stages, totals, counters, strict=True))
        ]
        del totals, params
        loss = finished[-1][2]
        norm = self._norm([self._to_stage(count - 1, squares) for _, squares, _ in finished])
        after, finites = [], []
        # What the metrics need of the state before the update, before its memory is reused.
        kept = jax.tree.map(jnp.copy, counters[-1])
        for own, (stage, (gradients, _, _)) in enumerate(zip(self.stages, finished, strict=True)):
            proposed, finite = stage.propose(
                views[own], gradients, *self._to_stage(own, (norm, loss)), model_states[own]
            )
            after.append(proposed)
            finites.append(self._to_stage(count - 1, finite))
        metrics, accepted = self._conclude(finites, norm, loss, kept)
        if self._scaled:
            after = [
                stage.settle(view, proposed, self._to_stage(own, accepted))
                for own, (stage, view, proposed) in enumerate(zip(self.stages, views, after, strict=True))
            ]
        return self._split.join(after), metrics

    def _to_stage(self, stage: int, tree: Any) -> Any:
        return jax.device_put(tree, self._plan.replicated(stage))

    def _parameter_entries(self, state: Any) -> list[list[tuple[int, int]]]:
        split = self._plan.split(state.params)
        entries: list[list[tuple[int, int]]] = [[] for _ in jax.tree.leaves(state.params)]
        for stage in range(len(self._plan.stages)):
            for i, place in enumerate(split.places(stage)):
                entries[place].append((stage, i))
        return entries


def _compile_stage(
    plan: Stages, step: Any, number: int, view: Any, x: Any, micro: Any, examples: int
) -> Stage:
    pieces, last = plan.stages[number], number == len(plan.stages) - 1
    batch, whole = plan.batch_sharding(number), plan.replicated(number)
    counters = _counters(view)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, view)

    copies = Copies.here()
    spread, params = None, view.params
    if copies.count > 1:
        spread, params = _compiled(jax.jit(copies.spread), view.params)

    def forward(params: Any, model_state: Any, counters: Any, x: Any, micro: Any) -> Any:
        factor = step.factor(counters, examples)

        def of_copy(params: Any, model_state: Any, x: Any, micro: Any, keys: jax.Array) -> Any:
            floats, rest = _parted(x)

            def apply(params: Any, floats: Any) -> Any:
                x = _combine(floats, rest)
                y, after = run(pieces, params, model_state, x, micro, keys, train=True)
                if last:
                    loss, weight = y
                    return loss * factor, (None, after, loss, weight)
                floats_after, others = _parted(y)
                return floats_after, (others, after)

            # Within the map over copies, and so is the backward pass: what copies share has its axis there.
            return jax.vjp(apply, params, floats, has_aux=True)

        keys = step.keys(counters, micro[PLACE])
        y, residuals, (others, after, *sums) = copies.each(of_copy, (0, None, 0, 0, 0))(
            params, model_state, *copies.split((x, micro, keys))
        )
        y = copies.total(y) if last else copies.join(y)
        return y, (copies.join(others), copies.mean(after), *copies.total(sums)), residuals

    sums = (whole, whole) if last else ()
    out_shardings = (whole if last else batch, (batch, shardings.model_state, *sums), None)
    compiled_forward, (y, aux, residuals) = _compiled(
        jax.jit(forward, out_shardings=out_shardings), params, view.model_state, counters, x, micro
    )
    totals = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), params
    )
    total_shardings = jax.tree.map(lambda leaf: leaf.sharding, totals)

    def backward(residuals: Any, gradient: Any, totals: Any) -> Any:
        def of_copy(residuals: Any, gradient: Any) -> Any:
            return residuals(jnp.float32(1) if last else gradient)

        gradients, gradient = copies.each(of_copy, (0, 0))(residuals, copies.split(gradient))
        add = lambda total, part: total + part.astype(total.dtype)  # noqa: E731
        return jax.tree.map(add, totals, gradients), copies.join(gradient)

    def finish(totals: Any, loss: jax.Array, weight: jax.Array, counters: Any) -> Any:
        totals = copies.total(totals)
        gradients, loss = step.means(view.params, totals, loss, weight, step.factor(counters, examples))
        squares = [jnp.square(leaf.astype(jnp.float32)).sum() for leaf in jax.tree.leaves(gradients)]
        return gradients, jnp.stack(squares).sum(), loss

    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    scaled = view.loss_scale is not None
    compiled_settle = None
    if scaled:
        accepted = jax.ShapeDtypeStruct((), bool, sharding=whole)
        compiled_settle = (
            jax.jit(step.settle, out_shardings=shardings, donate_argnums=0)
            .lower(view, view, accepted)
            .compile()
        )
    return Stage(
        spread=spread,
        forward=compiled_forward,
        backward=jax.jit(backward, out_shardings=(total_shardings, batch), donate_argnums=2)
        .lower(residuals, None if last else y, totals)
        .compile(),
        zeros=jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), totals),
            out_shardings=total_shardings,
        )
        .lower()
        .compile(),
        # The sum over copies is an array of its own.
        finish=jax.jit(
            finish,
            out_shardings=(shardings.params, whole, whole),
            donate_argnums=0 if copies.count == 1 else (),
        )
        .lower(totals, scalar, scalar, counters)
        .compile(),
        # Where the update may yet be refused, the state has to stay.
        propose=jax.jit(step.propose, out_shardings=(shardings, whole), donate_argnums=() if scaled else 0)
        .lower(view, view.params, scalar, scalar, view.model_state)
        .compile(),
        settle=compiled_settle,
        x=x,
        y=_combine(y, aux[0]),
    )


def _compiled(function: Any, *arguments: Any) -> tuple[Any, Any]:
    """Compiles a function that `jax.jit` gave; with it, its abstract result, laid out."""
    lowered = function.lower(*arguments)
    compiled = lowered.compile()
    result = jax.tree.map(
        lambda info, sharding: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding),
        lowered.out_info,
        compiled.output_shardings,
    )
    return compiled, result


def _counters(view: Any) -> Any:
    """What a pass needs of a state besides parameters and statistics."""
    return dataclasses.replace(view, params=None, model_state=None, opt_state=None, ema=None)


def _parted(tree: Any) -> tuple[Any, Any]:
    """Parts what can be differentiated from what cannot; each has None in place of the other's arrays."""

    def is_float(leaf: Any) -> bool:
        return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))

    return (
        jax.tree.map(lambda leaf: leaf if is_float(leaf) else None, tree),
        jax.tree.map(lambda leaf: None if is_float(leaf) else leaf, tree),
    )


def _combine(floats: Any, others: Any) -> Any:
    """Undoes `_parted`."""
    return jax.tree.map(
        lambda left, right: right if left is None else left, floats, others, is_leaf=lambda leaf: leaf is None
    )
