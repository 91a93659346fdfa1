"""Images that cannot be decoded, met by real runs: what stops, what is kept, and how to go on."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxdl.commandline import parse
from jaxdl.config import ImageConfig
from jaxdl.data.images.batches import train_batches
from jaxdl.data.images.sources import open_source
from tests.experiments.processes import lines, parameters, run, summary

BATCH = 16
GOOD = 3
"""Batches before the first one with the image that is to be damaged."""


def flags(directory):
    values = {
        "config": "configs/resnet50/test.yaml",
        "data.name": "image_folder",
        "data.dir": directory,
        "data.augment": "none",
        "data.batch_size": BATCH,
        "data.workers": 2,  # batches beyond the last are read ahead
        "train.checkpoint_every": 100,  # only what ends a run saves it
        "optimizer.schedule": "constant",  # one program whatever the length, so one compilation
    }
    return [f"--{key}={value}" for key, value in values.items()]


class Images:
    """An image folder of grey squares, each of its own shade, which tells the order of training."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for split, shades in (("train", range(64)), ("val", range(100, 110))):
            for shade in shades:
                path = directory / split / "ab"[shade % 2] / f"{shade}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(path)
        config = parse("", flags(directory), ImageConfig)
        batches = train_batches(open_source(config.data, "train"), config.data, seed=config.seed)
        self.order = [
            int(image[0, 0, 0]) for batch in itertools.islice(batches, 4) for image in batch["image"]
        ]
        batches.close()
        assert sorted(self.order) == list(range(64))

    def path(self, split: str, shade: int) -> Path:
        return self.directory / split / "ab"[shade % 2] / f"{shade}.png"


@pytest.fixture
def images(tmp_path):
    return Images(tmp_path / "images")


@pytest.fixture
def damaged(images):
    """The file that is the first example of the first batch after `GOOD` others; and what it held."""
    path = images.path("train", images.order[GOOD * BATCH])
    content = path.read_bytes()
    path.write_bytes(content[:40])
    return path, content


def test_an_image_beyond_the_last_batch_is_nobodys_business(images, damaged, tmp_path):
    workdir = tmp_path / "run"
    done = run(*flags(images.directory), "--workdir", workdir, "--train.steps", GOOD)
    assert done.returncode == 0, done.stderr
    before = lines(workdir), parameters(workdir)
    resumed = run("--workdir", workdir, "--resume", "true")
    assert resumed.returncode == 0, resumed.stderr
    assert (lines(workdir), parameters(workdir)) == before


def test_a_run_stopped_by_an_image_goes_on_once_it_is_mended(images, damaged, tmp_path):
    path, content = damaged
    workdir, reference = tmp_path / "run", tmp_path / "reference"
    failed = run(*flags(images.directory), "--workdir", workdir)
    assert failed.returncode == 4, failed.stderr
    assert str(path) in failed.stderr
    assert "Traceback" not in failed.stderr
    told = lines(workdir)
    assert [(line["step"], line["split"]) for line in told] == [(2, "train"), (3, "eval")]
    assert (summary(workdir)["status"], summary(workdir)["step"]) == ("stopped by unreadable data", GOOD)
    assert parameters(workdir)[0] == GOOD

    path.write_bytes(content)
    resumed = run("--workdir", workdir, "--resume", "true")
    assert resumed.returncode == 0, resumed.stderr
    assert summary(workdir)["status"] == "done"
    undisturbed = run(*flags(images.directory), "--workdir", reference)
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert lines(workdir) == lines(reference)
    assert parameters(workdir) == parameters(reference)
