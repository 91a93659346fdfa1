"""What studies of several runs share: a directory for them, and runs in processes of their own."""

import datetime
import subprocess
from pathlib import Path

from jaxdl.errors import CheckpointError, ConfigError


def new_directory(workdir: Path | None, name: str) -> Path:
    """Makes the directory of a study.

    Args:
        workdir: a directory that must not exist; None makes one under runs/.
        name: of the study.

    Raises:
        ConfigError: it exists already.
        CheckpointError: it cannot be made.
    """
    workdir = workdir or Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    if workdir.exists():
        raise ConfigError(f"{workdir} exists already: choose another --workdir.")
    try:
        workdir.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{workdir} cannot be made ({error.strerror}).") from None
    return workdir


def call(command: list[str]) -> int:
    """Runs a program; where this one is interrupted, stops that one too and waits until it has saved."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
