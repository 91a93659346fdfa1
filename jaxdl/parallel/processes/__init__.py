"""Joins the processes of a run; a program calls `start` first, then keeps a `Watchdog` until it ends."""

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
from jax._src.clusters import ClusterEnv  # private, and so is what `jax.distributed` makes of them:
from jax._src.distributed import global_state

from jaxdl.config import ParallelConfig
from jaxdl.errors import ConfigError, JaxdlError, LostProcessError
from jaxdl.parallel.processes.meeting import LOOPBACK, meet
from jaxdl.parallel.processes.watchdog import Watchdog, leave

__all__ = [
    "Watchdog",
    "agree_on_text",
    "beat",
    "explained",
    "joined",
    "leave",
    "lost_processes",
    "on_first",
    "speaks",
    "start",
    "wait_for_all",
]

_T = TypeVar("_T")

MEETING_SECONDS = 120.0
"""How long processes wait for each other at the start: a cluster does not start all at once."""

TEXT_SECONDS = 600.0
"""How long the others wait for process 0's text; the watchdog ends them earlier if it is lost."""

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""What `experiments.launch` sets. jax itself reads only the first."""

EXEMPT = "no_grpc_proxy"
"""Environment variable of gRPC: the addresses that no proxy is asked for."""

# What collectives say when another process has gone: Gloo's, NCCL's, and jax's coordination service.
LOSSES = re.compile(
    r"Gloo .*failed|Connection (closed|reset) by peer|Broken pipe|Socket closed|NCCL|"
    r"remote process exited|coordination service|heartbeat",
    re.IGNORECASE,
)

_texts = itertools.count()
_meetings = itertools.count()


def start(config: ParallelConfig) -> None:
    """Joins this process to the others of the run, if any; call it before jax starts a backend.

    The place of this process among them is taken from `config.coordinator`, `.processes` and
    `.process`, or from what `config.cluster` names, or from the environment variables `VARIABLES`.
    Traces of a cluster, such as Slurm's variables, count only where `config.cluster` asks for them.

    Raises:
        ConfigError: what says the place is incomplete or wrong, or the others cannot be met.
    """
    coordinator, processes, process, devices = _place(config)
    if processes == 1:
        return
    # jax would take SIGTERM for itself, and handlers that were there before would be called no more.
    jax.config.update("jax_enable_preemption_service", False)
    # All of jax's connections go to this machine, and never through a proxy.
    jax.config.update("jax_check_proxy_envs", False)
    exempt = os.environ.get(EXEMPT) or os.environ.get("no_proxy") or ""
    os.environ[EXEMPT] = ",".join(filter(None, (exempt, LOOPBACK)))
    address = meet(coordinator, processes, process, MEETING_SECONDS)
    jax.distributed.initialize(
        address,
        processes,
        process,
        local_device_ids=devices,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address,
        initialization_timeout=60,  # all are there
        # jax ends with exit code 134 and a stack trace: that is for the watchdog to forestall.
        heartbeat_timeout_seconds=int(max(300, 5 * config.timeout)),
    )
    atexit.register(_detach)


def speaks() -> bool:
    """Whether this process writes what one alone must write: process 0 does."""
    return bool(global_state.process_id == 0)


def agree_on_text(text: str | None) -> str:
    """Process 0's text, on all processes; all must call it, and as often.

    Args:
        text: only process 0's counts.

    Raises:
        LostProcessError: process 0 does not say it.
    """
    client, key = global_state.client, f"jaxdl/text/{next(_texts)}"
    if client is None or speaks():
        assert text is not None, "process 0 must bring a text"
        if client is not None:
            client.key_value_set(key, text)
        return text
    deadline = time.monotonic() + TEXT_SECONDS
    while True:
        try:
            # In short parts, between which signals are heard.
            return str(client.blocking_key_value_get(key, 500))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > deadline:
                raise LostProcessError(f"process 0 is lost or does not answer ({error}).") from None


def on_first(function: Callable[[], _T]) -> _T:
    """Calls a function on process 0 only, and gives its result to all; all must call it, and as often.

    Args:
        function: what it returns is a value of JSON, unless there is one process.

    Raises:
        JaxdlError: what the function raised, on all processes.
        LostProcessError: process 0 does not answer.
    """
    if global_state.client is None:
        return function()
    if not speaks():
        answer = json.loads(agree_on_text(None))
        if "error" in answer:
            raise next(kind for kind in _kinds(JaxdlError) if kind.__name__ == answer["kind"])(
                answer["error"]
            )
        result: _T = answer["result"]
        return result
    try:
        result = function()
    except JaxdlError as error:
        agree_on_text(json.dumps({"error": str(error), "kind": type(error).__name__}))
        raise
    agree_on_text(json.dumps({"result": result}))
    return result


def wait_for_all() -> None:
    """Waits until all processes have come here; all must call it, and as often.

    A collective waits too, but not long: Gloo gives up after half a minute, and processes may compile for
    minutes, some of them longer than others.
    """
    client = global_state.client
    if client is None or global_state.num_processes == 1:
        return
    place = f"jaxdl/here/{next(_meetings)}/"
    client.key_value_set(f"{place}{global_state.process_id}", "here")
    # In short parts, between which signals are heard. The watchdog sees to it that it ends.
    while len(client.key_value_dir_get(place)) < global_state.num_processes:
        time.sleep(0.1)


def beat(step: int) -> None:
    """Notes the update that was made, for the messages of the watchdog, if there is one."""
    if Watchdog.active is not None:
        Watchdog.active.beat(step)


@contextlib.contextmanager
def joined(config: ParallelConfig) -> Iterator[None]:
    """Joins this process to the others of the run, if there are any, and watches them within a `with` block.

    It is to surround everything that touches a device.

    Raises:
        ConfigError: the others cannot be met.
        LostProcessError: a collective failed because another process is gone.
    """
    start(config)
    with Watchdog(config), lost_processes():
        yield


def _kinds(kind: type[JaxdlError]) -> Iterator[type[JaxdlError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)


def explained(error: BaseException) -> LostProcessError | None:
    """The loss of another process as the cause of an error, or None if it is none.

    It takes a few seconds, until the watchdog knows which process it was.
    """
    if global_state.num_processes == 1 or not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    if not LOSSES.search(str(error)):
        return None
    found = Watchdog.active.find() if Watchdog.active is not None else "another process may be lost"
    first = str(error).splitlines()[0][:300]
    return LostProcessError(f"{found} What failed here: {first}")


@contextlib.contextmanager
def lost_processes() -> Iterator[None]:
    """Turns the error that a collective raises when another process is lost into one that says so.

    Raises:
        LostProcessError: a collective failed because another process is gone.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        lost = explained(error)
        if lost is None:
            raise
        raise lost from error


def _place(config: ParallelConfig) -> tuple[str, int, int, list[int] | None]:
    """Address of process 0, number of processes, which this is, its devices (None: all it sees)."""
    if config.coordinator is not None and config.processes is not None and config.process is not None:
        return config.coordinator, config.processes, config.process, None
    if config.cluster != "none":
        return _from_cluster(config.cluster)
    given = {name: os.environ.get(name, "") for name in VARIABLES}
    if not any(given.values()):
        return "", 1, 0, None
    address, count, index = given.values()
    if not (address and count.isdecimal() and index.isdecimal() and 0 <= int(index) < int(count)):
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ConfigError(
            f"{shown} do not tell a process its place among several: set all three, the last below the "
            "second (python -m experiments.launch does so), or unset them for one process."
        )
    return address, int(count), int(index), None


def _from_cluster(name: str) -> tuple[str, int, int, list[int] | None]:
    advice = (
        "Start it by the cluster's launcher (such as srun or mpirun), or give parallel.coordinator, "
        ".processes and .process."
    )
    nothing = f"parallel.cluster {name}: nothing here tells this process its place among all. {advice}"
    method = None if name == "auto" else name
    kinds = [kind for kind in ClusterEnv._cluster_types if kind.name == method]
    try:
        if method and not any(kind.is_env_present() for kind in kinds):
            raise ConfigError(nothing)
        address, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, method, int(MEETING_SECONDS)
        )
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - each method raises errors of its own
        cause = f"{type(error).__name__}: {error}"
        raise ConfigError(f"parallel.cluster {name}: {cause}. {advice}") from None
    if address is None or count is None or index is None:
        raise ConfigError(nothing)
    return address, count, index, None if devices is None else list(devices)


def _detach() -> None:
    """Keeps jax from waiting for the others when this process ends.

    jax's shutdown ends the others with exit code 134 if they take longer than its time-out, and with a
    long one a process that failed would wait for them. The watchdog's goodbye is enough.
    """
    for end in (global_state.client, global_state.service):
        # Alive until the process is gone: Python would delete the service first; its client complains.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(end))
    global_state.client = global_state.service = None
