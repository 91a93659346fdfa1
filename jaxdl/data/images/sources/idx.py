"""Fashion-MNIST and MNIST, in the idx files that they come in."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxdl.config import ImageDataConfig
from jaxdl.data.files import printable
from jaxdl.data.images.sources.arrays import DIGITS, array_source
from jaxdl.data.images.types import Source
from jaxdl.data.types import Split
from jaxdl.errors import DataError

_FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
# Fashion-MNIST and MNIST share file names, shapes and counts; their first labels tell them apart.
_FASHION_FIRST_LABELS: dict[Split, list[int]] = {
    "train": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5],
    "eval": [9, 2, 1, 1, 6, 1, 4, 6, 5, 7],
}
_IDX_UINT8 = 0x08


def open_fashion_mnist(config: ImageDataConfig, split: Split) -> Source:
    """Opens the four idx files of Fashion-MNIST, plain or gzipped, in `config.dir`.

    MNIST itself has the same files and works too; set `data.augment shift`
    there, because a mirrored digit is no digit.

    Raises:
        DataError: a file is missing, damaged, or does not fit the other one.
    """
    assert config.dir is not None  # ImageDataConfig has checked it
    prefix = "train" if split == "train" else "t10k"
    directory = Path(config.dir).expanduser()
    images_path = _find(directory, f"{prefix}-images-idx3-ubyte")
    labels_path = _find(directory, f"{prefix}-labels-idx1-ubyte")
    pixels = read_idx(images_path, dimensions=3)
    labels = read_idx(labels_path, dimensions=1).astype(np.int64)
    if len(pixels) != len(labels):
        raise DataError(
            f"{printable(images_path)} has {len(pixels)} images but {printable(labels_path)} has "
            f"{len(labels)} labels: fetch both files again"
        )
    wrong = np.flatnonzero(labels > 9)
    if len(wrong):
        raise DataError(
            f"{printable(labels_path)}: {len(wrong)} of {len(labels)} labels are not in 0..9, "
            f"the first is {labels[wrong[0]]} at example {wrong[0]}"
        )
    fashion = labels[:10].tolist() == _FASHION_FIRST_LABELS[split]
    return array_source(
        "fashion_mnist",
        split,
        pixels[..., None],
        labels,
        num_classes=10,
        augment="shift_flip",
        mean=(0.2860,) * 3,  # of Fashion-MNIST's training pixels
        std=(0.3530,) * 3,
        class_names=_FASHION_CLASSES if fashion else DIGITS,
    )


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """Reads an idx file of bytes (the format of MNIST), gzipped if its name ends in `.gz`.

    Args:
        path: the file.
        dimensions: the number of dimensions that it must have.

    Returns:
        uint8 array of the shape in the file's header, at least 1 long in each dimension; read-only.

    Raises:
        DataError: the file cannot be read, or header and content are not exactly what the format says.
    """
    name = printable(path)
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name} cannot be read ({error}): fetch it again") from error
    magic = bytes((0, 0, _IDX_UINT8, dimensions))
    if data[:4] != magic:
        raise DataError(f"{name} starts with {data[:4].hex()!r}, not with the magic number {magic.hex()!r}")
    header = 4 + 4 * dimensions
    if len(data) < header:
        raise DataError(f"{name} ends within its header ({len(data)} of {header} bytes): fetch it again")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", dimensions, offset=4))
    if 0 in shape:
        raise DataError(f"{name} holds no examples: its header says {shape}")
    if len(data) - header != math.prod(shape):
        raise DataError(
            f"{name} has {len(data) - header} bytes of content but its header {shape} asks for "
            f"{math.prod(shape)}: fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _find(directory: Path, stem: str) -> Path:
    for name in (stem, f"{stem}.gz"):
        if (directory / name).is_file():
            return directory / name
    raise DataError(
        f"{printable(directory)} has neither {stem} nor {stem}.gz: set data.dir to where they are"
    )
