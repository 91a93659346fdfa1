"""What a run carries from one update to the next."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdl.precision import LossScale
from jaxdl.train.task import Task


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that an update reads and writes; a checkpoint is this tree.

    Random streams are not part of it: they are derived from (seed, step).

    Attributes:
        step: int32 scalar, updates made.
        params: parameters in the policy's parameter dtype.
        model_state: float32 running statistics of normalisation layers.
        opt_state: the optimizer's moments and counters.
        ema: float32 moving averages `(params, model_state)`, or None when they are off.
        loss_scale: scale of the loss and counts of skipped updates, or None where the loss is not scaled.
    """

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: optax.OptState
    ema: tuple[Any, Any] | None
    loss_scale: LossScale | None = None

    @property
    def evaluated(self) -> tuple[Any, Any]:
        """The `(params, model_state)` that evaluation uses: the averages where they are kept."""
        return (self.params, self.model_state) if self.ema is None else self.ema


def init_state(
    task: Task,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    keep_average: bool,
    loss_scale: LossScale | None = None,
) -> TrainState:
    """Builds the state before the first update; a pure function, to be compiled by the plan.

    Args:
        task: supplies the initial parameters and statistics.
        optimizer: its state is laid out like the parameters.
        seed: the run's seed.
        keep_average: whether to carry moving averages.
        loss_scale: the first loss scale.

    Returns:
        A state with `step` 0.
    """
    params, model_state = task.init(jax.random.key(seed))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_state=model_state,
        opt_state=optimizer.init(params),
        # Copies, since a donated state must not hold one buffer twice; float32, since averages move little.
        ema=jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), (params, model_state))
        if keep_average
        else None,
        loss_scale=loss_scale,
    )
