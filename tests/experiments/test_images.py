"""Real photographs, prepared data sets and damaged files, met by real runs."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import ROOT
from tests.data.images.sources.test_records import builder_class, prepare
from tests.experiments.processes import command, environment, lines, run, summary

pytestmark = pytest.mark.slow


def photographs(root):
    """The twenty photographs of ImageNet in foolbox, each in the directory of its class, twice."""
    package = Path(importlib.util.find_spec("foolbox").origin).parent
    found = sorted(package.glob("data/imagenet_*.jpg"))
    assert len(found) == 20
    for path in found:
        label = re.fullmatch(r"imagenet_\d+_(\d+)", path.stem)[1]
        for split in ("train", "val"):
            directory = root / split / label
            directory.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, directory)
    return root


def test_photographs_are_trained_on_and_evaluated(tmp_path):
    flags = {
        "config": "configs/resnet50/test.yaml",
        "data.name": "image_folder",
        "data.dir": photographs(tmp_path / "images"),
        "data.image_size": 64,
        "data.batch_size": 10,
        "data.workers": 2,
        "data.policy": "trivialaugment",
        "data.erasing": 0.25,
        "data.color_jitter": 0.4,
        "data.mixup": 0.2,
        "data.cutmix": 1,
        "train.steps": 4,
        "workdir": tmp_path / "run",
    }
    done = run(*(f"--{key}={value}" for key, value in flags.items()))
    assert done.returncode == 0, done.stderr
    assert "19 classes" not in done.stderr
    evaluation = lines(tmp_path / "run")[-1]
    assert (evaluation["split"], evaluation["count"]) == ("eval", 20)
    assert np.isfinite(evaluation["loss"])


def test_a_tfds_set_by_its_name(tmp_path):
    prepare(tmp_path / "data", builder_class("Paintings"))  # TFDS takes each name once
    flags = ("--data.name", "tfds:paintings", "--data.dir", tmp_path / "data", "--data.batch_size", 4)
    size = ("--data.image_size", 16, "--data.workers", 2, "--train.steps", 3)
    done = run("--config", "configs/resnet50/test.yaml", *flags, *size, "--workdir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "on tfds (6 examples, 3 to evaluate)" in done.stderr
    assert lines(tmp_path / "run")[-1]["count"] == 3


def test_bad_files_are_counted_and_too_many_of_them_end_the_run(tmp_path):
    root = tmp_path / "images"
    for split in ("train", "val"):
        for shade in range(20):
            path = root / split / "ab"[shade % 2] / f"{shade}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(path)
    (root / "train/a/4.png").write_bytes(b"")
    (root / "val/b/7.png").write_bytes(b"no image")
    flags = {
        "config": "configs/resnet50/test.yaml",
        "data.name": "image_folder",
        "data.dir": root,
        "data.batch_size": 10,
        "data.workers": 2,
        "data.on_bad": "skip",
        "train.steps": 4,
        "train.log_every": 1,
        "optimizer.schedule": "constant",
        "workdir": tmp_path / "run",
    }
    done = run(*(f"--{key}={value}" for key, value in flags.items()))
    assert done.returncode == 0, done.stderr
    records = lines(tmp_path / "run")
    assert [record["skipped_examples"] for record in records if record["split"] == "train"][1::2] == [1, 2]
    assert {record["count"] for record in records if record["split"] == "eval"} == {19}
    for name in ("4.png is empty", "7.png cannot be decoded"):
        assert done.stderr.count(name) == 1

    # The count goes on where a run does: 2 of 50 are still few enough, 4 of 50 are not.
    (root / "train/b/5.png").write_bytes(b"")
    flags |= {"resume": "true", "train.steps": 8}
    done = run(*(f"--{key}={value}" for key, value in flags.items()))
    assert done.returncode == 4
    assert "4 examples could not be read in 3 epochs of 20, which is more than data.max_bad" in done.stderr
    assert summary(tmp_path / "run")["status"] == "stopped by unreadable data"


def folder(root, count, size=8):
    """Grey images of their own shades in two classes."""
    for split in ("train", "val"):
        for shade in range(count):
            path = root / split / "ab"[shade % 2] / f"{shade}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((size, size, 3), shade, np.uint8)).save(path)
    return root


def test_a_run_does_not_go_on_with_other_data(tmp_path):
    root = folder(tmp_path / "images", 20)
    flags = {
        "config": "configs/resnet50/test.yaml",
        "data.name": "image_folder",
        "data.dir": root,
        "data.batch_size": 10,
        "train.steps": 2,
        "optimizer.schedule": "constant",
        "workdir": tmp_path / "run",
    }
    assert run(*(f"--{key}={value}" for key, value in flags.items())).returncode == 0
    flags |= {"resume": "true", "train.steps": 3}
    for split in ("train", "val"):
        (root / split / "a").rename(root / split / "z")
    done = run(*(f"--{key}={value}" for key, value in flags.items()))
    assert done.returncode == 2
    assert (
        "the data are not those that the run was begun with: digest of the names of the classes"
        in done.stderr
    )
    for split in ("train", "val"):
        (root / split / "z").rename(root / split / "a")
    shutil.copy(root / "train/a/0.png", root / "train/a/new.png")
    done = run(*(f"--{key}={value}" for key, value in flags.items()))
    assert done.returncode == 2
    assert "training examples 20, now 21" in done.stderr
    (root / "train/a/new.png").unlink()
    assert run(*(f"--{key}={value}" for key, value in flags.items())).returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_while_workers_start_stops_the_run_saved(tmp_path, number):
    flags = {
        "config": "configs/resnet50/test.yaml",
        "data.name": "image_folder",
        "data.dir": folder(tmp_path / "images", 20),
        "data.batch_size": 10,
        "data.workers": 1,
        "data.worker_processes": 2,
        "train.steps": 500,
        "workdir": tmp_path / "run",
    }
    process = start(flags, tmp_path / "log")
    deadline = time.monotonic() + 120
    while len(workers_of(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, number)
    assert process.wait(120) == 75, (tmp_path / "log").read_text()[-2000:]
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert workers_of(process.pid) == []


def start(flags, log):
    """Starts a run in a process group of its own."""
    with log.open("w") as file:
        return subprocess.Popen(
            command(*(f"--{key}={value}" for key, value in flags.items())),
            cwd=ROOT,
            env=environment(),
            stderr=file,
            start_new_session=True,
        )


def workers_of(group):
    """Processes of a group that make examples."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ProcessLookupError):
            if (
                os.getpgid(int(directory.name)) == group
                and b"spawn_main" in (directory / "cmdline").read_bytes()
            ):
                found.append(int(directory.name))
    return found


def test_memory_stays_flat_over_two_thousand_updates(tmp_path):
    """With threads that decode, a line at each update, evaluations and checkpoints."""
    root, noise = tmp_path / "images", np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(24):
            path = root / split / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = noise.integers(256, size=(96 + number, 160, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
    flags = {
        "config": "configs/resnet50/test.yaml",
        "data.name": "image_folder",
        "data.dir": root,
        "data.batch_size": 8,
        "data.workers": 2,
        "train.steps": 2000,
        "train.log_every": 1,
        "train.eval_every": 400,
        "train.checkpoint_every": 400,
        "workdir": tmp_path / "run",
    }
    process = start(flags, tmp_path / "log")
    memory = {}
    while process.poll() is None:
        lines_written = tmp_path / "run" / "metrics.jsonl"
        updates = lines_written.read_bytes().count(b'"train"') if lines_written.exists() else 0
        with contextlib.suppress(FileNotFoundError):
            memory[updates] = resident(process.pid)
        time.sleep(0.2)
    assert process.returncode == 0, (tmp_path / "log").read_text()[-2000:]
    early = max(size for updates, size in memory.items() if 450 <= updates <= 550)
    late = max(size for updates, size in memory.items() if 1900 <= updates < 2000)
    assert late < 1.05 * early


def resident(pid):
    """Resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
