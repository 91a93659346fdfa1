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
from typing import Protocol, TypeVar

from jaxdl.errors import DataError

_A = TypeVar("_A")
_B = TypeVar("_B")

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
    pool = ProcessPoolExecutor(count, mp_context=spawn, initializer=_follow_parent)

    def ordered(function: Callable[[_A], _B], items: Iterable[_A], /) -> Iterator[_B]:
        remaining = iter(items)
        waiting: deque[Future[_B]] = deque()
        try:
            for item in itertools.islice(remaining, _AHEAD * count):
                waiting.append(pool.submit(function, item))
            while waiting:
                yield waiting.popleft().result()
                for item in itertools.islice(remaining, 1):
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


def _follow_parent() -> None:
    """Makes a new process end when the one that started it does, and not before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of them, and the first decides
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)  # without this it would wait for a next task for ever

    threading.Thread(target=end_with_parent, daemon=True).start()
