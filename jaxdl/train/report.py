"""What a run tells: metrics lines, TensorBoard scalars, and progress for a person."""

import contextlib
import logging
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from tensorboardX import SummaryWriter

from jaxdl.parallel.processes import on_first
from jaxdl.train.rundir import MetricsFile, write_summary

_LONG_WAIT = 0.1  # share of the time of training that is worth telling


class Clock:
    """Time spent training, leaving out what is announced as a pause."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Returns the seconds since the last lap or the start, pauses left out, and starts anew."""
        now = time.perf_counter()
        lap, self.seconds, self._since = self.seconds + now - self._since, 0.0, now
        return lap

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Stops the clock inside a `with` block."""
        self.seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()


class Progress:
    """Messages to a person: one live line on a terminal, plain lines elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
        self.live = self.stream.isatty()
        self._shown = 0.0

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        if self.live:
            self.stream.write("\r\x1b[K")
        self.stream.write(text + "\n")
        self.stream.flush()

    def update(self, text: str) -> None:
        """Renews the live line, at most ten times a second; does nothing off a terminal."""
        if self.live and time.monotonic() - self._shown > 0.1:
            self._shown = time.monotonic()
            self.stream.write("\r\x1b[K" + text)
            self.stream.flush()


class Follower:
    """The reporter of a process that writes nothing, since process 0 writes for all.

    Attributes:
        window: nothing.
        scores: the metric that evaluations are ranked by, by step of every one so far.
    """

    def __init__(self, scores: dict[int, float], ranked_by: str) -> None:
        self.window: dict[str, float] = {}
        self.scores = scores
        self._ranked_by = ranked_by

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing, like all that follows but for `evaluation_line`, which notes the score."""
        return contextlib.nullcontext()

    def waiting_for_input(self) -> contextlib.AbstractContextManager[None]:
        """See `Reporter`."""
        return contextlib.nullcontext()

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        """See `Reporter`."""

    def training_line(self) -> None:
        """See `Reporter`."""

    def evaluation_line(self, step: int, values: dict[str, float], weights: str) -> None:
        """See `Reporter`."""
        self.scores[step] = values[self._ranked_by]

    def summarize(self, status: str, **values: Any) -> None:
        """See `Reporter`."""

    def sync(self) -> None:
        """See `Reporter`."""

    def close(self) -> None:
        """See `Reporter`."""


class Reporter:
    """Gathers the metrics of updates into training lines, and writes all lines.

    Args:
        directory: the run's directory.
        progress: where a person reads along.
        updates: length of the run.
        batch_size: examples per update.
        start: updates already made; later lines of an earlier attempt are removed.
        window: `window` of the reporter that made the first `start` updates.
        ranked_by: the metric of evaluations that says which is best; more is better.
        units: what an example is in other units, by the names of rates, as `tokens_per_second`.

    Attributes:
        window: sums over the updates since the last training line.
        scores: the metric `ranked_by` by step of every evaluation so far.
    """

    def __init__(
        self,
        directory: Path,
        progress: Progress,
        *,
        updates: int,
        batch_size: int,
        start: int,
        window: dict[str, float] | None,
        ranked_by: str,
        units: Mapping[str, float],
    ) -> None:
        self._ranked_by, self._units = ranked_by, units
        self.window = window or dict.fromkeys(("updates", "loss", "gradient_norm"), 0.0)
        self._directory, self._progress = directory, progress
        self._updates, self._batch_size, self._step = updates, batch_size, start
        self._lines = MetricsFile(directory / "metrics.jsonl")
        self._lines.truncate_after(start)
        evaluations = [line for line in self._lines.read() if line["split"] == "eval"]
        self.scores = {line["step"]: float(line[ranked_by]) for line in evaluations}
        self._evaluation = evaluations[-1] if evaluations else None
        self._events = _rewrite_events(directory / "events", self._lines)
        self._learning_rate = math.nan
        self._scaling: dict[str, float] = {}
        self._skipped: dict[str, int] = {}
        self._rate: float | None = None
        self._timed_updates, self._input_wait = 0, 0.0
        self._waited, self._trained = 0.0, 0.0
        self._clock = Clock()

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """Leaves a `with` block out of the throughput."""
        return self._clock.pause()

    @contextlib.contextmanager
    def waiting_for_input(self) -> Iterator[None]:
        """Counts a `with` block as waiting for data."""
        since = time.perf_counter()
        yield
        self._input_wait += time.perf_counter() - since

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        """Takes in one update's metrics. The means leave out what the loss scale made the step skip."""
        self._step, self._learning_rate = step, float(metrics["learning_rate"])
        self._timed_updates += 1
        self._scaling = {
            name: float(metrics[name]) for name in ("loss_scale", "skipped_updates") if name in metrics
        }
        self._skipped = {name: metrics[name] for name in ("skipped_examples",) if name in metrics}
        if np.all(metrics["finite"]) or not self._scaling:
            for name in ("loss", "gradient_norm"):
                self.window[name] += float(metrics[name])
            self.window["updates"] += 1
        self._progress.update(self._status(float(metrics["loss"])))

    def training_line(self) -> None:
        """Writes the means since the last training line, throughput, and the share of time spent waiting."""
        seconds = self._clock.lap()
        self._trained, self._waited = self._trained + seconds, self._waited + self._input_wait
        self._rate = self._timed_updates * self._batch_size / seconds
        applied = self.window["updates"] or math.nan
        values = {
            "loss": self.window["loss"] / applied,
            "learning_rate": self._learning_rate,
            "gradient_norm": self.window["gradient_norm"] / applied,
            **self._scaling,
            "examples_per_second": self._rate,
            **{name: self._rate * size for name, size in self._units.items()},
            "input_wait": self._input_wait / seconds,
            **self._skipped,
        }
        self.window = dict.fromkeys(self.window, 0.0)
        self._timed_updates, self._input_wait = 0, 0.0
        self._write(self._step, "train", values)
        self._progress.say(self._status(values["loss"]))

    def evaluation_line(self, step: int, values: dict[str, float], weights: str) -> None:
        """Writes the result of an evaluation; `weights` says whether of the raw or the averaged ones."""
        self._evaluation = {"step": step, **values, "weights": weights}
        self.scores[step] = values[self._ranked_by]
        self._write(step, "eval", values | {"weights": weights})
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items() if name != "count")
        self._progress.say(f"step {step}/{self._updates}  eval  {shown}  ({values['count']:,} examples)")

    def best_step(self, among: Iterable[int]) -> int | None:
        """Gives the step of the best evaluation among some steps, the earliest of equals."""
        scored = [step for step in among if not math.isnan(self.scores.get(step, math.nan))]
        return max(scored, key=lambda step: (self.scores[step], -step), default=None)

    def summarize(self, status: str, **values: Any) -> None:
        """Writes summary.json, with further values if given, and tells how the run ended."""
        best = self.best_step(self.scores)
        summary = {
            "status": status,
            "step": self._step,
            "updates": self._updates,
            "evaluation": self._evaluation,
            "best": None if best is None else {"step": best, self._ranked_by: self.scores[best]},
            "examples_per_second": self._median_rate(),
            "input_wait": self._waited / self._trained if self._trained else None,
            "peak_memory_bytes": peak_memory(),
            **values,
        }
        write_summary(self._directory / "summary.json", summary)
        if best is not None:
            self._progress.say(f"best {self._ranked_by} {self.scores[best]:.4f} after update {best}")
        if self._waited > _LONG_WAIT * self._trained:
            self._progress.say(
                f"{self._waited / self._trained:.0%} of the training time was spent waiting for data: raise "
                "data.workers, or prepare smaller images (python -m experiments.prepare); python -m "
                "experiments.benchmark input measures each stage"
            )
        self._progress.say(f"{status} after update {self._step}; everything is in {self._directory}")

    def sync(self) -> None:
        """Makes the lines durable; called before a checkpoint that counts on them."""
        self._lines.sync()
        self._events.flush()

    def close(self) -> None:
        """Closes the files."""
        self._lines.close()
        self._events.close()

    def _median_rate(self) -> float | None:
        rates = [line["examples_per_second"] for line in self._lines.read() if line["split"] == "train"]
        return statistics.median(rates) if rates else None

    def _write(self, step: int, split: str, values: dict[str, Any]) -> None:
        self._lines.write(step, split, values)
        _add_scalars(self._events, step, split, values)

    def _status(self, loss: float) -> str:
        text = f"step {self._step}/{self._updates}  loss {loss:.4f}  lr {self._learning_rate:.4g}"
        if not self._rate:
            return text
        seconds = math.ceil((self._updates - self._step) * self._batch_size / self._rate)
        left = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        return f"{text}  {self._rate:,.1f} examples/s  {left} left"


def open_reporter(
    directory: Path, progress: Progress, *, ranked_by: str, **settings: Any
) -> Reporter | Follower:
    """Makes this process's reporter; process 0 alone writes.

    Args:
        directory: the run's directory.
        progress: where a person reads along.
        ranked_by: see `Reporter`.
        settings: further arguments of `Reporter`.
    """
    reporter: list[Reporter] = []

    def scores() -> dict[str, float]:
        reporter.append(Reporter(directory, progress, ranked_by=ranked_by, **settings))
        return {str(step): score for step, score in reporter[0].scores.items()}

    known = on_first(scores)
    if reporter:
        return reporter[0]
    return Follower({int(step): score for step, score in known.items()}, ranked_by)


def peak_memory() -> int:
    """Returns the most memory used so far, in bytes: of the first device, or of the process on a CPU."""
    statistics_of_device = jax.local_devices()[0].memory_stats()
    if statistics_of_device is not None:
        return int(statistics_of_device["peak_bytes_in_use"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _add_scalars(events: SummaryWriter, step: int, split: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name in ("step", "split"):
            continue
        # "nan" and "inf" of metrics.jsonl are numbers again here; other text has no place in a chart.
        with contextlib.suppress(ValueError):
            events.add_scalar(f"{split}/{name}", float(value), step)


def _rewrite_events(directory: Path, lines: MetricsFile) -> SummaryWriter:
    """Opens an event file that holds the lines so far, in place of those of earlier attempts.

    Appending would show replayed updates twice.
    """
    former = list(directory.glob("events.out.tfevents.*"))
    # It would warn of each value that is not finite, which the run tells of by itself.
    logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
    events = SummaryWriter(str(directory))
    for line in lines.read():
        _add_scalars(events, line["step"], line["split"], line)
    events.flush()
    for path in former:
        path.unlink()
    return events
