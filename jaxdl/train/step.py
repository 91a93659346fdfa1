"""The one step: a pure function of state and batch that knows no device."""

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdl.config import PrecisionConfig
from jaxdl.optim.clip import global_norm
from jaxdl.parallel.copies import Copies
from jaxdl.parallel.replicas import ALONE, Replicas
from jaxdl.precision import next_loss_scale, parse_policy
from jaxdl.train.state import TrainState
from jaxdl.train.task import Batch, Task

FLOAT32 = PrecisionConfig()
Metrics = dict[str, jax.Array]


@dataclass(frozen=True, eq=False)  # by identity, since models may hold what cannot be hashed
class TrainStep:
    """The training step of a task, called as `step(state, batch) -> (state, metrics)`.

    Where the loss is scaled, an update whose loss, gradients or new values are
    not all finite changes nothing but the scale and its counters: all else of
    the returned state is the given one, bit for bit. The decision is one for
    all micro-batches and devices, since it is taken on the sums over them.
    Without a scale such an update is told of (`finite`) and applied: nothing is
    gained by going on from the state before it, and to keep that state costs
    memory and time in every update.

    Attributes:
        task: model and loss.
        optimizer: transformation of mean gradients.
        schedule: learning rate by update count, for the metrics only; the optimizer holds its own.
        seed: the run's seed; dropout draws from (seed, step, place of the example in the batch), so it
            depends neither on devices nor on micro-batches.
        accumulate: micro-batches per update. Micro-batch `i` takes the examples
            `i, i + accumulate, ...`, so each keeps the batch's layout over devices.
        ema_decay: decay of the moving averages, if the state carries them.
        precision: the policy's precision of matrix products, and the rule of the loss scale.
        replicas: copies of the step, each of which is called with its part of the batch.
    """

    task: Task
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    seed: int
    accumulate: int = 1
    ema_decay: float | None = None
    precision: PrecisionConfig = FLOAT32
    replicas: Replicas = ALONE

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Makes one update.

        Returns:
            The next state, and as metrics the float32 scalars `loss`,
            `learning_rate`, `gradient_norm` (before clipping), and the bool
            vector `finite`: one value a parameter in the order of
            `jax.tree.leaves(state.params)`, then one for loss and statistics.
            Where the loss is scaled there are also `loss_scale`, the one used,
            and the counts `skipped_updates` and `skipped_in_a_row` after this
            update. Where the batch has a bool `stop` or `skipped` [batch], the metric
            of that name counts those that are true.
        """
        batch = self.task.weigh(batch, self.replicas.total)
        keys = self.keys(state, self.replicas.positions(examples_in(batch)))
        with matmul_precision(self.precision):
            gradients, loss, model_state = self.mean_gradients(state, batch, keys)
        norm = global_norm(gradients)
        proposed, finite = self.propose(state, gradients, norm, loss, model_state)
        # The number of bad entries as a product: XLA:CPU computes a product once, but would repeat a plain
        # conjunction, with all that it depends on, inside each of the selects that follow (compiling a
        # ResNet-50 took three times as long).
        bad = jnp.dot(jnp.where(finite, 0.0, 1.0), jnp.ones(finite.shape, jnp.float32))
        metrics = self.metrics(state, loss, norm, finite, bad == 0)
        for name in ("stop", "skipped"):
            if name in batch:
                metrics[name] = self.replicas.total(batch[name].astype(jnp.int32).sum())
        return self.settle(state, proposed, bad == 0), metrics

    def matmul_precision(self) -> contextlib.AbstractContextManager[Any]:
        """The policy's precision of matrix products, for what is traced within it."""
        return matmul_precision(self.precision)

    def keys(self, state: TrainState, positions: jax.Array) -> jax.Array:
        """Gives a random key for each place in the batch, of shape [examples]."""
        key = jax.random.fold_in(jax.random.key(self.seed), state.step)
        keys: jax.Array = jax.vmap(jax.random.fold_in, (None, 0))(key, positions)
        return keys

    def mean_gradients(self, state: TrainState, batch: Batch, keys: jax.Array) -> tuple[Any, jax.Array, Any]:
        """Differentiates the mean loss of a batch, by micro-batches if asked.

        Losses, weights and gradients are summed over all micro-batches and
        copies and divided once, so micro-batches of unequal weight give the
        whole batch's gradient. What is differentiated is the loss in units of
        the whole batch times the loss scale, so that 16-bit gradients are of the
        size of a mean's.

        Args:
            state: parameters, statistics and loss scale to start from.
            batch: arrays of shape [batch, ...].
            keys: a random key for each example.

        Returns:
            Mean gradients like the parameters, the mean loss, and the statistics
            after the last micro-batch.
        """
        factor = self.factor(state, examples_in(batch) * self.replicas.count)

        def objective(params: Any, model_state: Any, micro: Batch, keys: jax.Array) -> tuple[jax.Array, Any]:
            loss, weight, model_state = self.task.loss(params, model_state, micro, keys)
            return loss * factor, (loss, weight, model_state)

        differentiate = jax.value_and_grad(objective, has_aux=True)
        if self.accumulate == 1:
            (_, (loss, weight, model_state)), gradients = differentiate(
                state.params, state.model_state, batch, keys
            )
        else:
            copies = Copies.here()
            params, of_each = copies.spread(state.params), copies.each(differentiate, (0, None, 0, 0))

            def add(carry: Any, micro: tuple[Batch, jax.Array]) -> tuple[Any, None]:
                total, total_loss, total_weight, model_state = carry
                (_, (loss, weight, after)), gradients = of_each(params, model_state, *copies.split(micro))
                total = jax.tree.map(lambda total, part: total + part.astype(total.dtype), total, gradients)
                loss, weight = copies.total((loss, weight))
                return (total, total_loss + loss, total_weight + weight, copies.mean(after)), None

            zeros = copies.spread(
                jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), state.params)
            )
            start = (zeros, jnp.float32(0), jnp.float32(0), state.model_state)
            (gradients, loss, weight, model_state), _ = jax.lax.scan(
                add, start, micro_batches((batch, keys), self.accumulate)
            )
            gradients = copies.total(gradients)
        gradients, loss, weight = self.replicas.total((gradients, loss, weight))
        gradients, loss = self.means(state.params, gradients, loss, weight, factor)
        # Each copy's own statistics, where the copies normalise apart.
        return gradients, loss, self.replicas.mean(model_state)

    def factor(self, state: TrainState, examples: int) -> jax.Array:
        """Gives the factor between the summed loss of a batch and what is differentiated."""
        # A power of two, so that without a loss scale the gradients are those of the plain sum, bit for bit.
        factor: jax.Array = jnp.float32(2.0 ** -round(math.log2(examples)))
        if state.loss_scale is not None:
            factor = factor * state.loss_scale.scale
        return factor

    def means(
        self, params: Any, gradients: Any, loss: jax.Array, weight: jax.Array, factor: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Turns sums into means.

        Args:
            params: parameters, for their dtypes.
            gradients: of the summed loss times `factor`.
            loss: summed loss.
            weight: summed weight.
            factor: as given by the method of that name.

        Returns:
            Mean gradients in the parameters' dtypes, and the mean loss.
        """
        # A batch without any weight has loss 0 and gradient 0, not NaN.
        divisor = jnp.maximum(weight, 1)
        gradients = jax.tree.map(
            lambda total, param: (total.astype(jnp.float32) / (divisor * factor)).astype(param.dtype),
            gradients,
            params,
        )
        return gradients, loss / divisor

    def propose(
        self, state: TrainState, gradients: Any, norm: jax.Array, loss: jax.Array, model_state: Any
    ) -> tuple[TrainState, jax.Array]:
        """Makes the next state, whether it is finite or not.

        Args:
            state: the present state, or a part of it that has its own parameters.
            gradients: mean gradients like its parameters.
            norm: global norm of the gradients of all parameters.
            loss: mean loss.
            model_state: the next statistics.

        Returns:
            The state with the loss scale as it was, and the metric `finite`.
        """
        update = optax.with_extra_args_support(self.optimizer).update
        updates, opt_state = update(gradients, state.opt_state, state.params, norm=norm)
        params = optax.apply_updates(state.params, updates)
        proposed = TrainState(
            step=state.step + 1,
            params=params,
            model_state=model_state,
            opt_state=opt_state,
            ema=moving_average(state, (params, model_state), self.ema_decay),
            loss_scale=state.loss_scale,
        )
        # The new parameters too: they may leave the range of their dtype although the gradients are finite.
        finite = jnp.stack(
            [
                *map(all_finite, jax.tree.leaves(gradients), jax.tree.leaves(params)),
                all_finite(loss, *jax.tree.leaves(model_state)),
            ]
        )
        return proposed, finite

    def settle(self, state: TrainState, proposed: TrainState, accepted: jax.Array) -> TrainState:
        """Takes the proposed state, or where the loss is scaled and it is not accepted, the present one."""
        if state.loss_scale is None:
            return proposed
        chosen: TrainState = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), proposed, state)
        return replace(chosen, loss_scale=next_loss_scale(state.loss_scale, accepted, self.precision))

    def metrics(
        self, state: TrainState, loss: jax.Array, norm: jax.Array, finite: jax.Array, accepted: jax.Array
    ) -> Metrics:
        """Gathers what a step returns besides the state; `state` is that before the update."""
        metrics = {
            "loss": loss,
            "learning_rate": jnp.asarray(self.schedule(state.step), jnp.float32),
            "gradient_norm": norm,
            "finite": finite,
        }
        if state.loss_scale is not None:
            after = next_loss_scale(state.loss_scale, accepted, self.precision)
            metrics |= {
                "loss_scale": state.loss_scale.scale,
                "skipped_updates": after.skipped,
                "skipped_in_a_row": after.skipped_in_a_row,
            }
        return metrics


@dataclass(frozen=True, eq=False)
class EvalStep:
    """The evaluation step of a task, called as `step((params, model_state), batch) -> metrics`.

    Attributes:
        task: model and loss.
        precision: the policy's precision of matrix products.
    """

    task: Task
    precision: PrecisionConfig = FLOAT32

    def __call__(self, weights: tuple[Any, Any], batch: Batch) -> Metrics:
        """Gives each example's metrics, and with them the batch's `mask`, and `stop` if it has one."""
        with matmul_precision(self.precision):
            return self.task.evaluate(*weights, batch) | passed_on(batch)

    def matmul_precision(self) -> contextlib.AbstractContextManager[Any]:
        """The policy's precision of matrix products, for what is traced within it."""
        return matmul_precision(self.precision)


def matmul_precision(precision: PrecisionConfig) -> contextlib.AbstractContextManager[Any]:
    """A policy's precision of matrix products, for what is traced within it."""
    name = parse_policy(precision.policy).matmul
    precise: contextlib.AbstractContextManager[Any] = jax.default_matmul_precision(name)
    return precise


def passed_on(batch: Batch) -> Batch:
    """What an evaluation step returns of the batch: which examples count, and who wants to stop."""
    return {name: batch[name] for name in ("mask", "stop") if name in batch}


def examples_in(batch: Batch) -> int:
    """Counts the examples of a batch."""
    count: int = jax.tree.leaves(batch)[0].shape[0]
    return count


def micro_batches(tree: Any, count: int) -> Any:
    """Divides [batch, ...] to [count, batch / count, ...]; part `i` has the rows `i, i + count, ...`."""
    return jax.tree.map(lambda array: array.reshape(-1, count, *array.shape[1:]).swapaxes(0, 1), tree)


def moving_average(state: TrainState, values: tuple[Any, Any], decay: float | None) -> tuple[Any, Any] | None:
    """Moves the averages towards new values.

    The decay is ramped as min(decay, (1 + n) / (10 + n)) after n updates, so
    that short runs are not dominated by the initial values (as in TensorFlow's
    ExponentialMovingAverage with `num_updates`).
    """
    if state.ema is None or decay is None:
        return None
    updates = state.step.astype(jnp.float32)
    ramped = jnp.minimum(decay, (1 + updates) / (10 + updates))
    values = jax.tree.map(lambda value: value.astype(jnp.float32), values)
    averages: tuple[Any, Any] = optax.incremental_update(values, state.ema, 1 - ramped)
    return averages


def all_finite(*arrays: jax.Array) -> jax.Array:
    """Tells whether every value of every array is finite, as a bool scalar."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(array)) for array in arrays]))
