"""How much memory there is, and how sizes are read and written. Nothing here imports jax."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxdl.errors import ConfigError

MARGIN = 0.1
"""Share of the capacity that a plan leaves free."""

UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}b": base ** (power + 1)
    for suffix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt")
}
"""Bytes by the unit's name in lower case."""


def parse_bytes(text: str) -> int:
    """Reads `16GiB` (2^30 each), `16GB` (10^9 each), `1.5 TiB` or a plain number of bytes.

    Raises:
        ValueError: it is no such size.
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", text)
    unit = found[2].lower() if found else ""
    if found and unit in ("k", "m", "g", "t"):
        letter = unit.upper()
        raise ValueError(f"{text!r} may mean two sizes: write {found[1]}{letter}iB or {found[1]}{letter}B")
    size: int = round(float(found[1]) * UNITS[unit]) if found and unit in UNITS else 0
    if size < 1:
        raise ValueError(f"{text!r} is not a size above 0, as 16GiB, 16GB, 500MiB or a number of bytes")
    return size


def size_argument(text: str) -> int:
    """Reads a size for argparse, which makes its own message of a ValueError.

    Raises:
        ArgumentTypeError: it is no such size.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def show_bytes(size: int) -> str:
    """Writes a size as `15.3 GiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def device_capacity(devices: list[Any]) -> tuple[int, str]:
    """Tells how many bytes a program may use on each device, and where that is known from.

    Args:
        devices: JAX devices, all of one kind.

    Raises:
        ConfigError: the devices do not tell.
    """
    limits = [int((device.memory_stats() or {}).get("bytes_limit", 0)) for device in devices]
    if all(limits):
        return min(limits), "JAX's limit on the device"
    if devices[0].platform == "cpu":
        share = f", shared by {len(devices)} simulated devices" if len(devices) > 1 else ""
        return available_memory() // len(devices), f"available memory{share}"
    raise ConfigError(f"{devices[0].device_kind} does not tell its memory: give it, as --capacity 16GiB")


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes that this process can still take: those of the machine, or fewer in a limited cgroup.

    Raises:
        ConfigError: the system does not tell.
    """
    try:
        found = re.search(r"(?m)^MemAvailable:\s*(\d+) kB", (proc / "meminfo").read_text())
    except OSError:
        found = None
    if found is None:
        raise ConfigError("this system does not tell its available memory: give it, as --capacity 16GiB")
    return max(min([int(found[1]) * 1024, *_left_in_cgroups(proc, cgroups)]), 0)


def _left_in_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yields what each limited cgroup around this process leaves; page cache can be dropped, so it counts."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, inner = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be that of the host, which is not there: then the root counts.
        group = root / inner.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(root):
                yield from _left(directory, *names)


def _left(directory: Path, limit_name: str, usage_name: str, cache_name: str) -> Iterator[int]:
    try:
        limit = (directory / limit_name).read_text().strip()
        usage = int((directory / usage_name).read_text())
        statistics = (directory / "memory.stat").read_text()
    except OSError:
        return
    if limit != "max":
        cache = re.search(rf"(?m)^{cache_name} (\d+)", statistics)
        yield int(limit) - usage + (int(cache[1]) if cache else 0)
