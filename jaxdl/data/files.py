"""Files: their names in messages, the place of what is kept from run to run, and replacing one."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def printable(name: object) -> str:
    """Returns a file name or path that any log accepts.

    File names are bytes: undecodable ones arrive as lone surrogates, which no
    encoder takes, and a line feed would break a log line; both are escaped.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(name))


def cache_directory(name: str) -> Path:
    """Returns where things of a kind are kept: `jaxdl/NAME` within `XDG_CACHE_HOME` or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxdl" / name


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields another path to write, which then becomes `path`: whole or not at all, whoever else writes it.

    Raises:
        OSError: the directory, which is made if it is not there, or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Within the same directory, since a rename does not cross file systems.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as scratch:
        written = Path(scratch, path.name)
        yield written
        written.replace(path)


def temporary_name(path: Path) -> Path:
    """Returns the name under which this process writes a file before it gets its own."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def replace_file(path: Path, content: bytes) -> None:
    """Gives a file new content, whole or not at all; it is on the disk then.

    Raises:
        OSError: it could not be written, and is as it was.
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
