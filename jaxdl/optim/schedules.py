"""Learning rate as a function of the number of updates made."""

import math

import optax

from jaxdl.config import OptimizerConfig
from jaxdl.errors import ConfigError

REFERENCE_BATCH = 256
"""The batch for which learning rates are stated (Goyal et al. 2017)."""


def peak_learning_rate(config: OptimizerConfig, batch_size: int) -> float:
    """Gives the learning rate at the end of the warm-up for a global batch."""
    if not config.scale_with_batch:
        return config.learning_rate
    return config.learning_rate * batch_size / REFERENCE_BATCH


def build_schedule(
    config: OptimizerConfig, *, batch_size: int, updates: int, updates_per_epoch: float
) -> optax.Schedule:
    """Builds the schedule: linear warm-up, then the configured shape, then its last value for ever.

    Update `t` (from 0) of a warm-up over `w` updates uses `(t + 1) / w` of the
    peak, so the first update already moves the parameters.

    Args:
        config: shape, peak and warm-up.
        batch_size: examples per update, over all devices and micro-batches.
        updates: length of the run.
        updates_per_epoch: may be fractional, since batches run across epochs.

    Returns:
        A function of the update count, usable inside a compiled step.

    Raises:
        ConfigError: the warm-up leaves no update at the peak, or the step
            schedule drops the rate before the warm-up is over.
    """
    peak = peak_learning_rate(config, batch_size)
    warmup = round(config.warmup_epochs * updates_per_epoch)
    if config.warmup_steps is not None:
        warmup = config.warmup_steps
        if warmup >= updates:
            raise ConfigError(
                f"optimizer.warmup_steps: {warmup}, but the run has only {updates} updates: choose fewer, or "
                "a longer run."
            )
    if warmup >= updates:
        raise ConfigError(
            f"optimizer.warmup_epochs: {config.warmup_epochs:g} epochs are {warmup} updates, but the run has "
            f"only {updates}. Choose at most {math.floor((updates - 1) / updates_per_epoch * 1000) / 1000:g} "
            "(0 turns the warm-up off), or a longer run."
        )
    after = updates - warmup
    match config.schedule:
        case "cosine":
            main = optax.cosine_decay_schedule(peak, after, alpha=config.end_factor)
        case "polynomial":
            main = optax.polynomial_schedule(peak, peak * config.end_factor, config.polynomial_power, after)
        case "step":
            drops = [round(epoch * updates_per_epoch) for epoch in config.step_epochs]
            if drops and drops[0] < warmup:
                raise ConfigError(
                    f"optimizer.step_epochs: the first drop (epoch {config.step_epochs[0]:g}) falls into the "
                    f"warm-up of {config.warmup_epochs:g} epochs."
                )
            # One drop may cover several epochs' marks in a very short run, so the factors multiply.
            factors: dict[int, float] = {}
            for drop in drops:
                factors[drop - warmup] = factors.get(drop - warmup, 1.0) * config.step_factor
            main = optax.piecewise_constant_schedule(peak, factors)
        case "constant":
            main = optax.constant_schedule(peak)
    if warmup == 0:
        return main
    ramp = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([ramp, main], [warmup])
