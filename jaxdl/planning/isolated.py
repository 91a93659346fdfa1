"""Calls in a process of their own: one that takes a device, or may be killed for its memory. No jax here."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from jaxdl.errors import EXIT_STOPPED, JaxdlError

T = TypeVar("T")


class Killed(Exception):  # noqa: N818 - it is an answer, not a fault
    """The process was ended by SIGKILL, as the kernel does where memory runs out."""


def in_own_process(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function in a new process and waits for what it returns.

    Args:
        function: importable by name; it and all that it takes and gives travel by pickle.
        arguments: its arguments.

    Raises:
        JaxdlError: the function raised one.
        Killed: the process got SIGKILL.
        SystemExit: it ended in any other way, after printing why.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        outcome: T | JaxdlError = receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGKILL:
            raise Killed from None
        code = process.exitcode or 1
        raise SystemExit(code if code > 0 else 128 - code) from None
    process.join()
    if isinstance(outcome, JaxdlError):
        raise outcome
    return outcome


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send(function(*arguments))
    except JaxdlError as error:
        sender.send(error)
    except KeyboardInterrupt:
        # The parent got it too, and tells.
        os._exit(EXIT_STOPPED)
