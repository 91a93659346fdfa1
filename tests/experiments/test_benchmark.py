"""The benchmark as its users meet it, at a size that takes seconds."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from experiments import benchmark
from jaxdl.commandline.programs import leave_after
from jaxdl.errors import JaxdlError
from tests.conftest import ROOT
from tests.experiments.processes import command, environment
from tests.experiments.processes import run as run_experiment

SMALL = ("resnet50", "--batch_sizes", 2, "--image_size", 32, "--repeats", 2)


run = partial(run_experiment, experiment="benchmark")


@pytest.mark.slow
def test_all_contenders_are_measured(tmp_path):
    path = tmp_path / "figures.json"
    done = run(*SMALL, "--json", path)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    (result,) = report["results"]
    assert result["batch_size"] == 2
    contenders = result["contenders"]
    assert list(contenders) == ["pytorch", "pytorch, same allocator", "jaxdl"]
    for name, values in contenders.items():
        assert len(values["seconds"]) == 2
        assert min(values["seconds"]) > 0
        assert 2 / max(values["seconds"]) <= values["examples_per_second"] <= 2 / min(values["seconds"])
        assert values["peak_memory_mib"] > 100
        assert values["parameters"] == 25_557_032
        assert 0 < values["loss"] < 100
        assert (values["compile_seconds"] is not None) == (values["cached"] is not None) == (name == "jaxdl")
        assert ("hugetlb" in values["tunables"]) == (name != "pytorch" and sys.platform == "linux")
        assert name in done.stdout
    assert report["versions"].keys() >= {"jax", "torch", "python"}
    assert report["threads"] == len(os.sched_getaffinity(0))


@pytest.mark.slow
def test_bert_base_is_measured_with_the_same_parameters_on_both_sides(tmp_path):
    path = tmp_path / "figures.json"
    flags = ("--batch_sizes", 1, "--length", 16, "--repeats", 1, "--json", path)
    done = run("bert", *flags)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(path.read_text())["results"]
    for values in result["contenders"].values():
        assert values["parameters"] == 109_514_298  # of BERT-Base without pooler, with the masked-word head
        # From the logarithm of 30,522 words, 10.3, down: a few steps learn the batch by heart.
        assert 0 < values["loss"] < 12


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("bert", "--image_size", 64), "--image_size has no meaning for bert"),
        (("resnet50", "--length", 64), "--length has no meaning for resnet50"),
        (("bert", "--lax"), "--lax is about convolutions"),
        (("resnet51",), "resnet50"),
        (("resnet50", "--batch_sizes", 0), "batch_sizes"),
        (("resnet50", "--image_size", 16), "32"),
        (("resnet50", "--json", "no/such/directory/figures.json"), "--json"),
    ],
)
def test_bad_input_exits_with_2_before_anything_runs(flags, words):
    done = run(*flags)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "compiling" not in done.stderr


def test_without_pytorch_it_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["benchmark", "resnet50"])
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    with pytest.raises(SystemExit) as left:
        leave_after(benchmark.main)
    assert left.value.code == 2
    assert ".[bench]" in capsys.readouterr().err


def fake_worker(monkeypatch, program):
    """Runs a Python text in place of a worker."""
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: real([sys.executable, "-c", program], **options)
    )
    return benchmark.Worker(benchmark.Job("resnet50", "jaxdl", 8, 224, 2))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("input(); raise MemoryError('no more of it')", r"exit code 1[^$]*MemoryError: no more of it"),
        ("import os, signal; input(); os.kill(os.getpid(), signal.SIGKILL)", "smaller --batch_sizes"),
        ("import os; os.abort()", "SIGABRT"),
    ],
)
def test_a_worker_that_dies_is_told_of_with_its_last_words(monkeypatch, program, words):
    with (
        fake_worker(monkeypatch, program) as worker,
        pytest.raises(JaxdlError, match="jaxdl at batch 8") as error,
    ):
        worker.ask("start")
    assert error.value.exit_code == 1
    assert error.match(words)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_workers_too(number):
    process = subprocess.Popen(
        command(*SMALL, experiment="benchmark"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "pytorch" in process.stderr.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (workers := children.read_text().split()):
        assert process.poll() is None
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "interrupted" in errors
    assert "Traceback" not in errors
    # One that was hit while it started ends by itself, since its input does.
    deadline = time.monotonic() + 30
    while any(map(alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_input_of_ones_own(tmp_path):
    """Three tables of a folder; a damaged file is named, and a source without JPEG files refused."""
    for split in ("train", "val"):
        for number in range(3):
            path = tmp_path / "images" / split / "a" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((60, 40), 50).convert("RGB").save(path)
    own = ("--data.name", "image_folder", "--data.dir", tmp_path / "images", "--data.image_size", 32)
    small = ("input", "--rounds", 1, "--images", 5, "--batch_size", 4)
    done = run(*small, *own, "--json", tmp_path / "figures.json")
    assert done.returncode == 0, done.stderr
    assert "3 JPEG files to random crops of 32 x 32, on one core" in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {"jaxdl", "Pillow", "PyTorch"} <= figures["decoders"].keys()
    assert all(seconds > 0 for seconds in figures["stages"].values())
    assert len(figures["end_to_end"]) == 3

    (tmp_path / "images/train/a/1.jpg").write_bytes(path.read_bytes()[:300])
    done = run(*small, *own)
    assert (done.returncode, done.stdout) == (4, "")
    assert "train/a/1.jpg cannot be decoded" in done.stderr
    assert "Traceback" not in done.stderr
    done = run(*small, "--data.name", "synthetic")
    assert done.returncode == 2
    assert "data.name synthetic has no JPEG files" in done.stderr
