"""Orderly stop on SIGTERM and SIGINT, at the same update in all processes."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

import jax
import numpy as np

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Notes a request to stop; the loop asks for it at the boundaries of updates.

    A context manager that puts the former handlers back. Further signals
    change nothing: the first is already being served, and cutting the save
    short would lose what it is for.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._former: dict[signal.Signals, signal._HANDLER] = {}

    def __bool__(self) -> bool:
        """True once a signal has arrived."""
        return self.name is not None

    def __enter__(self) -> Self:
        """Installs the handlers."""
        for number in SIGNALS:
            self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Puts the former handlers back."""
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.name = self.name is None, signal.Signals(number).name
        # os.write, since print is not safe where the signal interrupted another print.
        message = "stopping at the next update, then saving" if first else "already stopping; saving"
        os.write(2, f"\n{self.name}: {message}\n".encode())


class Agreement:
    """Whether the run is to stop, decided alike by all of its processes.

    Each sends its own wish with every batch, as `stop` [batch], and the step tells all of them whether
    any has one. So all learn of it at the same update, and nothing waits for an answer. A single process
    decides at once.

    Args:
        request: the signals of this process.
    """

    def __init__(self, request: StopRequest) -> None:
        self._request = request
        self._several = jax.process_count() > 1
        self._heard = False

    @property
    def name(self) -> str:
        """The signal, or what is known of it in a process that did not get it."""
        return self._request.name or "another process was asked to stop"

    def __bool__(self) -> bool:
        """True once all processes are to stop."""
        return self._heard if self._several else bool(self._request)

    def vote(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Adds this process's wish to its part of a batch; a single one's step is told nothing."""
        if not self._several:
            return {name: array for name, array in batch.items() if name != "skipped"}
        examples = len(next(iter(batch.values())))
        return batch | {"stop": np.full(examples, bool(self._request))}

    def known(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Gives as metrics what a single process knows of a batch without its step: how many were skipped."""
        return {} if self._several or "skipped" not in batch else {"skipped": batch["skipped"].sum()}

    def hear(self, metrics: dict[str, Any]) -> None:
        """Takes in what a step tells; `stop` is taken out of the metrics."""
        self._heard |= bool(np.any(metrics.pop("stop", False)))
