"""Work spread over processes, with results in the order of the work."""

import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Protocol, TypeVar

from jaxdl.errors import DataError

_A = TypeVar("_A")
_B = TypeVar("_B")

_AHEAD = 3  # tasks in flight for each process: memory stays bounded however large the corpus is


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
    copy. They start with the first task. A function and its items must be picklable.

    Raises:
        DataError: from the map, where a process was lost.
    """
    if count <= 1:
        yield in_turn
        return
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))

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
                "a process that prepared text was lost (killed for want of memory, or the program has "
                "no `if __name__ == '__main__'`): set data.processes 1"
            ) from error

    try:
        yield ordered
    finally:
        pool.shutdown(cancel_futures=True)
