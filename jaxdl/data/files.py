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
