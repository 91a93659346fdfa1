"""Orderly stop on SIGTERM and SIGINT."""

import os
import signal
from types import FrameType, TracebackType
from typing import Self

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
