"""Checkpoints: complete or absent, verified before they are trusted, open on any number of devices.

    checkpoints/
      1200/            named by the step; appears by one rename, once everything in it is on the disk
        manifest.json  what the run was (record), leaf shapes and types, SHA-256 and size of every file
        arrays/        the arrays, an Orbax checkpoint
      .saving-1300/    being written, or left behind by a killed process: never read, removed by the next save
      .removing-900/   likewise, being removed

The arrays are stored flat, each under its path in the state
(`params/conv1/kernel`), so that neither the classes of the state nor its empty
parts need to be known to read them.
"""

import contextlib
import errno
import json
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
from orbax.checkpoint import v1 as ocp

from jaxdl.errors import CheckpointError
from jaxdl.parallel.processes import on_first
from jaxdl.train import manifests
from jaxdl.train.arrays import ARRAYS, by_path, load_arrays, saving_options
from jaxdl.train.rundir import free_bytes, reason, sync_directory

logger = logging.getLogger(__name__)

_SAVING, _REMOVING = ".saving-", ".removing-"
_STEP = re.compile(r"0|[1-9][0-9]*")
_SLACK = 1 << 20  # the arrays are stored uncompressed; this is for everything else
_LISTED = 20  # leaves named in one message

# Orbax logs a failure with a stack trace for each of its threads; here it reaches the user once, as an error.
logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was read.

    Attributes:
        step: Its step.
        state: The state, on the devices and in the layout that were asked for, safe to donate.
        record: What `save` was given as `record`.
    """

    step: int
    state: Any
    record: dict[str, Any]


class Checkpointer:
    """Saves a run's state in the background and restores the newest one that is sound.

        with Checkpointer(workdir / "checkpoints", keep=2) as checkpointer:
            restored = checkpointer.restore(abstract_state)
            ...
            checkpointer.save(step, state, record={"position": 7}, score=accuracy)

    Only `save` changes the directory, so a program that evaluates may restore
    from one that another process trains in. In a run of several processes each
    of them makes the same calls, on one shared directory; process 0 alone
    writes manifests and removes old checkpoints.

    Args:
        directory: Where the checkpoints are; made when the first one is saved.
        keep: Newest checkpoints to keep, besides the one with the highest score.
    """

    def __init__(self, directory: Path, *, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self._directory = directory.absolute()
        self._keep = keep
        self._writer: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._cleaned = False
        self._damaged: set[int] = set()  # found by restore; never a reason to remove a sound one

    def save(
        self,
        step: int,
        state: Any,
        *,
        record: Mapping[str, Any],
        score: float | None,
    ) -> None:
        """Starts to save a state; returns as soon as the caller may donate its buffers.

        Waits for the save before it, if that still goes on. If the step has a
        checkpoint already, only its score is renewed.

        Args:
            step: Optimizer updates that the state has seen; the checkpoint's name.
            state: Pytree of `jax.Array`.
            record: What is needed to go on or to understand the state; JSON values.
            score: The higher the better, the earliest of equals is the best; None and NaN never are.

        Raises:
            CheckpointError: There is no room, the directory cannot be written, or the last save failed.
        """
        self.close()
        # What is there, one process says: another may look a moment before or after.
        if on_first(lambda: step in self.steps()):
            if score is not None and jax.process_index() == 0:
                self._rescore(step, score)
            return
        leaves = by_path(state)
        needed = sum(leaf.nbytes for leaf in leaves.values()) + _SLACK
        manifest = {
            "format": manifests.FORMAT,
            "step": step,
            "score": _finite(score),
            # Through JSON and back: a copy that the caller cannot change, and an error here if it is no JSON.
            "record": json.loads(json.dumps(record)),
            "leaves": {path: manifests.describe(leaf) for path, leaf in leaves.items()},
        }
        partial = self._directory / f"{_SAVING}{step}"
        on_first(lambda: self._make_room(step, needed))
        try:
            with saving_options():
                # Device memory is copied to the host before this returns. Where the host is the device, Orbax
                # keeps views instead, and XLA does not reuse the buffer of a donated array that has one.
                response = ocp.save_async(partial / ARRAYS, {path: x for path, x in leaves.items() if x.size})
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise self._explained(error, step, needed) from error
        self._writer = threading.Thread(
            target=self._finish,
            args=(response, partial, manifest, needed),
            name=f"checkpoint-{step}",
        )
        self._writer.start()

    def restore(self, abstract_state: Any) -> Restored | None:
        """Reads the newest sound checkpoint; a damaged one is reported and the one before it taken.

        Args:
            abstract_state: Pytree of `jax.ShapeDtypeStruct` with shardings: what the state is, and where.

        Returns:
            The checkpoint, bit for bit what was saved, or None if there is none.

        Raises:
            CheckpointError: None of the checkpoints is sound, or the sound one holds another kind of state.
        """
        wanted = by_path(abstract_state)
        if any(leaf.sharding is None for leaf in wanted.values()):
            raise ValueError("every leaf of the abstract state needs a sharding")
        manifest = on_first(lambda: self.newest_sound(wanted))
        if manifest is None:
            return None
        arrays = load_arrays(self._directory / str(manifest["step"]) / ARRAYS, wanted)
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), arrays.values())
        return Restored(manifest["step"], state, manifest["record"])

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending, without those that `restore` found damaged."""
        complete = (
            step for step in self._named() if (self._directory / str(step) / manifests.NAME).is_file()
        )
        return sorted(set(complete) - self._damaged)

    def wait(self) -> None:
        """Waits for the save that goes on, if any, and leaves its failure for `check` or `close`."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def check(self) -> None:
        """Raises the failure of an earlier save, once; does not wait for one that goes on."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Waits for the save that goes on, and raises if it failed."""
        self.wait()
        self.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if kind is None:
                raise
            # Another error is on its way to the user and must not be replaced.
            logger.warning("%s", failure)

    def _make_room(self, step: int, needed: int) -> None:
        """Makes the directory, and refuses a save that does not fit."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            if free_bytes(self._directory) < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._explained(error, step, needed) from error

    def newest_sound(self, wanted: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Gives the manifest of the newest sound checkpoint, or None if there is no checkpoint.

        Args:
            wanted: Leaves by path, abstract; a checkpoint with others is refused.

        Raises:
            CheckpointError: None of the checkpoints is sound, or the sound one holds other leaves.
        """
        self.wait()
        reasons: list[str] = []
        for step in sorted(self._named(), reverse=True):
            path = self._directory / str(step)
            try:
                manifest = manifests.read(path)
                if wanted is not None:
                    manifests.require_same_leaves(path, manifest["leaves"], wanted)
                manifests.verify_files(path, manifest["files"])
            except manifests.DamagedError as error:
                self._damaged.add(step)
                reasons.append(str(error))
                logger.warning("Skipping checkpoint %d: %s", step, error)
            else:
                return manifest
        if reasons:
            raise CheckpointError(
                f"None of the checkpoints in {self._directory} is sound: {'; '.join(reasons[:_LISTED])}. "
                "Bring back a copy, or move them away to start afresh."
            )
        return None

    def _finish(self, response: Any, partial: Path, manifest: dict[str, Any], needed: int) -> None:
        """In the background: completes the directory, gives it its name, removes old ones."""
        try:
            response.result()
            if jax.process_index() == 0:
                self._commit(partial, manifest)
                self._prune(manifest["step"])
        except Exception as error:  # noqa: BLE001 - whatever it is, it must reach the thread that trains
            if jax.process_index() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            failure = self._explained(error, manifest["step"], needed)
            failure.__cause__ = error
            self._failure = failure

    def _commit(self, partial: Path, manifest: dict[str, Any]) -> None:
        manifests.write(partial, manifest)
        target = self._directory / str(manifest["step"])
        if target.exists():  # damaged or incomplete, or `save` would have had nothing to do
            self._remove(target)
        partial.rename(target)
        sync_directory(self._directory)
        self._damaged.discard(manifest["step"])

    def _rescore(self, step: int, score: float) -> None:
        """Gives a checkpoint the score of an evaluation that came after it."""
        path = self._directory / str(step)
        try:
            manifests.replace(path, manifests.read(path) | {"score": _finite(score)})
            self._prune(step)
        except manifests.DamagedError as error:
            logger.warning("Skipping checkpoint %d: %s", step, error)

    def _prune(self, written: int) -> None:
        complete = self.steps()
        # The one just written stays in any case: others may have higher steps.
        kept = {written, *complete[-self._keep :]}
        found = {step: manifests.score(self._directory / str(step)) for step in complete}
        scores = {step: score for step, score in found.items() if score is not None}
        if scores:
            kept.add(max(scores, key=lambda step: (scores[step], -step)))
        for step in complete:
            if step not in kept:
                try:
                    self._remove(self._directory / str(step))
                except OSError as error:
                    logger.warning("Could not remove the old checkpoint %d: %s", step, error.strerror)

    def _remove(self, path: Path) -> None:
        # A directory that is half removed must not have a step's name.
        doomed = self._directory / f"{_REMOVING}{path.name}"
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)

    def _remove_leftovers(self) -> None:
        """Once, before the first save: what a killed process left behind."""
        if not self._cleaned:
            for path in self._directory.iterdir():
                if path.name.startswith((_SAVING, _REMOVING)):
                    shutil.rmtree(path, ignore_errors=True)
            self._cleaned = True

    def _named(self) -> list[int]:
        """Steps of all directories that are named by one and have something in them."""
        try:
            paths = [path for path in self._directory.iterdir() if _STEP.fullmatch(path.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{self._directory} cannot be read ({error.strerror}).") from error
        named = []
        for path in paths:
            # A file, or removed meanwhile by the process that trains.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if any(path.iterdir()):
                    named.append(int(path.name))
        return named

    def _explained(self, error: Exception, step: int, needed: int) -> CheckpointError:
        advice = "there is no earlier one, start again"
        with contextlib.suppress(CheckpointError):
            if intact := self.steps():
                advice = f"checkpoint {intact[-1]} is intact, resume"
        why = reason(error, self._directory, needed)
        return CheckpointError(
            f"Checkpoint {step} could not be written to {self._directory} ({why}): "
            f"{advice} once the directory can be written."
        )


def _finite(score: float | None) -> float | None:
    return score if score is not None and math.isfinite(score) else None
