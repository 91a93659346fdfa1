"""Chips that are not there: devices for which programs can be compiled, but not run.

The compiler for a chip comes with JAX's plugin for it and needs no chip, nor a driver. Measured on jax 0.10.
"""

import re
from pathlib import Path
from typing import Any

from jaxdl.errors import ConfigError

HARDWARE = Path(__file__).resolve().parents[2] / "configs" / "hardware"
"""Descriptions of GPUs, as `<name>.txtpb`."""

GPU_SHARE = 0.75
"""Of a GPU's memory, what JAX takes when it starts; XLA_PYTHON_CLIENT_MEM_FRACTION sets another share."""

TPU_MEMORY = {"v5e": 63 << 28}
"""Bytes of a TPU that its compiler grants to a program, by the chip's name (15.75 GiB of 16)."""

NODE = 8
"""GPUs that a node has where a name does not say."""


def described_devices(name: str) -> list[Any]:
    """Gives JAX devices for a mesh to compile for.

    To be called before any JAX backend is started: it makes the CPU the platform that JAX runs on.

    Args:
        name: a GPU with a file in `configs/hardware`, as `h100`; with the number of them, as `h100x4` or
            `h100x64`, in nodes of 8 if they are more; or with the numbers of nodes and of GPUs in each, as
            `h100:16x4`. Each node is a process. Or a TPU slice by JAX's name, as `v5e:2x4`.

    Raises:
        ConfigError: there is no such chip, or its compiler is not installed.
    """
    import jax
    from jax.experimental import topologies

    # A plugin that is installed only to compile would be asked for devices and fail or wait for them.
    jax.config.update("jax_platforms", "cpu")
    gpu = re.fullmatch(r"([a-z]\w*?)(?:x([1-9]\d*)|:([1-9]\d*)x([1-9]\d*))?", name)
    description = HARDWARE / f"{gpu[1]}.txtpb" if gpu else None
    try:
        if gpu and description is not None and description.exists():
            nodes, each = _nodes(name, *(int(number) if number else None for number in gpu.groups()[1:]))
            return list(
                topologies.get_topology_desc(
                    platform="cuda",
                    topology_name=name,
                    target_config=description.read_text(),
                    topology=f"1x{nodes}x{each}",  # the first: nodes in groups, which JAX calls slices
                ).devices
            )
        if ":" in name:
            _settle_tpu()
            return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    # JAX has no error of its own for a compiler that is missing or does not know a chip.
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        raise ConfigError(
            f"there is no compiler for {name} here: {str(error).splitlines()[0]}. If the extra `plan` is not "
            "installed, that is why: pip install -e '.[plan]'."
        ) from error
    gpus = sorted(path.stem for path in HARDWARE.glob("*.txtpb"))
    raise ConfigError(
        f"{name} is no chip that is described here: take one of {', '.join(gpus)}, "
        "several as h100x8 or h100x64, nodes of several as h100:16x4, or a TPU slice, as v5e:2x4."
    )


def described_memory(name: str) -> int | None:
    """Gives the bytes that a program may use on each device of a description.

    Args:
        name: as for `described_devices`.

    Returns:
        For a GPU, the share of its memory that JAX takes unless told otherwise; for a TPU what its compiler
        is known to grant, or None: it refuses by itself what does not fit.
    """
    chip = re.split("[x:]", name)[0]
    path = HARDWARE / f"{chip}.txtpb"
    if not path.exists():
        return TPU_MEMORY.get(chip)
    size = re.search(r"device_memory_size: (\d+)", path.read_text())
    return int(int(size[1]) * GPU_SHARE) if size else None


def _nodes(name: str, total: int | None, nodes: int | None, each: int | None) -> tuple[int, int]:
    """Tells how many nodes of how many GPUs a name stands for."""
    if nodes is not None and each is not None:
        return nodes, each
    total = total or 1
    if total <= NODE:
        return 1, total
    if total % NODE:
        raise ConfigError(
            f"{name} are no whole nodes of {NODE}: name a multiple of {NODE}, or nodes and the GPUs in each, "
            f"as {name.partition('x')[0]}:16x4."
        )
    return total // NODE, NODE


def _settle_tpu() -> None:
    """Keeps the TPU's library from looking for the machine that it would run on."""
    import os

    for variable, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(variable, value)
