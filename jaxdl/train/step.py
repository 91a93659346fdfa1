"""The one step: a pure function of state and batch that knows no device."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdl.config import PrecisionConfig
from jaxdl.optim.clip import global_norm
from jaxdl.precision import next_loss_scale, parse_policy
from jaxdl.train.state import TrainState
from jaxdl.train.task import Batch, Task

FLOAT32 = PrecisionConfig()
Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvalStep = Callable[[tuple[Any, Any], Batch], Metrics]


def make_train_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    seed: int,
    accumulate: int = 1,
    ema_decay: float | None = None,
    precision: PrecisionConfig = FLOAT32,
) -> TrainStep:
    """Writes the training step of a task.

    Where the loss is scaled, an update whose loss, gradients or new values are
    not all finite changes nothing but the scale and its counters: all else of
    the returned state is the given one, bit for bit. The decision is one for
    all micro-batches and devices, since it is taken on the sums over them.
    Without a scale such an update is told of (`finite`) and applied: nothing is
    gained by going on from the state before it, and to keep that state costs
    memory and time in every update.

    Args:
        task: model and loss.
        optimizer: transformation of mean gradients.
        schedule: learning rate by update count, for the metrics only; the optimizer holds its own.
        seed: the run's seed; dropout draws from (seed, step, micro-batch).
        accumulate: micro-batches per update. Micro-batch `i` takes the examples
            `i, i + accumulate, ...`, so each keeps the batch's layout over devices.
        ema_decay: decay of the moving averages, if the state carries them.
        precision: the policy's precision of matrix products, and the rule of the loss scale.

    Returns:
        `train_step(state, batch) -> (state, metrics)` with float32 scalars
        `loss`, `learning_rate`, `gradient_norm` (before clipping), and the bool
        vector `finite`: one value a parameter in the order of
        `jax.tree.leaves(state.params)`, then one for loss and statistics. Where
        the loss is scaled there are also `loss_scale`, the one used, and the
        counts `skipped_updates` and `skipped_in_a_row` after this update.
    """
    policy = parse_policy(precision.policy)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        with jax.default_matmul_precision(policy.matmul):
            gradients, loss, model_state = mean_gradients(task, state, batch, key, accumulate)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        proposed = TrainState(
            step=state.step + 1,
            params=params,
            model_state=model_state,
            opt_state=opt_state,
            ema=moving_average(state, (params, model_state), ema_decay),
            loss_scale=state.loss_scale,
        )
        # The new parameters too: they may leave the range of their dtype although the gradients are finite.
        finite = jnp.stack(
            [
                *map(all_finite, jax.tree.leaves(gradients), jax.tree.leaves(params)),
                all_finite(loss, *jax.tree.leaves(model_state)),
            ]
        )
        metrics = {
            "loss": loss,
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "gradient_norm": global_norm(gradients),
            "finite": finite,
        }
        if state.loss_scale is None:
            return proposed, metrics
        # The number of bad entries as a product: XLA:CPU computes a product once, but would repeat a plain
        # conjunction, with all that it depends on, inside each of the selects below (compiling a ResNet-50
        # took three times as long).
        bad = jnp.dot(jnp.where(finite, 0.0, 1.0), jnp.ones(finite.shape, jnp.float32))
        accepted = bad == 0
        new_state = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), proposed, state)
        after = next_loss_scale(state.loss_scale, accepted, precision)
        metrics |= {
            "loss_scale": state.loss_scale.scale,
            "skipped_updates": after.skipped,
            "skipped_in_a_row": after.skipped_in_a_row,
        }
        return replace(new_state, loss_scale=after), metrics

    return train_step


def make_eval_step(task: Task, precision: PrecisionConfig = FLOAT32) -> EvalStep:
    """Writes the evaluation step: `(params, model_state), batch -> each example's metrics`."""
    policy = parse_policy(precision.policy)

    def eval_step(weights: tuple[Any, Any], batch: Batch) -> Metrics:
        with jax.default_matmul_precision(policy.matmul):
            return task.evaluate(*weights, batch)

    return eval_step


def mean_gradients(
    task: Task, state: TrainState, batch: Batch, key: jax.Array, accumulate: int
) -> tuple[Any, jax.Array, Any]:
    """Differentiates the mean loss of a batch, by micro-batches if asked.

    Losses, weights and gradients are summed over all micro-batches and divided
    once, so micro-batches of unequal weight give the whole batch's gradient.
    What is differentiated is the loss in units of the whole batch times the
    loss scale, so that 16-bit gradients are of the size of a mean's.

    Args:
        task: model and loss.
        state: parameters, statistics and loss scale to start from.
        batch: arrays of shape [batch, ...].
        key: random key of this update.
        accumulate: number of micro-batches, a divisor of the batch.

    Returns:
        Mean gradients like the parameters, the mean loss, and the statistics
        after the last micro-batch.
    """

    def objective(params: Any, model_state: Any, micro: Batch, key: jax.Array) -> tuple[jax.Array, Any]:
        loss, weight, model_state = task.loss(params, model_state, micro, key)
        return loss * factor, (loss, weight, model_state)

    examples = jax.tree.leaves(batch)[0].shape[0]
    # A power of two, so that without a loss scale the gradients are those of the plain sum, bit for bit.
    factor = jnp.float32(2.0 ** -round(math.log2(examples)))
    if state.loss_scale is not None:
        factor = factor * state.loss_scale.scale

    differentiate = jax.value_and_grad(objective, has_aux=True)
    if accumulate == 1:
        (_, (loss, weight, model_state)), gradients = differentiate(
            state.params, state.model_state, batch, key
        )
    else:

        def add(carry: Any, micro: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            total, total_loss, total_weight, model_state = carry
            (_, (loss, weight, model_state)), gradients = differentiate(state.params, model_state, *micro)
            total = jax.tree.map(lambda total, part: total + part.astype(total.dtype), total, gradients)
            return (total, total_loss + loss, total_weight + weight, model_state), None

        zeros = jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), state.params)
        start = (zeros, jnp.float32(0), jnp.float32(0), state.model_state)
        micro_batches = jax.tree.map(
            lambda array: array.reshape(-1, accumulate, *array.shape[1:]).swapaxes(0, 1), batch
        )
        keys = jax.random.split(key, accumulate)
        (gradients, loss, weight, model_state), _ = jax.lax.scan(add, start, (micro_batches, keys))
    # A batch without any weight has loss 0 and gradient 0, not NaN.
    divisor = jnp.maximum(weight, 1)
    gradients = jax.tree.map(
        lambda total, param: (total.astype(jnp.float32) / (divisor * factor)).astype(param.dtype),
        gradients,
        state.params,
    )
    return gradients, loss / divisor, model_state


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
