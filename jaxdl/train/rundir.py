"""A run's directory: made atomically, held by one process, with metrics that survive a crash.

    directory = rundir.create(None, "resnet50", config_yaml)  # or rundir.reopen(workdir) to resume
    with rundir.MetricsFile(directory / "metrics.jsonl") as metrics:
        metrics.write(10, "train", {"loss": 2.3})
    rundir.write_summary(directory / "summary.json", {"accuracy": 0.76})

In a run of several processes only process 0 calls any of this. Nothing here
imports jax, so that a directory that cannot be used is reported before a
device is touched.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import math
import numbers
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from jaxdl.data import files
from jaxdl.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"
LOCK = ".lock"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Open lock files by (device, inode). Never closed: the kernel lets go of a lock when its process ends, in
# whatever way, and an open file keeps its inode from being used again, so a key always means one directory.
_held: dict[tuple[int, int], int] = {}


def create(workdir: Path | None, experiment: str, config_yaml: str, *, root: Path = Path("runs")) -> Path:
    """Makes the directory of a new run, with its `config.yaml`, and locks it for this process.

    The directory appears complete or not at all, and belongs to this run
    alone, however many start in the same second.

    Args:
        workdir: Directory to make; it may exist if it is empty. None stands for
            `<root>/<experiment>-YYYYmmdd-HHMMSS`, with `-2`, `-3` ... behind it where that is taken.
        experiment: The experiment's name.
        config_yaml: Text of `config.yaml`.
        root: Where runs without a `workdir` go.

    Returns:
        The directory.

    Raises:
        ConfigError: The directory is in use or holds something already.
        CheckpointError: It cannot be made or written.
    """
    if workdir is None:
        base = f"{experiment}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        attempt = 1
        while True:
            target = root / (base if attempt == 1 else f"{base}-{attempt}")
            with _reported(target):
                if not target.exists() and _rename_into_place(target, config_yaml):
                    return target
            attempt += 1
    with _reported(workdir):
        if workdir.is_dir() and not _content(workdir):
            # Filled in place, not replaced: it may be a link, a mount point, or within what we may not write.
            _lock(workdir)
            if not _content(workdir):
                replace_file(workdir / CONFIG, config_yaml.encode())
                return workdir
        elif not os.path.lexists(workdir) and _rename_into_place(workdir, config_yaml):
            return workdir
        if not workdir.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if is_run(workdir):
        raise ConfigError(
            f"{workdir} already holds a run: choose another --workdir, or go on with it by --resume true."
        )
    raise ConfigError(f"{workdir} exists and is not empty: choose another --workdir.")


def is_run(workdir: Path) -> bool:
    """Whether a directory holds a run that `reopen` can go on with.

    Raises:
        CheckpointError: One cannot look.
    """
    with _reported(workdir):
        return (workdir / CONFIG).is_file()


def reopen(workdir: Path) -> str:
    """Locks the directory of an earlier run for this process, to go on with it.

    Args:
        workdir: The run's directory.

    Returns:
        The text of its `config.yaml`.

    Raises:
        ConfigError: It holds no run, or another process trains in it.
        CheckpointError: It cannot be read or written.
    """
    if not is_run(workdir):
        raise ConfigError(f"{workdir} holds no run to resume ({CONFIG} is missing): check --workdir.")
    with _reported(workdir):
        _lock(workdir)
        return (workdir / CONFIG).read_text()


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically; floats that are not finite become the strings "nan", "inf", "-inf"."""
    replace_file(path, (json.dumps(_plain(summary), indent=2) + "\n").encode())


class MetricsFile:
    """Appends measured values to a file of JSON lines, one object a line with `step`, `split` and values.

    Every line reaches the operating system before `write` returns, so a killed
    process loses none; `sync` makes them survive a power failure too. A run
    that goes on from a checkpoint first calls `truncate_after`.

    Attributes:
        path: The file.
    """

    path: Path

    def __init__(self, path: Path) -> None:
        self.path = path
        with _reported(path):
            self._file = self._open()

    def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Appends one line.

        Args:
            step: Optimizer updates made so far.
            split: `train` or `eval`.
            values: Numbers (also NumPy or JAX scalars) or strings by name.

        Raises:
            CheckpointError: The line could not be written; the file is as it was before.
        """
        line = json.dumps(_plain({"step": step, "split": split, **values}), allow_nan=False) + "\n"
        with _reported(self.path):
            before = os.fstat(self._file).st_size
            rest = line.encode()
            try:
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except OSError:
                # A full disk may have taken half a line; the next one must not be glued to it.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, before)
                raise

    def sync(self) -> None:
        """Waits until all lines are on the disk; call it before saving a checkpoint that counts on them."""
        with _reported(self.path):
            os.fsync(self._file)

    def read(self) -> list[dict[str, Any]]:
        """Returns all lines, parsed."""
        with _reported(self.path):
            return [json.loads(line) for line in self.path.read_bytes().splitlines()]

    def truncate_after(self, step: int) -> None:
        """Removes the lines of later steps and a torn last line, atomically; all others keep every byte."""
        with _reported(self.path):
            lines = self.path.read_bytes().splitlines(keepends=True)
            if lines and (not lines[-1].endswith(b"\n") or _step(lines[-1]) is None):
                lines.pop()
            kept = b"".join(line for line in lines if (_step(line) or 0) <= step)
            if len(kept) != os.fstat(self._file).st_size:
                replace_file(self.path, kept)
                os.close(self._file)
                self._file = self._open()

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def replace_file(path: Path, content: bytes) -> None:
    """Gives a file new content: after a crash at any moment it holds the old or the new one.

    Raises:
        CheckpointError: It could not be written, and is as it was.
    """
    with _reported(path):
        files.replace_file(path, content)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory survive a power failure (what the files hold is synced apart)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Room left for this user on the disk of a path, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def reason(error: BaseException, path: Path, needed: int | None = None) -> str:
    """What went wrong in words for a person, with the room left where it is about room.

    Args:
        error: The error, or one that was raised because of it.
        path: An absolute path on the disk in question.
        needed: Bytes that were to be written, if that is known.
    """
    code = None
    link: BaseException | None = error
    while link is not None and code is None:
        # TensorStore tells the code in the text only.
        told = re.search(r"os_error_code='(\d+)'", str(link))
        code = link.errno if isinstance(link, OSError) else int(told[1]) if told else None
        link = link.__cause__ or link.__context__
    if code is None:
        return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    text = os.strerror(code)
    if code in _NO_ROOM:
        with contextlib.suppress(OSError):
            demand = "" if needed is None else f"{_size(needed)} are needed and "
            text += f": {demand}{_size(free_bytes(path))} are free"
    return text


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


@contextlib.contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turns an error of the operating system into one sentence with exit code 5."""
    try:
        yield
    except OSError as error:
        why = reason(error, path.absolute())
        raise CheckpointError(
            f"{path} cannot be used ({why}): mend that or choose another --workdir."
        ) from error


def _rename_into_place(target: Path, config_yaml: str) -> bool:
    """Fills a hidden sibling and renames it, lock and all; False if another run took the name meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    sibling = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    sibling.mkdir()
    try:
        key = _lock(sibling)
        replace_file(sibling / CONFIG, config_yaml.encode())
        try:
            # rename(2) refuses a directory that has something in it, and every run's directory has.
            sibling.rename(target)
        except OSError:
            if not os.path.lexists(target):
                raise
            os.close(_held.pop(key))
            return False
        sync_directory(target.parent)
        return True
    finally:
        shutil.rmtree(sibling, ignore_errors=True)  # there is none any more if all went well


def _content(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name != LOCK]  # noqa: PTH208 - names are all we need


def _lock(directory: Path) -> tuple[int, int]:
    """Takes the directory's lock for the life of this process (again and again if it likes)."""
    file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    status = os.fstat(file)
    key = (status.st_dev, status.st_ino)
    if key in _held:
        os.close(file)
        return key
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(file)
        raise ConfigError(
            f"{directory} is in use by {owner}: wait for it to end, or choose another --workdir."
        ) from None
    except OSError as error:
        # Some network file systems have no locks; training there is better than not training.
        logger.warning(
            "%s cannot be locked (%s): make sure no other process uses it", directory, error.strerror
        )
    else:
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    _held[key] = file
    return key


def _step(line: bytes) -> int | None:
    """The step of a line of metrics; None if it is no such line."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _plain(value: Any) -> Any:
    """The value in types that JSON knows, without floats that it does not."""
    match value:
        case None | bool() | str():
            return value
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case numbers.Integral():
            return int(value)
    number = float(value)
    return number if math.isfinite(number) else str(number)
