"""Errors that a person can act on, each with the exit code of the command-line contract.

Raise one of these wherever the cause lies in the configuration, the data, the
disk or the training itself; `jaxdl.commandline.main` prints the message as
one paragraph and leaves with `exit_code`. Any other exception is a bug in
jaxdl and keeps its stack trace.
"""

from typing import ClassVar

EXIT_STOPPED = 75
"""Exit code after SIGTERM or SIGINT once the state is saved (EX_TEMPFAIL of sysexits.h)."""

EXIT_LOST = 6
"""Exit code where another process of the run was lost; go on from the last checkpoint with --resume true."""


class JaxdlError(Exception):
    """Base of all errors with a message meant for the user."""

    exit_code: ClassVar[int] = 1


class ConfigError(JaxdlError):
    """The configuration is unknown, mistyped or impossible."""

    exit_code = 2


class DivergedError(JaxdlError):
    """Training produced a value that is not finite."""

    exit_code = 3


class DataError(JaxdlError):
    """Data could not be read or is not what it claims to be."""

    exit_code = 4


class CheckpointError(JaxdlError):
    """A checkpoint, weights, the run's directory or standard output could not be read or written."""

    exit_code = 5


class LostProcessError(JaxdlError):
    """Another process of the run was lost; go on from the last checkpoint with --resume true."""

    exit_code = EXIT_LOST
