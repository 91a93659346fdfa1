"""What must be settled before jax is imported: threads, compiler, allocator; and the compilation cache.

Nothing here imports jax at module level, so that a program can start with

    from jaxdl import environment

    environment.prepare("tuned")   # restarts the program once where that pays
    import jax
    environment.compilation_cache()
"""

import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Literal

from jaxdl.errors import ConfigError

_log = logging.getLogger(__name__)

# XLA:CPU allocates and frees every activation in every step. By default glibc maps and unmaps each large
# block, and the kernel clears it page by page. These settings keep the memory in one heap of huge pages:
TUNABLES = {
    "glibc.malloc.hugetlb": "1",  # madvise(MADV_HUGEPAGE) the heap: 512 times fewer page faults
    "glibc.malloc.mmap_max": "0",  # large blocks come from the heap, not from fresh (zeroed) mappings
    "glibc.malloc.trim_threshold": str(16 * 2**30),  # keep freed memory for the next step
    "glibc.malloc.arena_max": "1",  # one heap: the arenas of threads return their memory after every step
}
# Without the last one a ResNet-50 step at batch 32 faults in 5.8 GB again; on a virtual machine that takes
# such pages back while the program waits for data, it took 5.4 s instead of 3.0. The price is a heap that
# threads' small blocks break up: it may peak at twice the memory.

# XLA:CPU of jaxlib 0.10 gives convolutions to a library whose gradients are slower than its own (a ResNet-50
# step by a sixth). A flag that another version does not know ends the process, hence the version.
COMPILER_FLAGS = {"0.10.": {"--xla_cpu_experimental_ynn_fusion_type": "-individual_convolution"}}

_GUARD = "JAXDL_RESTARTED"  # set in the restarted program, so that it never restarts again


def prepare(allocator: Literal["tuned", "default"]) -> None:
    """Sets the process up for jax; call it before jax is imported.

    Simulated devices (`JAX_NUM_CPU_DEVICES` or `--xla_force_host_platform_device_count`) get enough
    threads: with fewer than devices that wait in one collective, XLA:CPU deadlocks. Where jax will compute on
    the CPU, `COMPILER_FLAGS` are added to `XLA_FLAGS`, except one that is there already. Where a plugin is
    installed but no device is there for it, the platform is set to the CPU.

    `tuned` then restarts the program in this very process (same process id, arguments, standard streams and
    working directory) with `TUNABLES` in the environment, since glibc reads them only at the start of a
    process. It does so at most once, and only where it pays: on Linux with glibc, when jax will compute on
    the CPU. It costs the start-up of Python once more and keeps the process at its peak memory until it ends.

    Raises:
        ConfigError: `JAX_NUM_CPU_DEVICES` is no number of devices; jax could not even be imported.
    """
    _provide_threads()
    if not os.environ.get("JAX_PLATFORMS") and _has_plugin() and _lacks_devices():
        # jax would ask the plugin for devices, which takes time, prints errors and may break its profiler.
        os.environ["JAX_PLATFORMS"] = "cpu"
    if _computes_on_cpu():
        _choose_convolutions()
    if allocator == "tuned" and _restart_pays():
        restart_environment = os.environ | {"GLIBC_TUNABLES": _tunables(), _GUARD: "1"}
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # closed by the caller
                stream.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], restart_environment)


def compilation_cache(directory: Path | None = None) -> Path | None:
    """Switches on jax's persistent compilation cache, so that a program compiles once and not in every run.

    Args:
        directory: Where it lies. By default where `JAX_COMPILATION_CACHE_DIR` says, otherwise in `jaxdl/xla`
            within `XDG_CACHE_HOME` or ~/.cache.

    Returns:
        The directory, or None if it cannot be written: there is a warning then, and no cache.
    """
    import jax

    if directory is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        given: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        directory = Path(given or Path(home) / "jaxdl" / "xla")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        _log.warning("no compilation cache, every run compiles anew: cannot write %s (%s)", directory, error)
        _set_cache(None)
        return None
    _set_cache(str(directory))
    return directory


def _set_cache(directory: str | None) -> None:
    import jax

    jax.config.update("jax_compilation_cache_dir", directory)


def _provide_threads() -> None:
    """Raises NPROC, by which XLA:CPU sizes its thread pool, to twice the number of simulated devices."""
    flag = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    asked = os.environ.get("JAX_NUM_CPU_DEVICES")
    if asked is not None and not (asked.isdecimal() and int(asked)):
        raise ConfigError(
            f"JAX_NUM_CPU_DEVICES: {asked!r} is not a whole number of at least 1; unset it for one."
        )
    devices = int(asked or (flag[-1] if flag else "1"))
    if devices >= 2:
        given = os.environ.get("NPROC", "")
        threads = int(given) if given.isdecimal() else len(os.sched_getaffinity(0))
        os.environ["NPROC"] = str(max(threads, 2 * devices))


def _choose_convolutions() -> None:
    """Adds the flags that this jaxlib knows to XLA_FLAGS, which XLA reads when jax first computes."""
    try:
        version = importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        return
    for prefix, flags in COMPILER_FLAGS.items():
        for name, value in flags.items():
            given = os.environ.get("XLA_FLAGS", "")
            if version.startswith(prefix) and name not in given:
                os.environ["XLA_FLAGS"] = f"{given} {name}={value}".strip()


def _restart_pays() -> bool:
    """Whether the program can be restarted safely and malloc then serves jax's arrays."""
    if _GUARD in os.environ or "jax" in sys.modules:
        return False
    if sys.argv[0] in ("", "-") or sys.flags.interactive:  # the program came by standard input: it is gone
        return False
    if sys.platform != "linux" or not _has_glibc() or not sys.executable:
        return False
    return _computes_on_cpu() and _tunables() != os.environ.get("GLIBC_TUNABLES")


def _has_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (OSError, ValueError):  # musl knows no such name
        return False


def _computes_on_cpu() -> bool:
    """Whether jax's default platform will be the CPU, as far as one can tell without asking jax."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms.split(",")[0].strip().lower() == "cpu"
    return not _has_plugin() or _lacks_devices()


def _has_plugin() -> bool:
    return any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


def _lacks_devices() -> bool:
    """Whether Linux shows neither GPU nor TPU: a plugin for one may be installed to compile for it only."""
    if sys.platform != "linux":
        return False
    nodes = ("nvidia[0-9]*", "dxg", "kfd", "accel[0-9]*", "accel/*", "vfio/[0-9]*")
    return not any(any(Path("/dev").glob(node)) for node in nodes)


def _tunables() -> str:
    """GLIBC_TUNABLES with ours added; a value that the user has set stays."""
    pairs = [pair.partition("=")[::2] for pair in os.environ.get("GLIBC_TUNABLES", "").split(":") if pair]
    return ":".join(f"{name}={value}" for name, value in (TUNABLES | dict(pairs)).items())
