"""What programs have in common that take arguments of their own besides a run's options."""

import argparse
import contextlib
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxdl.errors import EXIT_STOPPED, CheckpointError, ConfigError, JaxdlError


def leave_after(program: Callable[[], int | None]) -> NoReturn:
    """Calls a program and leaves with the exit code of the contract.

    A `JaxdlError` is printed as one paragraph; any other exception is a bug and keeps its stack trace.
    SIGTERM interrupts as Ctrl-C does.

    Args:
        program: what it returns is the exit code (None: 0).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.unraisablehook = _end_if_interrupted
    try:
        code = program()
        emit("")  # what was printed is written, or it is told that it cannot be
        sys.exit(code)
    except JaxdlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        _end_at_once(EXIT_STOPPED)


def _end_if_interrupted(unraisable: Any) -> None:
    """Ends after an interruption where Python cannot raise it, as in a callback of its collector."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr)
        _end_at_once(EXIT_STOPPED)
    sys.__unraisablehook__(unraisable)


def _end_at_once(code: int) -> NoReturn:
    """Ends without Python's own clearing up, which crashes where a compilation of XLA is under way."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    os._exit(code)


def emit(text: str) -> None:
    """Prints a program's result, and is content when the reader has gone (`--help | head`).

    Raises:
        CheckpointError: it cannot be written.
    """
    if sys.stdout is None:  # closed by the caller
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is still in the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise CheckpointError(f"standard output cannot be written ({error.strerror}).") from None


def refuse_several_processes(program: str) -> None:
    """Refuses to be one of several processes that `experiments.launch` has started.

    Raises:
        ConfigError: the program is, and would do the same in each of them.
    """
    if os.environ.get("JAX_NUM_PROCESSES", "1") != "1":
        raise ConfigError(f"{program} works in one process: start it without experiments.launch.")


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations, keeps a description as it is, and raises `ConfigError` for what is wrong."""

    def __init__(self, prog: str, description: str | None, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See `argparse.ArgumentParser.parse_known_args`, on which `parse_args` stands.

        Raises:
            ConfigError: an argument is wrong, or the program is one of several processes.
        """
        refuse_several_processes(self.prog)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def refuse_no_file(path: Path, flag: str = "--json") -> None:
    """Refuses a flag that names no file, before what would be written there is measured.

    Raises:
        ConfigError: it is a directory, or in none that exists.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path} cannot be written: name a file in a directory that exists.")


def refuse_unwritable(path: Path, flag: str = "--json") -> None:
    """Refuses a flag whose file cannot be written, before what would be written there is measured.

    Raises:
        ConfigError: it names no file.
        CheckpointError: the file system refuses.
    """
    refuse_no_file(path, flag)
    existed = path.exists()
    try:
        path.touch()
    except OSError as error:
        raise CheckpointError(f"{flag} {path} cannot be written ({error.strerror}).") from None
    if not existed:
        path.unlink()


def whole_number(minimum: int) -> Callable[[str], int]:
    """Makes an argument's type: whole numbers from `minimum` on."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        return number

    return read


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lays text out in columns, the first flush left, the others flush right."""
    lines = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
