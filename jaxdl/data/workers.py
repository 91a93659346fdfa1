"""Processes that make examples: they end with the process that started them, and their loss ends the run."""

import contextlib
import multiprocessing
import signal
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import grain
from absl import flags

from jaxdl.data.parallel import follow_parent, held_back
from jaxdl.errors import DataError


def in_processes(dataset: grain.IterDataset[Any], count: int, ahead: int) -> "Workers":
    """Makes the elements of a dataset in other processes, in the same order.

    Args:
        dataset: picklable by cloudpickle.
        count: processes.
        ahead: elements that all of them together may hold ready.
    """
    # Grain reads its options from flags, which no other part of a program may have parsed.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    # Or it adds advice of its own to the message of an exception.
    grain.config.update("py_traceback_filtering", "off")
    options = grain.MultiprocessingOptions(
        num_workers=count, per_worker_buffer_size=max(1, -(-ahead // count))
    )
    # Its threads start the processes, which take over what the threads hold back.
    with held_back():
        return Workers(iter(dataset.mp_prefetch(options, worker_init_fn=_serve)))


class Workers(Iterator[Any]):
    """The iterator of what worker processes make.

    Args:
        elements: Grain's iterator over them.
    """

    def __init__(self, elements: Any) -> None:
        self._elements = elements
        self._before = set(multiprocessing.active_children())
        self._processes: list[BaseProcess] = []

    def __next__(self) -> Any:
        """Gives the next element.

        Raises:
            DataError: a process was lost.
        """
        try:
            # The first element starts more of both.
            with contextlib.nullcontext() if self._processes else held_back():
                element = next(self._elements)
        except RuntimeError as error:
            if "terminated unexpectedly" not in str(error):
                raise
            raise self._lost(error) from error
        if not self._processes:
            started = set(multiprocessing.active_children()) - self._before
            self._processes = sorted(started, key=lambda process: process.pid or 0)
        return element

    def close(self) -> None:
        """Ends the processes."""
        self._elements.close()

    def _lost(self, error: RuntimeError) -> DataError:
        ends = [
            f"number {number} (pid {process.pid}) by {_end(process.exitcode)}"
            for number, process in enumerate(self._processes)
            if process.exitcode
        ]
        return DataError(
            f"a worker process that makes examples was lost: {', '.join(ends) or error}. SIGKILL mostly "
            "means that memory ran out: take fewer data.worker_processes, or a smaller batch"
        )


def _end(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"


def _serve(number: int, count: int) -> None:
    """Prepares a worker process."""
    del number, count
    follow_parent()
