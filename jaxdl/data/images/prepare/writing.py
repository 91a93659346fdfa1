"""Files that are whole or not there at all, in a directory that one process holds."""

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from jaxdl.data.files import printable
from jaxdl.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

_LOCK = ".lock"


def digested(path: Path) -> tuple[int, str] | None:
    """Returns a file's bytes and SHA-256, and it is on the disk then; None where it cannot be read."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            return file.tell(), digest
    except OSError:
        return None


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the directory; the system lets go of it when the process ends, in whatever way.

    Raises:
        ConfigError: another process holds it.
        DataError: it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        with reported(directory):
            file = stack.enter_context((directory / _LOCK).open("a"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{printable(directory)} is being prepared by another process: wait for it to end"
            ) from None
        except OSError as error:  # some network file systems have no locks
            _log.warning(
                "%s cannot be locked (%s): let no other process prepare it", directory, error.strerror
            )
        yield


@contextlib.contextmanager
def reported(path: Path) -> Iterator[None]:
    """Says what could not be written; the writer of array_record is C++ and raises RuntimeError.

    Raises:
        DataError: in place of an OSError or RuntimeError within.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        # The C++ code adds a paragraph on what it was about.
        why = getattr(error, "strerror", None) or str(error).partition(";")[0]
        raise DataError(f"{printable(path)} cannot be written ({why})") from error
