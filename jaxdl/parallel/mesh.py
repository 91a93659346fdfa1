"""Named axes over the devices at hand."""

import math
import os
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jaxdl.config import ParallelConfig
from jaxdl.errors import ConfigError

BATCH_AXIS = "data"
"""Mesh axis over which each batch is split."""


def make_mesh(
    config: ParallelConfig, *, batch_size: int, accumulate: int, devices: list[Any] | None = None
) -> Mesh:
    """Lays the devices out as the configuration asks.

    Args:
        config: size of each axis; -1 takes the devices that remain.
        batch_size: examples per update.
        accumulate: micro-batches per update; the devices must share each evenly.
        devices: described ones to plan for; None takes those at hand.

    Returns:
        A mesh with the axis `data`.

    Raises:
        ConfigError: more devices are asked for than there are, or they do not
            divide the batch.
    """
    if devices is None:
        devices = _devices_at_hand()
    size = len(devices) if config.data == -1 else config.data
    if size > len(devices):
        raise ConfigError(
            f"parallel.data: {config.data} devices asked for, but this machine has {len(devices)} "
            f"({devices[0].platform}). Allowed: 1 to {len(devices)}, or -1 for all."
        )
    unit = size * accumulate
    if batch_size % unit:
        near = sorted({max(batch_size // unit, 1) * unit, math.ceil(batch_size / unit) * unit})
        raise ConfigError(
            f"data.batch_size: {batch_size} examples do not divide evenly among {size} devices "
            f"(parallel.data) x {accumulate} micro-batches (memory.accumulate); the nearest sizes that do: "
            f"{' or '.join(map(str, near))}."
        )
    return jax.make_mesh((size,), (BATCH_AXIS,), axis_types=(AxisType.Auto,), devices=devices[:size])


def _devices_at_hand() -> list[Any]:
    try:
        return jax.devices()
    # JAX has no error of its own for a platform that cannot be started.
    except (RuntimeError, AssertionError, ValueError) as error:
        asked = os.environ.get("JAX_PLATFORMS", "any platform")
        raise ConfigError(
            f"JAX cannot start {asked} ({str(error) or 'its plugin or driver is missing'}): check "
            "JAX_PLATFORMS, and that the extra for this accelerator is installed (.[cuda12] or .[tpu])."
        ) from error
