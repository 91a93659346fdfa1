"""In which order examples come, and how they become batches.

Example `p` of a run (batch `p // B`, place `p % B`) is decided by (seed, `p`)
alone: it lies in epoch `p // N`, and its index is that epoch's permutation of
0 ... N-1 at `p % N`. So batches straddle the ends of epochs, nothing is
dropped, and the loader's whole state is one integer, the number of batches
already taken. Its augmentation is decided by (seed, epoch, index). Threads
only compute ahead; they decide nothing.
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import grain
import numpy as np

from jaxdl.config import ImageDataConfig
from jaxdl.data.transforms import augmentation, fit
from jaxdl.data.types import Batch, Example, Source
from jaxdl.errors import ConfigError

_CHUNK = (
    16  # examples that a thread makes at once: handing over single ones costs more than making a small one
)
_BATCHES_AHEAD = 2
ENDLESS = 2**62  # positions; Grain wants a length, in a machine word


_Made = TypeVar("_Made")
"""An example as its source makes it."""


def updates_in(epochs: float, examples: int, batch_size: int) -> int:
    """Returns the number of updates in which every example is seen `epochs` times: ceil(epochs * N / B)."""
    # As a fraction, because 1.1 * 10 / 11 in floating point is just above 1.
    return math.ceil(Fraction(str(epochs)) * examples / batch_size)


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
            batches.close()  # ends the threads

    Args:
        source: the examples.
        config: `batch_size`, `image_size`, `augment` and `workers` are used.
        seed: of order and augmentation.
        start: batches to skip, at no cost.
        process_index: this process's number.
        process_count: processes that share each batch: each takes a contiguous part, in their order.

    Returns:
        Generator of `image` uint8 [B / process_count, S, S, 3] and `label` int32 [B / process_count].
        `next` raises DataError at the batch with an example that cannot be read.

    Raises:
        ConfigError: the processes cannot share the batch evenly.
    """
    require_shares(config.batch_size, process_count)
    order_seed, augment_seed = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
    name = source.augment if config.augment == "auto" else config.augment
    transform = augmentation(name, config.image_size, photographs=source.photographs)

    def augmented(example: Example, rng: np.random.Generator) -> Example:
        return {"image": transform(example["image"], rng), "label": example["label"]}

    # The random map comes before the shuffle so that the number that seeds it is epoch * N + index, and the
    # shuffle before the repetition so that each epoch has its own permutation.
    examples = grain.MapDataset.source(source).random_map(augmented, seed=augment_seed)
    examples = examples.shuffle(seed=order_seed).repeat()
    return batches_of(
        lambda position: examples[position],
        ENDLESS,
        lambda made, count: _stack(made, count, config.image_size, mask=False),
        batch_size=config.batch_size,
        workers=config.workers,
        start=start,
        process_index=process_index,
        process_count=process_count,
    )


@dataclass(frozen=True)
class EvalBatches:
    """Every example once, in the source's order, in batches of one shape; can be iterated again and again.

    Attributes:
        source: the examples.
        config: `image_size` and `workers` are used.
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
        def example(index: int) -> Example:
            plain = self.source[index]
            image = fit(plain["image"], self.config.image_size, photographs=self.source.photographs)
            return {"image": image, "label": plain["label"]}

        return batches_of(
            example,
            len(self.source),
            lambda made, count: _stack(made, count, self.config.image_size, mask=True),
            batch_size=self.batch_size,
            workers=self.config.workers,
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
        config: `eval_batch_size`, `image_size` and `workers` are used.
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
        return len(self.train)

    @property
    def eval_examples(self) -> int:
        """See `Feed.eval_examples`."""
        return len(self.evaluation)

    def train_batches(self, *, seed: int, start: int = 0, **share: int) -> Generator[Batch, None, None]:
        """See `Feed.train_batches`."""
        return train_batches(self.train, self.config, seed=seed, start=start, **share)

    def eval_batches(self, *, multiple_of: int = 1, **share: int) -> EvalBatches:
        """See `Feed.eval_batches`."""
        return eval_batches(self.evaluation, self.config, multiple_of=multiple_of, **share)


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return value + -value % multiple


def require_shares(batch_size: int, process_count: int) -> None:
    """Refuses a batch that processes cannot share evenly.

    Raises:
        ConfigError: they cannot.
    """
    if batch_size % process_count:
        raise ConfigError(
            f"data.batch_size {batch_size} does not divide over {process_count} processes: "
            f"use {round_up(batch_size, process_count)}"
        )


def batches_of(
    example: Callable[[int], _Made],
    length: int,
    stack: Callable[[list[_Made], int], Batch],
    *,
    batch_size: int,
    workers: int,
    start: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Generator[Batch, None, None]:
    """Yields this process's part of batches `start`, `start` + 1, ... of the positions 0 ... `length` - 1.

    Args:
        example: makes the example at a position.
        length: number of positions; `ENDLESS` for all there can be.
        stack: makes arrays of so many rows of examples, of which there may be fewer, or none.
        batch_size: examples in a batch, over all processes.
        workers: threads that make examples (0: in the calling thread).
        start: batches to skip.
        process_index: this process's number.
        process_count: processes that share each batch evenly, each a contiguous part.
    """
    share = batch_size // process_count
    chunk = math.gcd(share, _CHUNK)
    per_batch = share // chunk

    def read(number: int) -> Batch:
        batch, place = divmod(number, per_batch)
        first = batch * batch_size + process_index * share + place * chunk
        return stack([example(position) for position in range(first, min(first + chunk, length))], chunk)

    batches = -(-length // batch_size)
    options = grain.ReadOptions(
        num_threads=workers,
        prefetch_buffer_size=max(_BATCHES_AHEAD * per_batch, workers) if workers else 0,
    )
    chunks = iter(
        grain.MapDataset.range(start * per_batch, batches * per_batch).map(read).to_iter_dataset(options)
    )
    try:
        while parts := list(itertools.islice(chunks, per_batch)):
            yield {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    finally:
        chunks.close()


def _stack(examples: list[Example], count: int, size: int, *, mask: bool) -> Batch:
    """Makes a batch of `count`, of which those past the given examples are padding."""
    image = np.zeros((count, size, size, 3), np.uint8)
    label = np.zeros(count, np.int32)
    for i, example in enumerate(examples):
        image[i], label[i] = example["image"], example["label"]
    batch: Batch = {"image": image, "label": label}
    if mask:
        batch["mask"] = (np.arange(count) < len(examples)).astype(np.float32)
    return batch
