"""ILSVRC 2012 as it is distributed, read from its archives without unpacking them."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxdl.config import ImageDataConfig
from jaxdl.data.files import printable
from jaxdl.data.images.decode import Encoded
from jaxdl.data.images.sources.archives import Part, base_name, members, open_archives, whole_file
from jaxdl.data.images.sources.folder import (
    class_names,
    contents,
    entries,
    is_image,
    listed,
    open_classes,
    read_image,
)
from jaxdl.data.images.sources.imagenet_labels import TRAINING_SET, read_labels
from jaxdl.data.images.types import Example, Source
from jaxdl.data.types import Split
from jaxdl.errors import DataError

_TRAIN = "ILSVRC2012_img_train.tar"
_VAL = "ILSVRC2012_img_val.tar"
_CLASS_ARCHIVE = re.compile(r"n\d{8}\.tar")
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_\d{8}\.\w+")


def open_imagenet(config: ImageDataConfig, split: Split) -> Source:
    """Opens ILSVRC 2012 in the directory `config.dir`; of each list the first that is there is taken.

    - Training images: `ILSVRC2012_img_train.tar`; the 1,000 archives of it as
      `n01440764.tar` or `train/n01440764.tar`; `train/<class>/*.JPEG`.
    - Evaluation images: `ILSVRC2012_img_val.tar`; `val/<class>/*.JPEG`; `val/*.JPEG`;
      `ILSVRC2012_val_00000001.JPEG` and so on.
    - Labels of evaluation images that are not in class directories: a text file with one WordNet number a
      line in the order of the images' names (`imagenet_2012_validation_synset_labels.txt`, `val_labels.txt`
      or `synset_labels.txt`); Kaggle's `LOC_val_solution.csv`; the development kit,
      `ILSVRC2012_devkit_t12.tar.gz` or unpacked.

    Classes are the sorted WordNet numbers (wnids) of the training images,
    which are therefore needed for evaluation too; images are in the order of
    class and name. The places of the images in the archives are found once,
    which takes minutes, and kept in the user's cache.

    Raises:
        DataError: images or labels are missing, damaged, or do not fit each other.
    """
    assert config.dir is not None  # ImageDataConfig has checked it
    root = Path(config.dir).expanduser()
    archives = _train_archives(root)
    train = root / "train"
    if split == "eval":
        classes = [part.wnid for part in _class_parts(archives)] if archives else class_names(train)
        return _open_eval(root, classes)
    if not archives:
        return open_classes("imagenet", "train", train, class_names(train), printable(train))
    index, image = open_archives(archives, _class_parts)
    return _source("train", index.wnids.tolist(), index.label, image)


def _train_archives(root: Path) -> list[Path]:
    """Returns the archives with the training images; none where they lie unpacked in `train`."""
    if (root / _TRAIN).is_file():
        return [root / _TRAIN]
    there = [directory for directory in (root, root / "train") if directory.is_dir()]
    for directory in there:
        found = [Path(entry.path) for entry in entries(directory) if _CLASS_ARCHIVE.fullmatch(entry.name)]
        if found:
            return found
    if len(there) == 2 and any(entry.is_dir() for entry in entries(root / "train")):
        return []
    raise DataError(
        f"{printable(root)} has no training images: neither {_TRAIN} nor n01440764.tar and so on, "
        f"train/n01440764.tar and so on, or train/<class>/; {contents(there)}"
    )


def _class_parts(archives: list[Path]) -> list[Part]:
    """Returns the tars of the classes, in the order of the classes."""
    if archives[0].name != _TRAIN:
        return [Part(path.stem, number, path, 0, path.stat().st_size) for number, path in enumerate(archives)]
    (whole,) = whole_file(archives)
    parts: dict[str, Part] = {}
    others = []
    for member in members(whole):
        name = base_name(member)
        if member.isreg() and _CLASS_ARCHIVE.fullmatch(name):
            start = member.offset_data
            # As in unpacking, the last of one name counts.
            parts[name] = Part(name.removesuffix(".tar"), 0, whole.path, start, start + member.size)
        else:
            others.append(member.name)
    if not parts:
        raise DataError(
            f"{whole.name} has no archives of classes, as n01440764.tar; it has: {listed(others)}"
        )
    return [parts[name] for name in sorted(parts)]


def _open_eval(root: Path, classes: list[str]) -> Source:
    if (root / _VAL).is_file():
        index, image = open_archives([root / _VAL], whole_file)
        names = [os.fsdecode(name) for name in index.name.tolist()]
        labels = read_labels(root, printable(root / _VAL), names, classes)
        return _source("eval", classes, labels, image)
    val = root / "val"
    if val.is_dir() and any(entry.is_dir() and not entry.name.startswith(".") for entry in entries(val)):
        return open_classes("imagenet", "eval", val, classes, TRAINING_SET)
    there = [directory for directory in (val, root) if directory.is_dir()]
    for directory in there:
        paths = [
            entry.path
            for entry in entries(directory)
            if is_image(entry.name) and (directory == val or _VAL_IMAGE.fullmatch(entry.name))
        ]
        if paths:
            labels = read_labels(root, printable(directory), [Path(path).name for path in paths], classes)
            return _source("eval", classes, labels, _file_reader(paths))
    raise DataError(
        f"{printable(root)} has no evaluation images: neither {_VAL} nor val/<class>/, val/*.JPEG or "
        f"ILSVRC2012_val_00000001.JPEG and so on; {contents(there[::-1])}"
    )


def _source(
    split: Split, classes: list[str], labels: NDArray[np.int32], image: Callable[[int], Encoded]
) -> Source:
    def read(index: int) -> Example:
        return {"image": image(index), "label": int(labels[index])}

    return Source(
        name="imagenet",
        split=split,
        length=len(labels),
        read=read,
        num_classes=len(classes),
        augment="crop_flip",
        photographs=True,
        class_names=tuple(map(printable, classes)),
    )


def _file_reader(paths: list[str]) -> Callable[[int], Encoded]:
    return lambda index: read_image(paths[index])
