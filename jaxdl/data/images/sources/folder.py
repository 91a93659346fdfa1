"""Images in directories: `dir`/train/<class>/*.jpg and `dir`/val/<class>/*.jpg."""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxdl.config import ImageDataConfig
from jaxdl.data.files import printable
from jaxdl.data.images.decode import EXTENSIONS, Encoded
from jaxdl.data.images.types import Example, Source
from jaxdl.data.types import Split
from jaxdl.errors import DataError

_log = logging.getLogger(__name__)

_SPLIT_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "eval": ("val", "validation", "test")}


def open_image_folder(config: ImageDataConfig, split: Split) -> Source:
    """Opens a directory with one directory a class.

    Classes are the sorted names of the directories under `train` (torchvision's
    order); a class may lack examples for evaluation but not for training. A
    class directory is searched to any depth. An image's class is the
    directory that it lies in, also where it is a link into another class.
    Hidden entries, other file types and links to directories below a class
    are ignored, and counted in one log line.

    Raises:
        DataError: the directory has another layout, a class has no images, or a link's target is missing.
    """
    assert config.dir is not None  # ImageDataConfig has checked it
    root = Path(config.dir).expanduser()
    train = _split_directory(root, "train")
    directory = train if split == "train" else _split_directory(root, "eval")
    return open_classes("image_folder", split, directory, class_names(train), printable(train))


def open_classes(name: str, split: Split, directory: Path, classes: Sequence[str], origin: str) -> Source:
    """Opens the images of a directory with one directory a class; see `open_image_folder`.

    Args:
        name: of the source.
        split: which part of the data this is.
        directory: where the class directories are; for evaluation it may lack some.
        classes: names of all classes, in the order of their labels.
        origin: what messages call that which the names of the classes are from.

    Raises:
        DataError: there are no class directories, some of no known class or without images, or a link's
            target is missing.
    """
    ignored: list[str] = []
    found = class_names(directory, ignored)
    unknown = sorted(set(found) - set(classes))
    if unknown:
        raise DataError(
            f"{printable(directory)} has {len(unknown)} classes that {origin} has not: {listed(unknown)}"
        )

    paths: list[str] = []
    labels: list[int] = []
    for class_name in found:
        before = len(paths)
        paths.extend(_images(os.path.join(directory, class_name), ignored))  # noqa: PTH118 - a million Path objects are slow
        if len(paths) == before:
            raise DataError(
                f"{printable(directory / class_name)} has no images ({' '.join(sorted(EXTENSIONS))}): "
                "add some or remove the directory"
            )
        labels.extend([classes.index(class_name)] * (len(paths) - before))
    if ignored:
        _log.warning(
            "%s: %d images in %d classes; ignored %d entries that are hidden, of another type or "
            "links to directories: %s",
            printable(directory),
            len(paths),
            len(found),
            len(ignored),
            listed(ignored),
        )
    label_array = np.asarray(labels, np.int32)

    def read(index: int) -> Example:
        return {"image": read_image(paths[index]), "label": int(label_array[index])}

    return Source(
        name=name,
        split=split,
        length=len(paths),
        read=read,
        num_classes=len(classes),
        augment="crop_flip",
        photographs=True,
        class_names=tuple(printable(class_name) for class_name in classes),
    )


def read_image(path: str) -> Encoded:
    """Reads an image file, without decoding it.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return Encoded(Path(path).read_bytes(), printable(path))
    except OSError as error:
        raise DataError(f"{printable(path)} cannot be read: {error.strerror}") from error


def _split_directory(root: Path, split: Split) -> Path:
    for name in _SPLIT_NAMES[split]:
        if (root / name).is_dir():
            return root / name
    wanted = " or ".join(f"{name}/<class>/" for name in _SPLIT_NAMES[split])
    found = listed([entry.name for entry in entries(root)])
    raise DataError(f"{printable(root)} has no {wanted}; it has: {found}")


def class_names(directory: Path, ignored: list[str] | None = None) -> list[str]:
    """Returns the sorted names of the class directories and adds the paths of other entries to `ignored`.

    Raises:
        DataError: there are none, or `directory` cannot be listed.
    """
    ignored = [] if ignored is None else ignored
    # A link to a directory above would be a class that holds all the others.
    here = Path(os.path.realpath(directory))
    above = {str(here), *map(str, here.parents)}
    names = []
    for entry in entries(directory):
        if _hidden(entry) or not entry.is_dir() or os.path.realpath(entry.path) in above:
            ignored.append(entry.path)
        else:
            names.append(entry.name)
    if not names:
        found = listed([os.path.basename(path) for path in ignored])  # noqa: PTH119
        raise DataError(f"{printable(directory)} has no class directories; it has: {found}")
    return names


def _images(directory: str, ignored: list[str]) -> Iterator[str]:
    """Yields the paths of the images below a directory, sorted, and adds what is not one to `ignored`."""
    for entry in entries(directory):
        if _hidden(entry):
            ignored.append(entry.path)
        elif entry.is_dir(follow_symlinks=False):
            yield from _images(entry.path, ignored)
        elif not is_image(entry.name):
            ignored.append(entry.path)
        elif entry.is_file():
            yield entry.path
        elif entry.is_symlink() and not entry.is_dir():
            # Counting it as ignored would train on whatever happens to be there.
            raise DataError(
                f"{printable(entry.path)} is a link to a file that does not exist: fetch or remove it"
            )
        else:
            ignored.append(entry.path)


def entries(directory: str | Path) -> list[os.DirEntry[str]]:
    """Returns what is in a directory, sorted by name.

    Raises:
        DataError: it cannot be listed.
    """
    try:
        with os.scandir(directory) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{printable(directory)} cannot be listed: {error.strerror}") from error


def contents(directories: list[Path]) -> str:
    """Returns what is in some directories, for a message."""
    return "; ".join(
        f"{printable(directory)} has: {listed([entry.name for entry in entries(directory)])}"
        for directory in directories
    )


def is_image(name: str) -> bool:
    """Tells by a file's name whether it is an image; hidden ones are none."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS  # noqa: PTH122


def _hidden(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(".")


def listed(names: list[str]) -> str:
    """Returns the first few names for a message."""
    shown = ", ".join(printable(name) for name in names[:5]) or "nothing"
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
