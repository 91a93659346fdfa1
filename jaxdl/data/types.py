"""What the files of this package hand to each other: batches, and what yields them."""

from collections.abc import Generator, Iterable
from typing import Any, Literal, Protocol, TypeAlias

from numpy.typing import NDArray

Split = Literal["train", "eval"]

Batch: TypeAlias = dict[str, NDArray[Any]]
"""Arrays with one row an example; for evaluation with `mask` float32 [B] too, 0 on padding."""


class Feed(Protocol):
    """The examples of a run, to train on and to evaluate on, as batches."""

    @property
    def examples(self) -> int:
        """Number of examples in an epoch of training."""

    @property
    def dropped(self) -> int:
        """Examples that each epoch leaves out because they fill no batch."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a run that goes on has to find as it was, as JSON values by name."""

    @property
    def max_bad(self) -> float:
        """Share of the examples that a run may skip because they cannot be read."""

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
