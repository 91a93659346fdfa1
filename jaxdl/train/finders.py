"""The learning rate range test: how the loss answers to a rate that grows from update to update.

Smith 2017 (https://arxiv.org/abs/1506.01186) trains a little while the rate rises; where the loss falls
fastest, and where it turns, say in which decade the best rate lies. The exponential growth, the smoothing,
the end at four times the best loss, and the two rules that read the curve are in common use since fastai.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxdl.config import Config, ProfileConfig, TrainConfig
from jaxdl.optim.build import build_optimizer
from jaxdl.train.program import Program, prepare, stacked_layers
from jaxdl.train.task import Task

Run = TypeVar("Run", bound=Config)

STOP_AT = 4.0
"""The test is over once the smoothed loss is this many times its best."""

CLEAR = 4.0
"""A fall of the smoothed loss by fewer standard deviations of its noise is taken for noise."""


@dataclass(frozen=True)
class Suggestion:
    """What the curve of a range test says.

    Attributes:
        steepest: the rate at which the smoothed loss falls fastest; None if the curve tells nothing.
        minimum: the rate at which it is lowest; None likewise.
        reason: why there is no suggestion, and what would help; None where there is one.
    """

    steepest: float | None
    minimum: float | None
    reason: str | None = None

    @property
    def minimum_tenth(self) -> float | None:
        """The other usual rule: a tenth of the rate at the minimum."""
        return None if self.minimum is None else self.minimum / 10


def range_program(
    config: Config, task: Task, examples: int, *, first: float, last: float, updates: int
) -> Program:
    """Works out the run as configured, but with a learning rate that grows exponentially.

    Args:
        config: the whole run; its schedule, warm-up and length are set aside.
        task: model and loss.
        examples: size of the training set.
        first: rate of the first update, as applied: nothing scales it.
        last: rate of the last update.
        updates: number of updates, at least 2.

    Raises:
        ConfigError: the settings do not fit the devices.
    """
    growth = math.log(last / first) / (updates - 1)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        return first * jnp.exp(growth * jnp.asarray(count, jnp.float32))

    program = prepare(without_schedule(config, updates), task, examples)
    optimizer = build_optimizer(config.optimizer, schedule, layer_axes=stacked_layers(task))
    # `init` may stay: the state of an optimizer depends on its rule, not on its schedule.
    return replace(
        program,
        optimizer=optimizer,
        train_step=replace(program.train_step, optimizer=optimizer, schedule=schedule),
    )


def without_schedule(config: Run, updates: int) -> Run:
    """Gives the same run with a constant rate and another length, so that no warm-up is too long for it."""
    return replace(
        config,
        optimizer=replace(config.optimizer, schedule="constant", warmup_epochs=0.0, warmup_steps=None),
        train=TrainConfig(steps=updates),
        profile=ProfileConfig(),
    )


def range_test(
    step: Callable[[Any, Any], tuple[Any, dict[str, Any]]],
    state: Any,
    batches: Iterable[Any],
    *,
    updates: int,
    smoothing: float = 0.9,
    max_skipped: int = 1,
    seen: Callable[[int, float, float], None] = lambda update, rate, loss: None,
) -> list[tuple[float, float]]:
    """Trains while the rate grows, until the loss blows up.

    Updates that a loss scale makes the step skip are made up for with further batches.

    Args:
        step: `(state, batch) -> (state, metrics)` with `learning_rate`, `loss` and `finite`.
        state: the first state; its memory may be reused.
        batches: at least `updates`.
        updates: length of the test, if the loss lasts that long.
        smoothing: see `smoothing_over`.
        max_skipped: updates in a row that are not finite at which the test is over, where the loss is
            scaled. Without a loss scale the first ends it.
        seen: told the update's number, rate and loss.

    Returns:
        Rate and loss of each update that was finite.
    """
    curve: list[tuple[float, float]] = []
    smooth = Smooth(smoothing)
    best, skipped = float("inf"), 0
    for batch in batches:
        state, metrics = step(state, batch)
        values = jax.device_get(metrics)
        rate, loss = float(values["learning_rate"]), float(values["loss"])
        if not np.all(values["finite"]):
            skipped += 1
            if "loss_scale" not in values or skipped >= max_skipped:
                break
            continue
        skipped = 0
        curve.append((rate, loss))
        seen(len(curve), rate, loss)
        smoothed = smooth(loss)
        best = min(best, smoothed)
        if len(curve) == updates or 0 < STOP_AT * best < smoothed:
            break
    return curve


class Smooth:
    """Exponential moving average, corrected for its start from zero as in Adam.

    Args:
        smoothing: weight of the past.
    """

    def __init__(self, smoothing: float) -> None:
        self._smoothing, self._sum, self._weight = smoothing, 0.0, 0.0

    def __call__(self, value: float) -> float:
        """Takes in a value and gives the average so far."""
        self._sum = self._smoothing * self._sum + (1 - self._smoothing) * value
        self._weight = self._smoothing * self._weight + (1 - self._smoothing)
        return self._sum / self._weight


def smoothing_over(updates: int) -> float:
    """Gives the weight of the past with which averages cover about a tenth of a test: 0.9 for 100 updates.

    So curves are smoothed over the same stretch of rates, however many updates it takes.
    """
    return 1 - 10 / max(updates, 20)


def smoothed(losses: Sequence[float], smoothing: float = 0.9) -> NDArray[np.float64]:
    """Smooths a curve as `range_test` does."""
    smooth = Smooth(smoothing)
    return np.array([smooth(loss) for loss in losses], np.float64)


def suggest(rates: Sequence[float], losses: Sequence[float], smoothing: float = 0.9) -> Suggestion:
    """Reads the curve of a range test.

    The first tenth of the updates is left out, since the average settles there.

    Args:
        rates: learning rates, each larger than the one before.
        losses: loss of each update, finite and not smoothed.
        smoothing: see `smoothing_over`.
    """
    skip, width = len(rates) // 10, round(1 / (1 - smoothing))
    if len(rates) < 10:
        return _none(
            f"only {len(rates)} updates stayed finite, too few to tell: start the range at a smaller rate"
        )
    curve = smoothed(losses, smoothing)
    lowest = skip + int(np.argmin(curve[skip:]))
    # The noise grows with the rate, so it is asked for at both ends of the fall.
    ends = losses[: skip + width], losses[max(lowest - 2 * width, 0) : lowest + width]
    noise = CLEAR * math.hypot(*(_noise(end, smoothing) for end in ends))
    noise = max(noise, 1e-3 * abs(float(curve[skip])))
    if curve[skip] - curve[lowest] <= noise:
        risen = np.flatnonzero(curve[skip:] > curve[skip] + noise)
        if risen.size:
            return _none(
                f"the loss rises, from a rate of about {rates[skip + risen[0]]:.2g} on, and does not clearly "
                "fall before: start the range at a smaller rate, or take a larger batch or more updates"
            )
        return _none(
            "the loss does not move beyond its noise: end the range at a larger rate, or take a larger batch "
            "or more updates"
        )
    # Slopes across the width of the average: from one update to the next they are all noise.
    half = width // 2
    places = np.arange(min(skip + half, lowest), lowest + 1)
    before, after = np.maximum(places - half, 0), np.minimum(places + half, len(rates) - 1)
    log_rates = np.log(rates)
    slopes = (curve[after] - curve[before]) / (log_rates[after] - log_rates[before])
    steepest = int(places[np.argmin(slopes)])
    return Suggestion(float(rates[steepest]), float(rates[lowest]))


def _none(reason: str) -> Suggestion:
    return Suggestion(None, None, reason)


def _noise(losses: Sequence[float], smoothing: float) -> float:
    """Estimates the standard deviation of the smoothed curve around its course.

    From second differences, which a straight course leaves at zero, and their median, which the few updates
    of a sharp turn do not move.
    """
    second = np.abs(np.diff(losses, n=2))
    deviation = float(np.median(second)) / 0.6745 / 6**0.5
    return float(deviation * ((1 - smoothing) / (1 + smoothing)) ** 0.5)
