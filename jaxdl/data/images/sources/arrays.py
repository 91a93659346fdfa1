"""Sources that fit in memory or are computed: digits, .npz files, synthetic images."""

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jaxdl.config import ImageDataConfig
from jaxdl.data.files import printable
from jaxdl.data.images.types import RGB, Augment, Example, Pixels, Source
from jaxdl.data.types import Split
from jaxdl.errors import DataError

DIGITS = tuple("0123456789")  # names of classes

_SMALL = 64  # longest side, in pixels, up to which images are not treated as photographs
_NPZ_WANTED = "set data.dir to an .npz file with uint8 images x_train, x_test and integers y_train, y_test"


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
    mean, std = _statistics(pixels[~held_out, :, :, None])
    chosen = held_out if split == "eval" else ~held_out
    return array_source(
        "digits",
        split,
        pixels[chosen, :, :, None],
        labels[chosen],
        num_classes=len(DIGITS),
        augment="shift",
        mean=mean,
        std=std,
        class_names=DIGITS,
    )


def open_arrays(config: ImageDataConfig, split: Split) -> Source:
    """Opens the .npz file `config.dir` with the arrays that Keras's data sets have.

    These are `x_train` and `x_test`, images uint8 [N, H, W], [N, H, W, 1] or
    [N, H, W, 3], and `y_train` and `y_test`, labels of any integer type [N] or
    [N, 1]. Classes are 0 to the largest label of both splits; mean and standard
    deviation are those of the training images. Images of more than 64 pixels on
    a side are photographs; smaller ones get `shift_flip`, and greyscale ones
    `shift`, since they are mostly characters. The whole split lies in memory.

    Raises:
        DataError: the file is missing, damaged or without one of the arrays; one has another type or shape;
            images and labels differ in number, or the images of the splits in size; a label is negative.
    """
    assert config.dir is not None  # ImageDataConfig has checked it
    path = Path(config.dir).expanduser()
    train_images, train_labels = _npz_split(path, "train")
    test_images, test_labels = _npz_split(path, "test")
    shape = train_images.shape[1:]
    if test_images.shape[1:] != shape:
        raise DataError(
            f"{printable(path)}: an image of x_train is {list(shape)} but one of x_test is "
            f"{list(test_images.shape[1:])}: make them alike"
        )
    height, width, channels = shape
    photographs = max(height, width) > _SMALL
    augment: Augment = "crop_flip" if photographs else "shift" if channels == 1 else "shift_flip"
    mean, std = _statistics(train_images)
    return array_source(
        "arrays",
        split,
        train_images if split == "train" else test_images,
        train_labels if split == "train" else test_labels,
        num_classes=1 + int(max(train_labels.max(), test_labels.max())),
        augment=augment,
        photographs=photographs,
        mean=mean,
        std=std,
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
        return {"image": Pixels(pattern[cells].take(cells, axis=1) + (noise >> 1)), "label": label}

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


def _npz_split(path: Path, part: Literal["train", "test"]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Reads images [N, H, W, 1 or 3] and labels [N] of an .npz file."""
    images, labels = _npz_array(path, f"x_{part}"), _npz_array(path, f"y_{part}")
    shape = images.shape if images.ndim == 4 else (*images.shape, 1)
    if images.dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3) or not images.size:
        raise _unwanted(path, f"x_{part}", images, "uint8 [N, H, W], [N, H, W, 1] or [N, H, W, 3]")
    if labels.dtype.kind not in "iu" or labels.shape not in ((labels.size,), (labels.size, 1)):
        raise _unwanted(path, f"y_{part}", labels, "integers [N] or [N, 1]")
    if len(images) != len(labels):
        raise DataError(
            f"{printable(path)}: x_{part} has {len(images)} images but y_{part} has {len(labels)} labels"
        )
    labels = labels.reshape(-1).astype(np.int64)
    negative = np.flatnonzero(labels < 0)
    if len(negative):
        raise DataError(
            f"{printable(path)}: {len(negative)} of {len(labels)} labels of y_{part} are negative, "
            f"the first is {labels[negative[0]]} at example {negative[0]}"
        )
    return images.reshape(shape), labels


def _npz_array(path: Path, name: str) -> NDArray[Any]:
    try:
        # Opened here: NumPy leaves a file open that is no zip.
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array")
            if name not in arrays:
                found = ", ".join(map(printable, arrays)) or "nothing"
                raise DataError(f"{printable(path)} has no {name} but {found}: {_NPZ_WANTED}")
            return np.asarray(arrays[name])
    # What damaged files make the readers of the zip and of the array raise.
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{printable(path)}: {name} cannot be read ({error}): {_NPZ_WANTED}") from error


def _unwanted(path: Path, name: str, array: NDArray[Any], wanted: str) -> DataError:
    return DataError(
        f"{printable(path)}: {name} is {array.dtype} {list(array.shape)}, wanted is {wanted}: convert it"
    )


def _statistics(pixels: NDArray[np.uint8]) -> tuple[RGB, RGB]:
    """Returns mean and standard deviation of each channel, on a scale of 0 to 1, of [N, H, W, 1 or 3]."""
    total = np.zeros(pixels.shape[3], np.int64)
    squares = np.zeros(pixels.shape[3], np.int64)
    images = max(1, 2**22 // pixels[0].size)  # at a time, so that memory stays small
    for start in range(0, len(pixels), images):
        part = pixels[start : start + images]
        total += part.sum(axis=(0, 1, 2), dtype=np.int64)
        squares += np.square(part, dtype=np.int32).sum(axis=(0, 1, 2), dtype=np.int64)
    count = pixels.size // pixels.shape[3]
    mean = total / count
    # At least one step of 0..255: a channel that is the same everywhere would be divided by zero.
    std = np.maximum(np.sqrt(np.maximum(squares / count - mean**2, 0)), 1)
    return _rgb(mean / 255), _rgb(std / 255)


def _rgb(values: NDArray[np.float64]) -> RGB:
    red, green, blue = np.broadcast_to(values, 3).tolist()
    return red, green, blue


def array_source(
    name: str,
    split: Split,
    pixels: NDArray[np.uint8],
    labels: NDArray[np.int64],
    *,
    num_classes: int,
    augment: Augment,
    mean: RGB,
    std: RGB,
    photographs: bool = False,
    class_names: tuple[str, ...] | None = None,
) -> Source:
    """Makes a source of arrays.

    Args:
        name: of the source.
        split: which part of the data this is.
        pixels: the images, uint8 [N, H, W, 1 or 3].
        labels: int64 [N].
        num_classes, augment, mean, std, photographs, class_names: see `Source`.
    """

    def read(index: int) -> Example:
        image = pixels[index]
        if image.shape[2] == 1:
            image = np.repeat(image, 3, axis=2)
        return {"image": Pixels(image), "label": int(labels[index])}

    return Source(
        name=name,
        split=split,
        length=len(labels),
        read=read,
        num_classes=num_classes,
        augment=augment,
        photographs=photographs,
        mean=mean,
        std=std,
        class_names=class_names,
    )
