"""Images in tars, read in place: where each one is, is found once and kept in the user's cache."""

import functools
import hashlib
import logging
import os
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxdl.data.files import cache_directory, printable, replacing
from jaxdl.data.images.decode import EXTENSIONS, Encoded
from jaxdl.data.images.sources.folder import is_image, listed
from jaxdl.errors import DataError

_log = logging.getLogger(__name__)

_FORMAT = 1  # counts changes of an index's file and of what is put into it
_BLOCK = 512  # bytes; a tar consists of such
_OPEN = 128  # archives that a process keeps open; the class archives are 1,000


@dataclass(frozen=True)
class Part:
    """A tar with images: a whole file, or a member of another tar.

    Attributes:
        wnid: the class of its images; empty if they are of all classes.
        archive: number of the file.
        path: the file.
        start: where the tar begins in it, in bytes.
        end: where it ends.
    """

    wnid: str
    archive: int
    path: Path
    start: int
    end: int

    @property
    def name(self) -> str:
        """What messages call it."""
        inner = f": {self.wnid}.tar" if self.start else ""
        return printable(self.path) + inner


@dataclass(frozen=True, eq=False)
class Index:
    """Where the images are, in the order of class and name.

    Attributes:
        wnids: str [C], the sorted classes; empty if the archive does not tell.
        label: int32 [N], the class; 0 if the archive does not tell.
        archive: int32 [N], number of the file.
        offset: int64 [N], first byte within the file.
        size: int64 [N], bytes.
        name: bytes [N], the image's name without directories.
    """

    wnids: NDArray[np.str_]
    label: NDArray[np.int32]
    archive: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    name: NDArray[np.bytes_]


def open_archives(
    archives: list[Path], parts_of: Callable[[list[Path]], list[Part]]
) -> tuple[Index, Callable[[int], Encoded]]:
    """Finds the images of some archives; where they are is taken from the cache if it is there.

    Args:
        archives: the files.
        parts_of: finds the tars in them, in the order of their images; called if the cache has no index.

    Returns:
        Where the images are, and what reads one by its number. That has no open files, which would mean
        nothing in another process, and refuses an archive that has changed in the meantime.

    Raises:
        DataError: an archive is damaged or a tar has no images.
    """
    stamps = [_stamp(path) for path in archives]
    key = hashlib.sha256(repr((_FORMAT, stamps)).encode("utf-8", "surrogateescape")).hexdigest()
    place = cache_directory("images") / f"imagenet-{key[:32]}.npz"
    index = _load(place)
    if index is None:
        index = _build(parts_of(archives))
        _save(index, place)
    return index, _reader(stamps, index)


def whole_file(archives: list[Path]) -> list[Part]:
    """Returns the only archive as one tar, with images of all classes."""
    (path,) = archives
    return [Part("", 0, path, 0, path.stat().st_size)]


def members(part: Part) -> Iterator[tarfile.TarInfo]:
    """Yields the members of a tar; their offsets are within the file `part.path`.

    Raises:
        DataError: the tar cannot be read, is damaged or incomplete.
    """
    damage = f"{part.name} is not a tar or is damaged or incomplete"
    try:
        with part.path.open("rb") as file:
            file.seek(part.start)
            # Not compressed ("r:"), or the members would not lie at fixed places.
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    if member.offset_data + member.size > part.end:
                        raise DataError(f"{damage}, it ends within {printable(member.name)}: fetch it again")
                    yield member
                reached = archive.offset
            # tarfile takes for the end whatever is no header; the end is a block of zeros.
            file.seek(reached)
            last = file.read(_BLOCK)
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{damage} ({error}): fetch it again") from error
    if last != bytes(_BLOCK) or reached + _BLOCK > part.end:
        raise DataError(f"{damage}, at byte {reached - part.start}: fetch it again")


def base_name(member: tarfile.TarInfo) -> str:
    """Returns the name of a member without directories."""
    return member.name.rpartition("/")[2]


def _build(parts: Sequence[Part]) -> Index:
    """Finds all images of some tars."""
    path = parts[0].path if parts[-1].archive == 0 else parts[0].path.parent
    _log.info("%s: looking for all images, once; this takes minutes", printable(path))
    started = time.monotonic()
    ignored: list[str] = []
    columns = [_scan(part, ignored) for part in parts]
    counts = [len(names) for names, _, _ in columns]
    names, offsets, sizes = (np.concatenate(column) for column in zip(*columns, strict=True))
    _log.info("%d images in %d archives, found in %.1f s", len(names), len(parts), time.monotonic() - started)
    if ignored:
        _log.warning("ignored %d members that are no images: %s", len(ignored), listed(ignored))
    return Index(
        wnids=np.array([part.wnid for part in parts if part.wnid], np.str_),
        label=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        archive=np.repeat(np.array([part.archive for part in parts], np.int32), counts),
        offset=offsets,
        size=sizes,
        name=names,
    )


def _scan(part: Part, ignored: list[str]) -> tuple[NDArray[np.bytes_], NDArray[np.int64], NDArray[np.int64]]:
    """Returns names, offsets and sizes of a tar's images, by name, and adds other files to `ignored`."""
    found: dict[bytes, tuple[int, int]] = {}
    for member in members(part):
        name = base_name(member)
        if member.isreg() and is_image(name):
            # As in unpacking, the last of one name counts.
            found[os.fsencode(name)] = (member.offset_data, member.size)
        elif not member.isdir():
            ignored.append(member.name)
    if not found:
        raise DataError(f"{part.name} has no images ({' '.join(sorted(EXTENSIONS))}): fetch it again")
    names = sorted(found)
    places = np.array([found[name] for name in names], np.int64)
    return np.array(names, np.bytes_), places[:, 0].copy(), places[:, 1].copy()


def _load(place: Path) -> Index | None:
    """Reads an index if it is there and undamaged."""
    try:
        # Opened here: NumPy leaves a file open that is no zip.
        with place.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            index = Index(**arrays)
    except FileNotFoundError:
        return None
    # What damaged files make the readers of the zip and of the arrays raise.
    except (OSError, EOFError, ValueError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        _log.warning("%s is damaged and is made anew: %s", printable(place), error)
        return None
    return index


def _save(index: Index, place: Path) -> None:
    try:
        with replacing(place) as written:
            np.savez(written, **{name: getattr(index, name) for name in Index.__dataclass_fields__})
    except OSError as error:
        _log.warning("every run will index the archives anew: cannot write %s (%s)", printable(place), error)


@dataclass(frozen=True)
class _Stamp:
    """A file as it was when it was indexed."""

    path: str
    size: int
    changed: int


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return _Stamp(os.path.realpath(path), status.st_size, status.st_mtime_ns)


class _Archive:
    """An open file; it is closed when nobody has it any more, since a thread may be reading from it."""

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._descriptor).st_size

    def read(self, size: int, offset: int) -> bytes:
        """Reads at a place, whatever other threads do."""
        return os.pread(self._descriptor, size, offset)


@functools.lru_cache(maxsize=_OPEN)
def _opened(stamp: _Stamp) -> _Archive:
    """Opens an archive, once a process."""
    archive = _Archive(stamp.path)
    if archive.size != stamp.size:
        raise DataError(
            f"{printable(stamp.path)} had {stamp.size} bytes when the run began and has {archive.size} now: "
            "start the run again"
        )
    return archive


def _reader(stamps: list[_Stamp], index: Index) -> Callable[[int], Encoded]:
    """Returns what reads an image; it has no open files, which would mean nothing in another process."""
    wnids = index.wnids.tolist()

    def read(number: int) -> Encoded:
        stamp = stamps[index.archive[number]]
        size = int(index.size[number])
        directory = f"{wnids[index.label[number]]}/" if wnids else ""
        base = os.fsdecode(index.name[number])
        name = printable(f"{Path(stamp.path).name}: {directory}{base}")
        try:
            data = _opened(stamp).read(size, int(index.offset[number]))
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error.strerror}") from error
        if len(data) != size:
            raise DataError(f"{name} cannot be read: the archive ends within it, fetch it again")
        return Encoded(data, name)

    return read
