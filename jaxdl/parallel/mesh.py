"""Named axes over the devices at hand, or over described ones."""

import math
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxdl.config import BATCH_AXES, MESH_AXES, ParallelConfig, uneven_batch
from jaxdl.errors import ConfigError


def make_mesh(
    config: ParallelConfig, *, batch_size: int, accumulate: int, devices: list[Any] | None = None
) -> Mesh:
    """Lays devices out as the configuration asks.

    Axes that send little vary slowest: neighbours, which are linked the fastest, differ in the last axis.

    Args:
        config: size of each axis; -1 takes the devices that remain.
        batch_size: examples per update.
        accumulate: micro-batches per update; the devices must share each evenly.
        devices: described ones to plan for; None takes those at hand, of all processes.

    Returns:
        A mesh with the axes `node`, `pipeline`, `data`, `fsdp` and `tensor`.

    Raises:
        ConfigError: the axes ask for more devices than there are, or the devices do not divide the batch.
    """
    if devices is None:
        devices = devices_at_hand()
    sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
    given = math.prod(size for size in sizes.values() if size != -1)
    product = " x ".join(f"parallel.{axis} {size}" for axis, size in sizes.items() if size > 1)
    asked = f"{product} = {given}" if product else f"parallel.data {given}"
    if given > len(devices):
        raise ConfigError(
            f"{asked} devices are asked for, but there are {len(devices)} "
            f"({devices[0].platform}). "
            f"The product of parallel.{', '.join(MESH_AXES)} may be 1 to {len(devices)}; -1 takes the rest."
        )
    left = len(devices) // given
    if -1 in sizes.values() and left * given != len(devices):
        raise ConfigError(
            f"{asked} does not divide the {len(devices)} devices ({devices[0].platform}), so -1 "
            f"stands for no whole number; {left} in its place leaves {len(devices) - left * given} idle."
        )
    shape = tuple(left if size == -1 else size for size in sizes.values())
    used = math.prod(shape)
    processes = {device.process_index for device in devices}
    if used < len(devices) and len(processes) > 1:
        raise ConfigError(
            f"{asked} devices would leave some of the {len(devices)} devices of {len(processes)} "
            "processes idle: set one of the axes to -1, or start fewer processes."
        )
    mesh = Mesh(_arranged(shape, devices[:used]), MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))
    parts = {"memory.accumulate": accumulate, "parallel.microbatches": config.parts}
    parts |= {f"parallel.{axis}": mesh.shape[axis] for axis in BATCH_AXES}
    if problems := uneven_batch(batch_size, parts):
        raise ConfigError(problems[0])
    return mesh


def batch_shards(mesh: Mesh) -> int:
    """Tells into how many parts each batch is divided over devices."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_share(mesh: Mesh) -> tuple[int, int]:
    """Tells which part of each batch this process's devices have, and of how many equal ones.

    Raises:
        ConfigError: it is not one part without gaps.
    """
    place = [MESH_AXES.index(axis) for axis in BATCH_AXES]
    size = [mesh.shape[axis] for axis in BATCH_AXES]
    # On described devices nothing is loaded, whatever processes they are described to belong to.
    if len({device.process_index for device in mesh.devices.flat}) > jax.process_count():
        return 0, 1
    mine = jax.process_index()
    shards = sorted(
        {
            int(np.ravel_multi_index([where[axis] for axis in place], size))
            for where, device in np.ndenumerate(mesh.devices)
            if device.process_index == mine
        }
    )
    if not shards:
        return 0, 1
    first, count = shards[0], len(shards)
    if shards != list(range(first, first + count)) or first % count or math.prod(size) % count:
        raise ConfigError(
            f"the devices of process {mine} have parts {shards} of each batch, which is not one piece: "
            "choose parallel.node, .pipeline, .data, .fsdp and .tensor so that they are"
        )
    return first // count, math.prod(size) // count


def _arranged(shape: tuple[int, ...], devices: list[Any]) -> Any:
    """An array of the devices: machines along `node` if there are as many, inside by how they are linked."""
    machines = {getattr(device, "slice_index", 0) for device in devices}
    by_process = len(machines) == 1
    if by_process:
        machines = {device.process_index for device in devices}
    if shape[0] > 1 and len(machines) == shape[0]:
        return mesh_utils.create_hybrid_device_mesh(
            (1, *shape[1:]), (shape[0], *[1] * (len(shape) - 1)), devices, process_is_granule=by_process
        )
    if len(machines) > 1:
        return np.asarray(devices).reshape(shape)  # by process, as JAX lists them
    return mesh_utils.create_device_mesh(shape, devices)


def devices_at_hand() -> list[Any]:
    """Lists the devices of all processes.

    Raises:
        ConfigError: the platform that is asked for cannot be started.
    """
    try:
        return list(jax.devices())
    # JAX has no error of its own for a platform that cannot be started.
    except (RuntimeError, AssertionError, ValueError) as error:
        asked = os.environ.get("JAX_PLATFORMS", "any platform")
        raise ConfigError(
            f"JAX cannot start {asked} ({str(error) or 'its plugin or driver is missing'}): check "
            "JAX_PLATFORMS, and that the extra for this accelerator is installed (.[cuda12] or .[tpu])."
        ) from error
