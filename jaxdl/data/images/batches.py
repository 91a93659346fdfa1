"""In which order images come, and how they become batches: the promise of `jaxdl.data.loader`.

What is drawn for an example, its crop and colours, is decided by (seed, epoch, index); what two that are
mixed have of each other by (seed, position). Positions 2k and 2k + 1 are a pair, whatever the batch size.
"""

import logging
import math
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxdl.config import ImageDataConfig
from jaxdl.data.images.mixing import mix
from jaxdl.data.images.transforms import Transform, fit, training_transform
from jaxdl.data.images.types import Image, Source
from jaxdl.data.loader import ENDLESS, batches_of, permutation, require_shares, round_up
from jaxdl.data.types import Batch
from jaxdl.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes
_TRIES = 100  # examples in a row of which one has to be readable


class _Made(NamedTuple):
    """An example as it goes into a batch; `skipped` where another stands in for one that cannot be read."""

    image: Image
    label: int
    skipped: bool = False


def examples_per_epoch(config: ImageDataConfig, examples: int) -> int:
    """Returns how many of the examples an epoch has: all, or where `data.remainder` drops some, fewer.

    Raises:
        ConfigError: there are none left.
    """
    kept = examples - (examples % config.batch_size if config.remainder == "drop" else 0)
    if not kept:
        raise ConfigError(
            f"data.remainder drop leaves nothing: {examples} examples do not fill a batch of "
            f"{config.batch_size}; take data.batch_size {examples} or less, or data.remainder carry"
        )
    return kept


def train_batches(
    source: Source,
    config: ImageDataConfig,
    *,
    seed: int,
    start: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Generator[Batch, None, None]:
    """Returns endless training batches.

    Usage:

        batches = train_batches(source, config, seed=0, start=updates_already_made)
        try:
            for batch in itertools.islice(batches, 100):
                ...
        finally:
            batches.close()  # ends the threads and processes

    Args:
        source: the examples.
        config: how they are ordered, transformed and batched.
        seed: of order and augmentation.
        start: batches to skip, at no cost.
        process_index: this process's number.
        process_count: processes that share each batch: each takes a contiguous part, in their order.

    Returns:
        Generator of `image` uint8 [B / process_count, S, S, 3] and `label` int32 [B / process_count]; where
        images are mixed also `other` int32, the label of what was mixed in, and `share` float32, that of
        `label`; with `data.on_bad skip` also `skipped` bool, true where an example that cannot be read was
        replaced. `next` raises DataError at the batch with an example that cannot be read.

    Raises:
        ConfigError: the processes cannot share the batch evenly, or an epoch would be empty.
    """
    require_shares(config.batch_size, process_count)
    words = np.random.SeedSequence(seed).generate_state(3)
    order_seed, augment_seed, mix_seed = (int(word) for word in words)
    transform = training_transform(config, source)
    mixed = bool(config.mixup or config.cutmix)

    in_epoch = examples_per_epoch(config, len(source))

    def example(position: int, out: Image | None = None) -> _Made:
        epoch, place = divmod(position, in_epoch)
        index = int(permutation(order_seed, epoch, len(source))[place])
        rng = np.random.default_rng((augment_seed, epoch, index))
        return _readable(source, index, transform, rng, out, skip=config.on_bad == "skip")

    def empty(rows: int) -> Batch:
        shape = (rows, config.image_size, config.image_size, 3)
        batch: Batch = {"image": _aligned(shape), "label": np.empty(rows, np.int32)}
        if mixed:
            batch |= {"other": np.empty(rows, np.int32), "share": np.empty(rows, np.float32)}
        return batch | ({"skipped": np.empty(rows, bool)} if config.on_bad == "skip" else {})

    def note(batch: Batch, row: int, own: _Made) -> None:
        batch["label"][row] = own.label
        if "skipped" in batch:
            batch["skipped"][row] = own.skipped

    def fill(batch: Batch, positions: range) -> None:
        for row, position in enumerate(positions):
            place = batch["image"][row]
            own = example(position, place)
            if own.image is not place:
                place[...] = own.image
            note(batch, row, own)

    def fill_mixed(batch: Batch, positions: range) -> None:
        around = range(positions.start & ~1, (positions.stop + 1) & ~1)
        made = {position: example(position) for position in around}
        for row, position in enumerate(positions):
            own, other = made[position], made[position ^ 1]
            rng = np.random.default_rng((mix_seed, position))
            batch["image"][row], batch["share"][row] = mix(
                own.image, other.image, rng, mixup=config.mixup, cutmix=config.cutmix
            )
            batch["other"][row] = other.label
            note(batch, row, own)

    return batches_of(
        empty,
        fill_mixed if mixed else fill,
        ENDLESS,
        batch_size=config.batch_size,
        workers=config.workers,
        worker_processes=config.worker_processes,
        start=start,
        process_index=process_index,
        process_count=process_count,
    )


@dataclass(frozen=True)
class EvalBatches:
    """Every example once, in the source's order, in batches of one shape; can be iterated again and again.

    With `data.on_bad skip` an example that cannot be read counts as padding.

    Attributes:
        source: the examples.
        config: how they are transformed and batched.
        batch_size: examples and padding in each batch, over all processes.
        process_index: this process's number.
        process_count: processes that share each batch, as in training.
    """

    source: Source
    config: ImageDataConfig
    batch_size: int
    process_index: int = 0
    process_count: int = 1

    def __len__(self) -> int:
        return math.ceil(len(self.source) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        source, config = self.source, self.config
        size = config.image_size

        def empty(rows: int) -> Batch:
            return {
                "image": np.zeros((rows, size, size, 3), np.uint8),
                "label": np.zeros(rows, np.int32),
                "mask": np.zeros(rows, np.float32),
            }

        def fill(batch: Batch, positions: range) -> None:
            for row, index in enumerate(positions):
                try:
                    example = source[index]
                    batch["image"][row] = fit(example["image"], size, photographs=source.photographs)
                except DataError as error:
                    if config.on_bad == "error":
                        raise
                    _tell(error)
                    continue
                batch["label"][row], batch["mask"][row] = example["label"], 1

        return batches_of(
            empty,
            fill,
            len(source),
            batch_size=self.batch_size,
            workers=config.workers,
            worker_processes=config.worker_processes,
            process_index=self.process_index,
            process_count=self.process_count,
        )


def eval_batches(
    source: Source,
    config: ImageDataConfig,
    *,
    multiple_of: int = 1,
    process_index: int = 0,
    process_count: int = 1,
) -> EvalBatches:
    """Returns evaluation batches of `image`, `label` and `mask`: 1, and 0 on padding (which is all zeros).

    Args:
        source: the examples.
        config: `eval_batch_size`, `image_size`, `on_bad` and the workers are used.
        multiple_of: the batch size is rounded up to a multiple of this (the number of devices) and of
            `process_count`.
        process_index: this process's number.
        process_count: processes that share each batch, each a contiguous part.
    """
    batch_size = round_up(config.eval_batch_size, math.lcm(multiple_of, process_count))
    return EvalBatches(source, config, batch_size, process_index, process_count)


@dataclass(frozen=True)
class ImageFeed:
    """Images to train on and to evaluate on; see `jaxdl.data.types.Feed`.

    Attributes:
        config: how they are batched.
        train: those to train on.
        evaluation: those to evaluate on.
    """

    config: ImageDataConfig
    train: Source
    evaluation: Source

    @property
    def examples(self) -> int:
        """See `Feed.examples`."""
        return examples_per_epoch(self.config, len(self.train))

    @property
    def dropped(self) -> int:
        """See `Feed.dropped`."""
        return len(self.train) - self.examples

    @property
    def eval_examples(self) -> int:
        """See `Feed.eval_examples`."""
        return len(self.evaluation)

    @property
    def identity(self) -> dict[str, Any]:
        """See `Feed.identity`."""
        names = "\n".join(self.train.class_names or ())
        return {
            "training examples": len(self.train),
            "classes": self.train.num_classes,
            "digest of the names of the classes": zlib.crc32(names.encode()),
        }

    @property
    def max_bad(self) -> float:
        """See `Feed.max_bad`."""
        return self.config.max_bad

    def train_batches(self, *, seed: int, start: int = 0, **share: int) -> Generator[Batch, None, None]:
        """See `Feed.train_batches`."""
        return train_batches(self.train, self.config, seed=seed, start=start, **share)

    def eval_batches(self, *, multiple_of: int = 1, **share: int) -> EvalBatches:
        """See `Feed.eval_batches`."""
        return eval_batches(self.evaluation, self.config, multiple_of=multiple_of, **share)


def _readable(
    source: Source,
    index: int,
    transform: Transform,
    rng: np.random.Generator,
    out: Image | None,
    *,
    skip: bool,
) -> _Made:
    """Makes an example, or where it cannot be read and may be skipped, the next one that can."""
    for distance in range(min(_TRIES, len(source)) if skip else 1):
        try:
            example = source[(index + distance) % len(source)]
            return _Made(transform(example["image"], rng, out), example["label"], distance > 0)
        except DataError as error:
            if not skip:
                raise
            _tell(error)
            last = error
    raise DataError(f"{_TRIES} examples in a row cannot be read, or all of them; the last one: {last}")


def _aligned(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Makes an array, of which JAX on a CPU makes a device array without copying it."""
    size = math.prod(shape)
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return memory[first : first + size].reshape(shape)


_told: set[str] = set()


def _tell(error: DataError) -> None:
    """Logs an example that is skipped, once in a process."""
    if str(error) not in _told:
        _told.add(str(error))
        _log.warning("skipped: %s", error)
