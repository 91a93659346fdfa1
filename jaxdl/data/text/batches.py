"""In which order examples of text come, and how they become batches: the same promise as `data.loader`.

Example `p` of a run lies in epoch `p // N`, and its index is that epoch's permutation of 0 ... N-1 at
`p % N`. The loader's whole state is the number of batches already taken.
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import grain
import numpy as np

from jaxdl.data.loader import round_up
from jaxdl.data.text.pretraining import PretrainingSource
from jaxdl.data.types import Batch
from jaxdl.errors import ConfigError

_CHUNK = 16  # examples that a thread makes at once
_BATCHES_AHEAD = 2
_ENDLESS = 2**62  # positions; Grain wants a length, in a machine word


def train_batches(
    source: PretrainingSource,
    *,
    batch_size: int,
    seed: int,
    workers: int = 2,
    start: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Generator[Batch, None, None]:
    """Returns endless training batches; close the generator to end its threads.

    Args:
        source: the examples.
        batch_size: B, over all processes.
        seed: of order, pairs and hidden tokens.
        workers: threads that make examples (0: in the calling thread). Never changes the data.
        start: batches to skip, at no cost.
        process_index: this process's number.
        process_count: processes that share each batch: each takes a contiguous part, in their order.

    Returns:
        Generator of the arrays of `PretrainingSource.example`, with B / process_count of each in front.

    Raises:
        ConfigError: the processes cannot share the batch evenly.
    """
    if batch_size % process_count:
        raise ConfigError(
            f"data.batch_size {batch_size} does not divide over {process_count} processes: "
            f"use {round_up(batch_size, process_count)}"
        )
    order_seed, example_seed = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
    # The shuffle before the repetition, so that each epoch has its own permutation.
    order = grain.MapDataset.range(len(source)).shuffle(seed=order_seed).repeat()

    def example(position: int) -> Batch:
        return source.example(int(order[position]), position // len(source), example_seed)

    return _batches(example, _ENDLESS, batch_size, workers, start, process_index, process_count)


@dataclass(frozen=True)
class EvalBatches:
    """Every example once, in the source's order, with the same tokens hidden each time it is iterated.

    Batches are as in training, with `mask` float32 [B / process_count]: 1, and 0 on padding, which is
    all zeros and so has weight 0.

    Attributes:
        source: the examples.
        batch_size: examples and padding in each batch, over all processes.
        workers: threads, as in training.
        process_index: this process's number.
        process_count: processes that share each batch, each a contiguous part.
    """

    source: PretrainingSource
    batch_size: int
    workers: int = 2
    process_index: int = 0
    process_count: int = 1

    def __len__(self) -> int:
        return math.ceil(len(self.source) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        def example(position: int) -> Batch:
            return self.source.example(position, 0, 0) | {"mask": np.array(1, np.float32)}

        length, shared = len(self.source), (self.process_index, self.process_count)
        return _batches(example, length, self.batch_size, self.workers, 0, *shared)


def eval_batches(
    source: PretrainingSource,
    *,
    batch_size: int,
    multiple_of: int = 1,
    workers: int = 2,
    process_index: int = 0,
    process_count: int = 1,
) -> EvalBatches:
    """Returns evaluation batches, their size a multiple of `multiple_of` and `process_count`."""
    size = round_up(batch_size, math.lcm(multiple_of, process_count))
    return EvalBatches(source, size, workers, process_index, process_count)


def _batches(
    example: Callable[[int], Batch],
    length: int,
    batch_size: int,
    workers: int,
    start: int,
    process_index: int,
    process_count: int,
) -> Generator[Batch, None, None]:
    """Yields this process's part of the batches from `start` on, of the positions 0 ... `length` - 1."""
    share = batch_size // process_count
    chunk = math.gcd(share, _CHUNK)
    per_batch = share // chunk

    def read(number: int) -> Batch:
        batch, place = divmod(number, per_batch)
        first = batch * batch_size + process_index * share + place * chunk
        examples = [example(position) for position in range(first, min(first + chunk, length))]
        return _stack(examples or [_zeros(example(0))], chunk)

    options = grain.ReadOptions(
        num_threads=workers,
        prefetch_buffer_size=max(_BATCHES_AHEAD * per_batch, workers) if workers else 0,
    )
    numbers = grain.MapDataset.range(start * per_batch, -(-length // batch_size) * per_batch)
    parts = iter(numbers.map(read).to_iter_dataset(options))
    try:
        while group := list(itertools.islice(parts, per_batch)):
            yield {key: np.concatenate([part[key] for part in group]) for key in group[0]}
    finally:
        parts.close()


def _zeros(example: Batch) -> Batch:
    return {key: np.zeros_like(value) for key, value in example.items()}


def _stack(examples: list[Batch], count: int) -> Batch:
    """Makes a batch of `count`, of which those past the given examples are zeros."""
    stacked: Batch = {}
    for key, first in examples[0].items():
        stacked[key] = np.zeros((count, *first.shape), first.dtype)
        np.stack([example[key] for example in examples], out=stacked[key][: len(examples)])
    return stacked
