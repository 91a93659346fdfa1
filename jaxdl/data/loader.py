"""In which order examples come, and how they become batches.

Example `p` of a run (batch `p // B`, place `p % B`) is decided by (seed, `p`)
alone: it lies in epoch `p // N`, and its index is that epoch's permutation of
0 ... N-1 at `p % N`. So batches straddle the ends of epochs, nothing is
dropped, and the loader's whole state is one integer, the number of batches
already taken. Threads and processes only compute ahead; they decide nothing.
"""

import functools
import itertools
import math
import threading
from collections.abc import Callable, Generator
from fractions import Fraction

import grain
import numpy as np
from numpy.typing import NDArray

from jaxdl.data.types import Batch
from jaxdl.data.workers import in_processes
from jaxdl.errors import ConfigError

_CHUNK = 64  # examples, at most, that a thread makes at once: each hand-over between threads costs time
_BATCHES_AHEAD = 2
ENDLESS = 2**62  # positions; Grain wants a length, in a machine word


def updates_in(epochs: float, examples: int, batch_size: int) -> int:
    """Returns the number of updates in which every example is seen `epochs` times: ceil(epochs * N / B)."""
    # As a fraction, because 1.1 * 10 / 11 in floating point is just above 1.
    return math.ceil(Fraction(str(epochs)) * examples / batch_size)


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, length: int) -> NDArray[np.int32]:
    """Returns the order of the examples in an epoch: int32 [length], read-only.

    It takes 4 bytes an example, and finding the next one no time.
    """
    # NumPy promises never to change the stream of this generator, unlike that of default_rng.
    order = np.random.RandomState((seed, epoch)).permutation(length).astype(np.int32)
    order.flags.writeable = False
    return order


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
    empty: Callable[[int], Batch],
    fill: Callable[[Batch, range], None],
    length: int,
    *,
    batch_size: int,
    workers: int,
    worker_processes: int = 0,
    start: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Generator[Batch, None, None]:
    """Yields this process's part of batches `start`, `start` + 1, ... of the positions 0 ... `length` - 1.

    At most a few batches are held ahead.

    Args:
        empty: makes arrays for so many rows, which hold padding.
        fill: writes the examples at some positions into the first rows of arrays; there may be fewer
            positions than rows, or none. Both are picklable (by cloudpickle) where there are worker
            processes.
        length: number of positions; `ENDLESS` for all there can be.
        batch_size: examples in a batch, over all processes.
        workers: threads that make examples (0: in the calling thread), in each worker process if there are
            any.
        worker_processes: processes that make examples (0: none but this one). They end with this one.
        start: batches to skip.
        process_index: this process's number.
        process_count: processes that share each batch evenly, each a contiguous part.

    Raises:
        DataError: a worker process was lost.
    """
    share = batch_size // process_count
    per_batch = math.ceil(share / _CHUNK)

    def places(number: int) -> tuple[int, slice, range]:
        """A chunk's batch, its rows in this process's part of it, and the positions of its examples."""
        batch, place = divmod(number, per_batch)
        rows = slice(place * share // per_batch, (place + 1) * share // per_batch)
        first = batch * batch_size + process_index * share
        return batch, rows, range(min(first + rows.start, length), min(first + rows.stop, length))

    def made(number: int) -> Batch:
        _, rows, positions = places(number)
        part = empty(rows.stop - rows.start)
        fill(part, positions)
        return part

    batches: dict[int, Batch] = {}
    lock = threading.Lock()

    def written(number: int) -> int:
        """Writes a chunk to its place in the batch, so that nobody has to copy it there."""
        batch, rows, positions = places(number)
        with lock:
            whole = batches.get(batch) or batches.setdefault(batch, empty(share))
        fill({name: array[rows] for name, array in whole.items()}, positions)
        return batch

    ahead = _BATCHES_AHEAD * per_batch
    options = grain.ReadOptions(
        num_threads=workers, prefetch_buffer_size=max(ahead, workers) if workers else 0
    )
    numbers = grain.MapDataset.range(start * per_batch, -(-length // batch_size) * per_batch)
    if worker_processes:
        chunks = in_processes(numbers.map(made).to_iter_dataset(options), worker_processes, ahead)
    else:
        chunks = iter(numbers.map(written).to_iter_dataset(options))
    try:
        while parts := list(itertools.islice(chunks, per_batch)):
            if worker_processes:
                yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            else:
                yield batches.pop(parts[0])
    finally:
        chunks.close()
