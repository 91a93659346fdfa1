"""Examples that cannot be read and are left out: counted alike by all processes, and not too many of them."""

from fractions import Fraction
from typing import Any

from jaxdl.errors import DataError


class Skips:
    """Counts the examples that others stood in for.

    Each epoch meets a bad example again, so what counts is the share of all examples of the epochs so far,
    the present one included.

    Args:
        share: the most of them that may be skipped.
        examples: in an epoch.
        batch_size: examples in an update.
        total: skipped before this attempt.

    Attributes:
        total: skipped so far.
    """

    def __init__(self, *, share: float, examples: int, batch_size: int, total: int = 0) -> None:
        self.total = total
        # As a fraction, because 0.29 * 100 in floating point is just below 29.
        self._share, self._examples, self._batch_size = Fraction(str(share)), examples, batch_size

    def hear(self, metrics: dict[str, Any]) -> None:
        """Replaces an update's `skipped` with `skipped_examples`, all so far."""
        if "skipped" in metrics:
            self.total += int(metrics.pop("skipped"))
            metrics["skipped_examples"] = self.total

    def check(self, step: int) -> None:
        """Ends the run after an update up to which too many were skipped.

        Raises:
            DataError: so it is.
        """
        epochs = -(-step * self._batch_size // self._examples)
        if self.total > self._share * epochs * self._examples:
            raise DataError(
                f"{self.total:,} examples could not be read in {epochs:,} epochs of {self._examples:,}, "
                f"which is more than data.max_bad {float(self._share):g} of them: mend or remove the files "
                "that the log names, or raise it"
            )

    def check_evaluation(self, counted: int, examples: int) -> None:
        """Ends the run where too few of the examples to evaluate on were counted.

        Raises:
            DataError: so it is.
        """
        if examples - counted > self._share * examples:
            raise DataError(
                f"{examples - counted:,} of {examples:,} examples to evaluate on could not be read, which "
                f"is more than data.max_bad {float(self._share):g} of them: mend or remove the files that "
                "the log names, or raise it"
            )
