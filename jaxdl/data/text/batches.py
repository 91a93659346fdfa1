"""In which order examples of text come, and how they become batches: the same promise as `data.loader`.

Example `p` of a run lies in epoch `p // N`, and its index is that epoch's permutation of 0 ... N-1 at
`p % N`. The loader's whole state is the number of batches already taken.
"""

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import grain
import numpy as np

from jaxdl.config import DataConfig
from jaxdl.data.loader import ENDLESS, batches_of, require_shares, round_up
from jaxdl.data.types import Batch


class Texts(Protocol):
    """Examples of text by index."""

    def __len__(self) -> int:
        """Number of examples."""

    def example(self, index: int, epoch: int, seed: int) -> Batch:
        """Makes one example; a function of its arguments alone.

        Args:
            index: of the example, in 0 ... len - 1.
            epoch: from 0; whatever is drawn is another in another.
            seed: at least 0.
        """


def train_batches(
    source: Texts,
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
        Generator of the arrays of `Texts.example`, with B / process_count of each in front.

    Raises:
        ConfigError: the processes cannot share the batch evenly.
    """
    require_shares(batch_size, process_count)
    order_seed, example_seed = (int(word) for word in np.random.SeedSequence(seed).generate_state(2))
    # The shuffle before the repetition, so that each epoch has its own permutation.
    order = grain.MapDataset.range(len(source)).shuffle(seed=order_seed).repeat()

    def example(position: int) -> Batch:
        return source.example(int(order[position]), position // len(source), example_seed)

    return batches_of(
        *_writers(source.example(0, 0, 0), example),
        ENDLESS,
        batch_size=batch_size,
        workers=workers,
        start=start,
        process_index=process_index,
        process_count=process_count,
    )


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

    source: Texts
    batch_size: int
    workers: int = 2
    process_index: int = 0
    process_count: int = 1

    def __len__(self) -> int:
        return math.ceil(len(self.source) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        def example(position: int) -> Batch:
            return self.source.example(position, 0, 0) | {"mask": np.array(1, np.float32)}

        return batches_of(
            *_writers(example(0), example),
            len(self.source),
            batch_size=self.batch_size,
            workers=self.workers,
            process_index=self.process_index,
            process_count=self.process_count,
        )


@dataclass(frozen=True)
class TextFeed:
    """Texts to train on and to evaluate on; see `jaxdl.data.types.Feed`.

    Attributes:
        config: `batch_size`, `eval_batch_size` and `workers` are used.
        train: those to train on.
        evaluation: those to evaluate on.
    """

    config: DataConfig
    train: Texts
    evaluation: Texts

    @property
    def examples(self) -> int:
        """See `Feed.examples`."""
        return len(self.train)

    @property
    def dropped(self) -> int:
        """See `Feed.dropped`."""
        return 0

    @property
    def identity(self) -> dict[str, Any]:
        """See `Feed.identity`."""
        return {"training examples": self.examples}

    @property
    def max_bad(self) -> float:
        """See `Feed.max_bad`; damaged text is found when it is opened."""
        return 0.0

    @property
    def eval_examples(self) -> int:
        """See `Feed.eval_examples`."""
        return len(self.evaluation)

    def train_batches(self, *, seed: int, start: int = 0, **share: int) -> Generator[Batch, None, None]:
        """See `Feed.train_batches`."""
        config = self.config
        settings = {"batch_size": config.batch_size, "workers": config.workers, "start": start}
        return train_batches(self.train, seed=seed, **settings, **share)

    def eval_batches(self, *, multiple_of: int = 1, process_count: int = 1, **share: int) -> EvalBatches:
        """See `Feed.eval_batches`."""
        config = self.config
        size = round_up(config.eval_batch_size, math.lcm(multiple_of, process_count))
        return EvalBatches(self.evaluation, size, config.workers, process_count=process_count, **share)


def _writers(
    like: Batch, example: Callable[[int], Batch]
) -> tuple[Callable[[int], Batch], Callable[[Batch, range], None]]:
    """Gives what makes arrays of zeros for rows like an example, and what writes the examples at
    positions."""

    def empty(rows: int) -> Batch:
        return {name: np.zeros((rows, *array.shape), array.dtype) for name, array in like.items()}

    def fill(batch: Batch, positions: range) -> None:
        for row, position in enumerate(positions):
            for name, array in example(position).items():
                batch[name][row] = array

    return empty, fill
