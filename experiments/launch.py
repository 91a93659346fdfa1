"""Starts a command several times on this machine, as the processes of one run.

    python -m experiments.launch --processes 2 [--devices 4] -- python -m experiments.resnet50 [options]

Each process learns its place by the environment variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
JAX_PROCESS_ID. The output of process 0 passes through as it is, the lines of the others with `[process
1] ` in front. SIGTERM and SIGINT are passed on. The exit code is that of the first process that failed,
128 + n if signal n ended it, and 0 if none failed.
"""

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import IO, NoReturn

from jaxdl.commandline.programs import Parser, leave_after, whole_number
from jaxdl.errors import ConfigError

PROGRAM = "python -m experiments.launch"
SIGNALS = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def main() -> NoReturn:
    """Starts what the arguments say, and leaves with the exit code of the contract."""
    leave_after(_run)


def _run() -> int:
    arguments = parse(sys.argv[1:])
    return launch(
        arguments.command,
        processes=arguments.processes,
        devices=arguments.devices,
        grace=arguments.grace,
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the arguments, and finds the command.

    Raises:
        ConfigError: one of them is wrong, or there is no such command.
    """
    parser = Parser(PROGRAM, __doc__)
    add = parser.add_argument
    add("--processes", type=whole_number(1), required=True, metavar="N", help="how many to start")
    add("--devices", type=whole_number(1), metavar="K", help="simulated CPU devices of each")
    add("--grace", type=whole_number(0), default=60, metavar="SECONDS",
        help="time the others have to end after one has failed, before they are killed; longer than "
        "parallel.timeout, so that they can say what they miss (default: %(default)s)")  # fmt: skip
    add("command", nargs="*", metavar="-- COMMAND", help="what to start, after --")
    place = argv.index("--") if "--" in argv else len(argv)
    command = argv[place + 1 :]
    arguments: argparse.Namespace
    arguments, rest = parser.parse_known_args(argv[:place])
    if arguments.command or not command:
        raise ConfigError(
            f"put the command after --, as in {PROGRAM} --processes 2 -- python -m experiments.resnet50"
        )
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    found = shutil.which(command[0])
    if found is None and command[0] in ("python", "python3"):
        found = sys.executable
    if found is None:
        raise ConfigError(f"there is no command {command[0]!r}: write it after -- as on its own.")
    arguments.command = [found, *command[1:]]
    return arguments


def launch(command: list[str], *, processes: int, devices: int | None = None, grace: float = 60) -> int:
    """Starts the processes and waits for all of them.

    Args:
        command: what to start.
        processes: how many.
        devices: simulated CPU devices of each; None leaves it to the environment.
        grace: seconds that the others have once one has failed.

    Returns:
        The exit code of the first that failed, or 0.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes)}
    if devices is not None:
        shared["JAX_NUM_CPU_DEVICES"] = str(devices)
    running: dict[int, subprocess.Popen[str]] = {}
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        # Only the first: each process is stopping already, and another could cut its saving short.
        if not asked:
            asked.append(number)
            for process in list(running.values()):
                process.send_signal(number)

    former = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        for index in range(processes):
            running[index] = _start(command, shared | {"JAX_PROCESS_ID": str(index)}, quiet=index > 0)
            if asked:  # it came while this one was being started
                running[index].send_signal(asked[0])
        readers = [reader for index, process in running.items() for reader in _readers(process, index)]
        code = _wait(running, grace)
    finally:
        _kill(running)
        for number, handler in former.items():
            signal.signal(number, handler)
    for reader in readers:
        reader.join(5)  # a child of the process may still hold the pipe
    return code


def _start(command: list[str], variables: dict[str, str], *, quiet: bool) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE if quiet else None
    try:
        return subprocess.Popen(
            command,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            # A group of its own: otherwise Ctrl-C would come twice, once from the terminal.
            process_group=0,
            # Safe as long as this program has a single thread.
            preexec_fn=_end_with_launcher if LIBC else None,
        )
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started ({error.strerror}).") from None


def _end_with_launcher() -> None:
    """Asks Linux for SIGTERM when the launcher ends without having passed it on."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(running: "dict[int, subprocess.Popen[str]]", grace: float) -> int:
    """Waits until all have ended; returns the exit code of the first that failed, or 0."""
    failed: list[int] = []
    deadline = float("inf")
    while running:
        for index, process in list(running.items()):
            code = process.poll()
            if code is not None:
                del running[index]
                if code and not failed:
                    deadline = time.monotonic() + grace
                if code:
                    failed.append(code if code > 0 else 128 - code)
        if time.monotonic() > deadline:
            for index in running:
                late = f"process {index} had not ended {grace:g} s after another failed, and was killed"
                print(f"error: {late}", file=sys.stderr)
            _kill(running)
            deadline = float("inf")
        time.sleep(0.05)
    return failed[0] if failed else 0


def _readers(process: "subprocess.Popen[str]", index: int) -> list[threading.Thread]:
    """Threads that pass the output of a process on, if it has pipes."""
    ends = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    threads = [
        threading.Thread(target=_prefix, args=(source, sink, index), daemon=True)
        for source, sink in ends
        if source
    ]
    for thread in threads:
        thread.start()
    return threads


def _prefix(source: IO[str], sink: IO[str] | None, index: int) -> None:
    for line in source:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            if sink:
                sink.write(f"[process {index}] {line.rstrip()}\n")
                sink.flush()


def _kill(running: "dict[int, subprocess.Popen[str]]") -> None:
    for process in running.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
