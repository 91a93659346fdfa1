"""Labels of ImageNet's evaluation images: from a text file, Kaggle's table or the development kit."""

import csv
import io
import os
import tarfile
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxdl.data.files import printable
from jaxdl.data.images.sources.folder import contents, listed
from jaxdl.errors import DataError

TRAINING_SET = "the training set"  # in messages

_LABEL_TEXTS = ("imagenet_2012_validation_synset_labels.txt", "val_labels.txt", "synset_labels.txt")
_LABEL_TABLE = "LOC_val_solution.csv"
_KIT = "ILSVRC2012_devkit_t12"
_TRUTH, _META = "data/ILSVRC2012_validation_ground_truth.txt", "data/meta.mat"


def read_labels(root: Path, images: str, names: list[str], classes: list[str]) -> NDArray[np.int32]:
    """Reads the labels of evaluation images that are not in class directories.

    Args:
        root: where the labels are.
        images: what messages call that which holds the images.
        names: the images' names, sorted.
        classes: names of all classes, in the order of their labels.

    Returns:
        int32 [N], the labels of `names`.

    Raises:
        DataError: there are no labels, they are damaged, or they do not fit the images or the classes.
    """
    where, wnids = _wnids(root, images, names)
    if len(wnids) != len(names):
        raise DataError(
            f"{where} has {len(wnids)} labels but {images} has {len(names)} images: fetch both again"
        )
    unknown = sorted(set(wnids) - set(classes))
    if unknown:
        raise DataError(f"{where} has {len(unknown)} classes that {TRAINING_SET} has not: {listed(unknown)}")
    number = {wnid: number for number, wnid in enumerate(classes)}
    return np.array([number[wnid] for wnid in wnids], np.int32)


def _wnids(root: Path, images: str, names: list[str]) -> tuple[str, list[str]]:
    """Returns the name of the file with the labels, and the class of each image."""
    for text in _LABEL_TEXTS:
        if (root / text).is_file():
            return printable(root / text), _lines((root / text).read_bytes())
    if (root / _LABEL_TABLE).is_file():
        return printable(root / _LABEL_TABLE), _from_table(root / _LABEL_TABLE, images, names)
    for kit in (f"{_KIT}.tar.gz", _KIT):
        if (root / kit).exists():
            return printable(root / kit), _from_kit(root / kit)
    raise DataError(
        f"{printable(root)} has no labels for the images of {images}: none of {', '.join(_LABEL_TEXTS)}, "
        f"{_LABEL_TABLE}, {_KIT}.tar.gz and {_KIT}/; {contents([root])}"
    )


def _lines(content: bytes) -> list[str]:
    lines = (line.strip() for line in content.decode("utf-8", "replace").splitlines())
    return [line for line in lines if line]


def _from_table(path: Path, images: str, names: list[str]) -> list[str]:
    """Reads Kaggle's table: the classes of `names`, or of all its images if they are more or fewer."""
    rows = list(csv.reader(io.StringIO(path.read_bytes().decode("utf-8-sig", "replace"))))
    if not rows or rows[0] != ["ImageId", "PredictionString"]:
        raise DataError(f"{printable(path)} does not begin with ImageId,PredictionString: fetch it again")
    table = {}
    for number, row in enumerate(rows[1:], 2):
        if len(row) != 2 or not row[1].strip():
            raise DataError(f"{printable(path)} line {number} is no image and its class: fetch it again")
        table[row[0]] = row[1].split()[0]
    if len(table) != len(names):
        return list(table.values())
    stems = [os.path.splitext(name)[0] for name in names]  # noqa: PTH122
    missing = [stem for stem in stems if stem not in table]
    if missing:
        raise DataError(f"{printable(path)} lacks {len(missing)} images that {images} has: {listed(missing)}")
    return [table[stem] for stem in stems]


def _from_kit(kit: Path) -> list[str]:
    """Reads the development kit, which numbers the classes in its own way."""
    from scipy.io import loadmat  # type: ignore[import-untyped]  # only this needs it

    name = printable(kit)
    content = {wanted: _kit_file(kit, wanted) for wanted in (_TRUTH, _META)}
    try:
        synsets = np.atleast_1d(loadmat(io.BytesIO(content[_META]), squeeze_me=True)["synsets"])
        wnids = {
            int(synset["ILSVRC2012_ID"]): str(synset["WNID"])
            for synset in synsets
            if int(synset["num_children"]) == 0
        }
        numbers = [int(line) for line in _lines(content[_TRUTH])]
    except Exception as error:  # a damaged file makes loadmat raise anything
        raise DataError(f"{name} cannot be read ({error}): fetch it again") from error
    unknown = sorted(set(numbers) - set(wnids))
    if unknown:
        raise DataError(
            f"{name}: {_TRUTH} has {len(unknown)} classes that {_META} has not: "
            f"{listed([str(number) for number in unknown])}"
        )
    return [wnids[number] for number in numbers]


def _kit_file(kit: Path, wanted: str) -> bytes:
    """Reads a file of the development kit, packed or not."""
    try:
        if kit.is_dir():
            return (kit / wanted).read_bytes()
        with tarfile.open(kit, "r:*") as archive:
            for member in archive:
                if member.isreg() and f"/{member.name}".endswith(f"/{wanted}"):
                    file = archive.extractfile(member)
                    assert file is not None  # it is a regular file
                    return file.read()
    except FileNotFoundError:
        pass
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{printable(kit)} cannot be read ({error}): fetch it again") from error
    raise DataError(f"{printable(kit)} has no {wanted}: fetch it again")
