"""A profiler trace of a few updates of a run."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxdl.config import ProfileConfig


@contextlib.contextmanager
def trace_window(
    config: ProfileConfig, directory: Path, settle: Callable[[], None], *, record: bool = True
) -> Iterator[Callable[[int], None]]:
    """Traces the updates `start + 1` to `start + steps`, counted from the run's beginning.

    The trace opens in TensorBoard (with xprof) and in Perfetto. It is closed
    whatever ends the block, so what was recorded is always readable.

    Args:
        config: the window; a window that a resumed run has passed is left out.
        directory: where the trace is written.
        settle: waits for all updates in flight, so that whole updates are traced.
        record: whether this process traces; where it does not, it still waits as one that does.

    Yields:
        A function to call with the number of updates made, before each update.
    """
    running = False

    def before_update(step: int) -> None:
        nonlocal running
        if config.start is None:
            return
        if step == config.start:
            settle()
            if record:
                jax.profiler.start_trace(directory)
                running = True
        elif step == config.start + config.steps:
            settle()
            if running:
                jax.profiler.stop_trace()
                running = False

    try:
        yield before_update
    finally:
        if running:
            jax.profiler.stop_trace()
