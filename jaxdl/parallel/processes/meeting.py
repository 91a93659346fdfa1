"""Where processes meet before jax connects them, and the relay between jax and process 0.

jax's own client ends the whole process with a stack trace and exit code 134 for a wrong number, a
missing process or an address in use, and at once when process 0 goes. So the processes meet here first:
process 0 listens at the coordinator's address, counts them and lets all go on together. From then on
jax's connections to process 0 run through a relay in each process, which keeps jax's end open when the
other end closes: what is to be done then is for `jaxdl.parallel.processes.watchdog` to say.
"""

import contextlib
import os
import socket
import threading
import time

from jaxdl.errors import ConfigError

GREETING = b"jaxdl"
GO = b"jaxdl go"
LOOPBACK = "127.0.0.1"
ANSWER_SECONDS = 5.0  # for one line of a process that is connected


def meet(coordinator: str, processes: int, process: int, seconds: float) -> str:
    """Waits until all processes are there.

    Args:
        coordinator: `host:port` at which process 0 can be reached.
        processes: how many there are.
        process: the number of this one.
        seconds: how long to wait for the others.

    Returns:
        The address, on this machine, that jax is to take for the coordinator's.

    Raises:
        ConfigError: not all came in time, or they do not agree on who they are.
    """
    host, port = _parse(coordinator)
    if process == 0:
        return _receive(host, port, processes, seconds)
    return _join(host, port, processes, process, seconds)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _parse(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"parallel.coordinator {coordinator!r} is no address of process 0, such as node1:8476."
        )
    return host.strip("[]"), int(port)


def _receive(host: str, port: int, processes: int, seconds: float) -> str:
    try:
        if host in ("localhost", LOOPBACK):
            listener = socket.create_server((LOOPBACK, port))
        elif socket.has_dualstack_ipv6():
            listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(
            f"process 0 cannot listen at port {port} of the coordinator {host}:{port} "
            f"({error.strerror}): take another port."
        ) from None
    guests: dict[int, socket.socket] = {}
    problem = _gather(listener, guests, processes, seconds)
    for guest in guests.values():
        with guest, contextlib.suppress(OSError):
            guest.sendall((problem or GO.decode()).encode() + b"\n")
    if problem:
        listener.close()
        raise ConfigError(problem)
    inner = free_port()
    threading.Thread(target=_serve, args=(listener, (LOOPBACK, inner), False), daemon=True).start()
    return f"{LOOPBACK}:{inner}"


def _gather(
    listener: socket.socket, guests: dict[int, socket.socket], processes: int, seconds: float
) -> str | None:
    """Lets the others in; returns what is wrong."""
    deadline = time.monotonic() + seconds
    while True:
        _forget_gone(guests)
        if len(guests) == processes - 1:
            return None
        listener.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = [str(number) for number in range(1, processes) if number not in guests]
            return (
                f"{processes} processes were announced, but after {seconds:g} s process "
                f"{' and '.join(missing[:8])} had not come: start all, with the same coordinator."
            )
        words = _line(connection, ANSWER_SECONDS).split()
        if len(words) != 3 or words[0] != GREETING or not all(word.isdigit() for word in words[1:]):
            connection.close()  # somebody else knocked
            continue
        number, announced = int(words[1]), int(words[2])
        _forget_gone(guests)  # perhaps it is the same one, started once more
        if announced != processes:
            problem = f"process {number} was told of {announced} processes, but process 0 of {processes}"
        elif number in guests or not 0 < number < processes:
            problem = f"more than one process was told to be process {number}"
        else:
            guests[number] = connection
            continue
        guests[-1] = connection  # who has to know as well
        return f"{problem}: give all the same number of processes, and each its own number from 0 on."


def _forget_gone(guests: dict[int, socket.socket]) -> None:
    """Forgets those that have ended while they waited."""
    for number, connection in list(guests.items()):
        connection.setblocking(False)
        try:
            gone = connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            gone = False
        except OSError:
            gone = True
        connection.settimeout(ANSWER_SECONDS)
        if gone:
            connection.close()
            del guests[number]


def _join(host: str, port: int, processes: int, process: int, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=ANSWER_SECONDS)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"process {process} could not reach process 0 at {host}:{port} within {seconds:g} s "
                    f"({error.strerror or error}): start process 0 too, or correct the address."
                ) from None
            time.sleep(0.2)
    with connection, contextlib.suppress(OSError):
        connection.sendall(GREETING + f" {process} {processes}\n".encode())
        answer = _line(connection, seconds + 2 * ANSWER_SECONDS)
    if answer != GO:
        known = answer.decode(errors="replace")
        if " process" not in known:
            known = f"who answers at {host}:{port} is not process 0 of this run, or has ended."
        raise ConfigError(known)
    listener = socket.create_server((LOOPBACK, 0))
    threading.Thread(target=_serve, args=(listener, (host, port), True), daemon=True).start()
    return f"{LOOPBACK}:{listener.getsockname()[1]}"


def _line(connection: socket.socket, seconds: float) -> bytes:
    """One line of the other end, without its end; what there is of it if no more comes."""
    text, deadline = b"", time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while not text.endswith(b"\n") and len(text) < 1000:
            connection.settimeout(max(deadline - time.monotonic(), 0.01))
            byte = connection.recv(1)
            if not byte:
                break
            text += byte
    return text.strip()


def _serve(listener: socket.socket, target: tuple[str, int], keep: bool) -> None:
    """Connects everybody who comes with the target.

    Args:
        listener: where they come.
        target: who they are connected with.
        keep: hold their end open when the target closes its own.
    """
    listener.settimeout(None)
    while True:
        near, _ = listener.accept()
        if keep:
            # Even when Python ends and closes its sockets: jax would end the process with an error then.
            os.dup(near.fileno())
        try:
            far = _connect(target)
        except OSError:
            near.close()
            continue
        for each in (near, far):
            each.settimeout(None)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_pump, args=(near, far, True), daemon=True).start()
        threading.Thread(target=_pump, args=(far, near, not keep), daemon=True).start()


def _connect(target: tuple[str, int]) -> socket.socket:
    """jax's service may need a moment until it listens."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            return socket.create_connection(target, timeout=ANSWER_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _pump(source: socket.socket, sink: socket.socket, close: bool) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    if close:
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
