"""What programs have in common that take arguments of their own besides a run's options."""

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jaxdl.errors import EXIT_STOPPED, ConfigError, JaxdlError


def leave_after(program: Callable[[], int | None]) -> NoReturn:
    """Calls a program and leaves with the exit code of the contract.

    A `JaxdlError` is printed as one paragraph; any other exception is a bug and keeps its stack trace.

    Args:
        program: what it returns is the exit code (None: 0).
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        sys.exit(program())
    except JaxdlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(EXIT_STOPPED)


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

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


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
