"""What the files of this package hand to each other: a source of examples, and one example."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, TypedDict

import cv2
import numpy as np
from numpy.typing import NDArray

from jaxdl.data.types import Split
from jaxdl.errors import DataError

# OpenCV would start threads of its own in each of the loader's.
cv2.setNumThreads(0)

Augment = Literal["none", "shift", "shift_flip", "crop_flip"]

Image: TypeAlias = NDArray[np.uint8]
"""One image: uint8 [height, width, 3], RGB."""

RGB: TypeAlias = tuple[float, float, float]

IMAGENET_MEAN: RGB = (0.485, 0.456, 0.406)
IMAGENET_STD: RGB = (0.229, 0.224, 0.225)


class Picture(Protocol):
    """An image whose pixels are decoded when they are asked for, and then no more of them than needed."""

    @property
    def height(self) -> int:
        """Rows."""

    @property
    def width(self) -> int:
        """Columns."""

    def pixels(self, reduce: int = 1) -> Image:
        """Gives the pixels.

        Args:
            reduce: 1, 2, 4 or 8: divides height and width, rounded up, by averaging. A file is decoded to the
                smaller size, which is faster.
        """


@dataclass(frozen=True, eq=False)
class Pixels:
    """A picture that is decoded already.

    Attributes:
        image: uint8 [height, width, 3].
    """

    image: Image

    @property
    def height(self) -> int:
        """Rows."""
        return len(self.image)

    @property
    def width(self) -> int:
        """Columns."""
        width: int = self.image.shape[1]
        return width

    def pixels(self, reduce: int = 1) -> Image:
        """Gives the pixels; see `Picture.pixels`."""
        if reduce == 1:
            return self.image
        height, width = (math.ceil(length / reduce) for length in self.image.shape[:2])
        return np.asarray(cv2.resize(self.image, (width, height), interpolation=cv2.INTER_AREA), np.uint8)


class Example(TypedDict):
    """One image and its class."""

    image: Picture
    label: int


@dataclass(frozen=True, eq=False)
class Source:
    """Examples by index, and what the rest of the program must know about them.

    Every image is RGB, greyscale ones too (three equal channels), so that one
    network fits all sources and weights move between them.

    Attributes:
        name: the source's name in the configuration.
        split: which part of the data this is.
        length: number of examples.
        read: `index -> Example`; deterministic, safe to call from several threads, and picklable (by
            cloudpickle), because other processes may call it.
        num_classes: labels are 0 ... num_classes - 1.
        augment: the training augmentation that `data.augment auto` means.
        photographs: images come in any size and the object fills the centre, so evaluation crops the
            centre as the ImageNet recipe does; otherwise the whole image is resized.
        mean: mean of each channel, on a scale of 0 to 1.
        std: standard deviation of each channel, on the same scale.
        class_names: one name a class, where known; always valid Unicode.
    """

    name: str
    split: Split
    length: int
    read: Callable[[int], Example] = field(repr=False)
    num_classes: int
    augment: Augment
    photographs: bool = False
    mean: RGB = IMAGENET_MEAN
    std: RGB = IMAGENET_STD
    class_names: tuple[str, ...] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        """Returns one example.

        Raises:
            IndexError: `index` is not in 0 ... len - 1.
            DataError: the example cannot be read or its label is out of range. A picture that is damaged is
                found out when its pixels are asked for.
        """
        if not 0 <= index < self.length:
            raise IndexError(f"example {index} of {self.length}")
        example = self.read(index)
        if not 0 <= example["label"] < self.num_classes:
            raise DataError(
                f"{self.name} {self.split} example {index}: label {example['label']} is not in "
                f"0..{self.num_classes - 1}"
            )
        return example
