"""Runs experiments as real processes, as a user does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdl.train.checkpoint import Checkpointer
from tests.conftest import CACHE, ROOT


def environment(devices: int = 1) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    return inherited | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        # A deprecation that a user would see is a fault of ours.
        "PYTHONWARNINGS": "error::DeprecationWarning:jaxdl,error::FutureWarning:jaxdl",
    }


def command(*flags: object, experiment: str = "resnet50") -> list[str]:
    return [sys.executable, "-m", f"experiments.{experiment}", *map(str, flags)]


def run(
    *flags: object,
    devices: int = 1,
    experiment: str = "resnet50",
    variables: dict[str, str] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*flags, experiment=experiment),
        cwd=ROOT,
        env=environment(devices) | (variables or {}),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        **options,
    )


def parameters(workdir: Path) -> tuple[int, dict[str, bytes]]:
    """The step of the newest checkpoint, and the bytes of everything in it."""
    directory = workdir / "checkpoints"
    newest = max(int(path.name) for path in directory.iterdir() if path.name.isdigit())
    leaves = json.loads((directory / str(newest) / "manifest.json").read_text())["leaves"]
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(tuple(leaf["shape"]), leaf["dtype"], sharding=here)
        for name, leaf in leaves.items()
    }
    restored = Checkpointer(directory, keep=1).restore(wanted)
    assert restored is not None
    return restored.step, {name: np.asarray(leaf).tobytes() for name, leaf in restored.state.items()}


def summary(workdir: Path) -> dict[str, Any]:
    """How a run ended, as it says itself."""
    values: dict[str, Any] = json.loads((workdir / "summary.json").read_text())
    return values


def lines(workdir: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without what depends on the machine's speed."""
    timing = ("examples_per_second", "tokens_per_second", "mfu", "input_wait")
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name not in timing} for record in records]
