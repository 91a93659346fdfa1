"""Sources that fit in memory or are computed: digits, MNIST-like idx files, synthetic images."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxdl.config import ImageDataConfig
from jaxdl.data.images import printable
from jaxdl.data.types import RGB, Example, Image, Source, Split
from jaxdl.errors import DataError

_FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
# Fashion-MNIST and MNIST share file names, shapes and counts; their first labels tell them apart.
_FASHION_FIRST_LABELS: dict[Split, list[int]] = {
    "train": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5],
    "eval": [9, 2, 1, 1, 6, 1, 4, 6, 5, 7],
}
_DIGITS = tuple("0123456789")
_IDX_UINT8 = 0x08


def open_digits(config: ImageDataConfig, split: Split) -> Source:
    """Opens scikit-learn's digits: 1,797 images of 8x8, 1,437 for training and 360 for evaluation."""
    del config
    from sklearn.datasets import load_digits  # takes a second to import, and only this source needs it

    data = load_digits()
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)  # stored as counts of 0..16
    labels = data.target.astype(np.int64)
    # Every fifth example of each class, without a generator whose stream a new NumPy might change.
    held_out = np.zeros(len(labels), bool)
    held_out[np.argsort(labels, kind="stable")[::5]] = True
    train = pixels[~held_out] / 255
    chosen = held_out if split == "eval" else ~held_out
    return _grey_source(
        "digits",
        split,
        pixels[chosen],
        labels[chosen],
        augment_flip=False,
        mean=float(train.mean()),
        std=float(train.std()),
        class_names=_DIGITS,
    )


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
    return _grey_source(
        "fashion_mnist",
        split,
        pixels,
        labels,
        augment_flip=True,
        mean=0.2860,  # of Fashion-MNIST's training pixels
        std=0.3530,
        class_names=_FASHION_CLASSES if fashion else _DIGITS,
    )


def open_synthetic(config: ImageDataConfig, split: Split) -> Source:
    """Makes images from their index: a 4x4 colour pattern for each class, which can be learnt, under noise.

    There are `config.synthetic_examples` for training and a quarter as many,
    with other noise, for evaluation; classes take turns.
    """
    size, classes = config.image_size, config.synthetic_classes
    cells = np.arange(size) * 4 // size  # pixel -> cell of the pattern
    stream = {"train": 0, "eval": 1}[split]

    def read(index: int) -> Example:
        label = index % classes
        pattern = np.random.default_rng((2, label)).integers(128, size=(4, 4, 3), dtype=np.uint8)
        # Halves of 0..255: drawing 0..127 takes NumPy seven times as long.
        noise = np.random.default_rng((stream, index)).integers(256, size=(size, size, 3), dtype=np.uint8)
        return {"image": pattern[cells].take(cells, axis=1) + (noise >> 1), "label": label}

    length = config.synthetic_examples
    return Source(
        name="synthetic",
        split=split,
        length=length if split == "train" else math.ceil(length / 4),
        read=read,
        num_classes=classes,
        augment="none",
        mean=(0.5, 0.5, 0.5),
        std=(0.2, 0.2, 0.2),
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


def _grey_source(
    name: str,
    split: Split,
    pixels: NDArray[np.uint8],
    labels: NDArray[np.int64],
    *,
    augment_flip: bool,
    mean: float,
    std: float,
    class_names: tuple[str, ...],
) -> Source:
    """Makes a source of grey images uint8 [N, H, W] and labels [N]."""

    def read(index: int) -> Example:
        image: Image = np.repeat(pixels[index, :, :, None], 3, axis=2)
        return {"image": image, "label": int(labels[index])}

    def channels(value: float) -> RGB:
        return (value, value, value)

    return Source(
        name=name,
        split=split,
        length=len(labels),
        read=read,
        num_classes=len(class_names),
        augment="shift_flip" if augment_flip else "shift",
        mean=channels(mean),
        std=channels(std),
        class_names=class_names,
    )
