"""The examples that real runs train on, however often they stop and with however many workers they go on."""

import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.experiments.processes import command, environment

pytestmark = pytest.mark.slow

EXAMPLES, BATCH, STEPS = 64, 12, 11
"""Batches straddle the ends of epochs."""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for split, shades in (("train", range(EXAMPLES)), ("val", range(100, 106))):
        for shade in shades:
            path = root / split / "ab"[shade % 2] / f"{shade}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(path)
    return root


def train(images, root, *, steps, processes=1, workers=0, worker_processes=0):
    """Trains up to an update, from where the last call stopped; returns the ids by update and process."""
    record = root / f"record-{steps}"
    record.mkdir(parents=True)
    values = {
        "config": "configs/resnet50/test.yaml",
        "data.name": "image_folder",
        "data.dir": images,
        "data.augment": "none",
        "data.batch_size": BATCH,
        "data.workers": workers,
        "data.worker_processes": worker_processes,
        "train.steps": steps,
        "train.checkpoint_every": 100,
        "optimizer.schedule": "constant",
        "optimizer.warmup_epochs": 0,
        "workdir": root / "run",
        "resume": "true" if (root / "run").exists() else "false",
    }
    flags = [f"--{key}={value}" for key, value in values.items()]
    done = subprocess.run(
        [
            *command("--processes", processes, "--devices", 1, "--", experiment="launch"),
            *[sys.executable, "-m", "tests.experiments.recording", *flags],
        ],
        cwd=ROOT,
        env=environment() | {"RECORD": str(record)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [read(record / f"{process}.txt") for process in range(processes)]


def read(path: Path):
    """Ids by the number of the update."""
    lines = [list(map(int, line.split())) for line in path.read_text().splitlines()]
    return {number: ids for number, *ids in lines}


def joined(parts):
    """The ids of all processes by update."""
    assert len({tuple(part) for part in parts}) == 1  # the same updates, so as many of them
    assert {len(ids) for part in parts for ids in part.values()} == {BATCH // len(parts)}
    return {number: list(chain.from_iterable(part[number] for part in parts)) for number in parts[0]}


def test_stopped_twice_in_an_epoch_and_resumed_with_other_workers_and_processes(images, tmp_path):
    whole = joined(train(images, tmp_path / "whole", steps=STEPS))
    assert list(whole) == list(range(STEPS))
    order = list(chain.from_iterable(whole.values()))
    assert sorted(order[:EXAMPLES]) == sorted(order[EXAMPLES : 2 * EXAMPLES]) == list(range(EXAMPLES))
    assert order[:EXAMPLES] != order[EXAMPLES : 2 * EXAMPLES]

    parts = [
        joined(train(images, tmp_path / "parts", steps=2, processes=2, workers=3)),
        joined(train(images, tmp_path / "parts", steps=4, processes=3, workers=1)),
        joined(train(images, tmp_path / "parts", steps=STEPS, workers=1, worker_processes=2)),
    ]
    assert [list(part) for part in parts] == [[0, 1], [2, 3], list(range(4, STEPS))]
    assert {number: ids for part in parts for number, ids in part.items()} == whole
