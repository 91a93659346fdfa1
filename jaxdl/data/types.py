"""What the files of this package hand to each other: a source of examples, one example, one batch."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from jaxdl.errors import DataError

Split = Literal["train", "eval"]
Augment = Literal["none", "shift", "shift_flip", "crop_flip"]

Image: TypeAlias = NDArray[np.uint8]
"""One image: uint8 [height, width, 3], RGB."""

Batch: TypeAlias = dict[str, NDArray[Any]]
"""`image` uint8 [B, S, S, 3] and `label` int32 [B]; for evaluation also `mask` float32 [B], 0 on padding."""

RGB: TypeAlias = tuple[float, float, float]

IMAGENET_MEAN: RGB = (0.485, 0.456, 0.406)
IMAGENET_STD: RGB = (0.229, 0.224, 0.225)


class Feed(Protocol):
    """The examples of a run, to train on and to evaluate on, as batches."""

    @property
    def examples(self) -> int:
        """Number of examples to train on."""

    @property
    def eval_examples(self) -> int:
        """Number of examples to evaluate on."""

    def train_batches(
        self, *, seed: int, start: int = 0, process_index: int = 0, process_count: int = 1
    ) -> Generator[Batch, None, None]:
        """Returns endless training batches; close the generator to end its threads.

        Args:
            seed: of order and whatever else is drawn.
            start: batches to skip, at no cost.
            process_index: this process's number.
            process_count: processes that share each batch: each takes a contiguous part, in their order.

        Raises:
            ConfigError: the processes cannot share the batch evenly.
        """

    def eval_batches(
        self, *, multiple_of: int = 1, process_index: int = 0, process_count: int = 1
    ) -> Iterable[Batch]:
        """Returns every example once, in batches of one shape, as often as it is iterated.

        Batches have a `mask` float32 [B]: 1, and 0 on padding.

        Args:
            multiple_of: the batch size is rounded up to a multiple of this and of `process_count`.
            process_index: this process's number.
            process_count: processes that share each batch, as in training.
        """


class Example(TypedDict):
    """One image and its class."""

    image: Image
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
        read: `index -> Example`; deterministic and safe to call from several threads.
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
            DataError: the example cannot be read or its label is out of range.
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
