"""Work spread over processes, with results in the order of the work."""

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Protocol, TypeVar

from jaxdl.errors import DataError

_A = TypeVar("_A")
_B = TypeVar("_B")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Those that ask a run to stop."""

_AHEAD = 3  # tasks in flight for each process: memory stays bounded however large the data are


class OrderedMap(Protocol):
    """Applies a function to items like `map`; lazily, and in their order."""

    def __call__(self, function: Callable[[_A], _B], items: Iterable[_A], /) -> Iterator[_B]:
        """Yields `function(item)` for each item."""
        ...


def in_turn(function: Callable[[_A], _B], items: Iterable[_A], /) -> Iterator[_B]:
    """Applies a function to items in this process."""
    return map(function, items)


@contextmanager
def process_map(count: int) -> Iterator[OrderedMap]:
    """Gives a map over `count` new processes, or over none but this one where `count` is at most 1.

    The processes are spawned, since the threads of jax and tokenizers may hold locks that a fork would
    copy. They start with the first task, and end with this process, in whatever way it ends. A function and
    its items must be picklable.

    Raises:
        DataError: from the map, where a process was lost.
    """
    if count <= 1:
        yield in_turn
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=spawn, initializer=follow_parent)

    def ordered(function: Callable[[_A], _B], items: Iterable[_A], /) -> Iterator[_B]:
        remaining = iter(items)
        waiting: deque[Future[_B]] = deque()
        try:
            for item in itertools.islice(remaining, _AHEAD * count):
                with held_back():
                    waiting.append(pool.submit(function, item))
            while waiting:
                yield waiting.popleft().result()
                for item in itertools.islice(remaining, 1):
                    with held_back():
                        waiting.append(pool.submit(function, item))
        except BrokenProcessPool as error:
            raise DataError(
                "a process that prepared data was lost (killed for want of memory, or the program has "
                "no `if __name__ == '__main__'`): set data.processes or --processes to 1"
            ) from error

    wait = True
    try:
        yield ordered
    except KeyboardInterrupt:
        wait = False  # a task may take minutes, and the program is to end
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)


@contextmanager
def held_back() -> Iterator[None]:
    """Holds SIGINT and SIGTERM back from the processes that are started inside a `with` block.

    Such a signal reaches the whole group, and would end a process that has not got as far as `follow_parent`.
    """
    # With the first process multiprocessing starts one of its own, and lets the signals through again then.
    resource_tracker.ensure_running()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def follow_parent() -> None:
    """Makes a new process end when the one that started it does, and not before.

    Ctrl-C and a cluster's SIGTERM reach all processes, and the first decides when to end, perhaps after a
    save.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)  # without this it would wait for a next task for ever

    threading.Thread(target=end_with_parent, daemon=True).start()
