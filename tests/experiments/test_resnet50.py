"""The flagship run as its users meet it: real processes, real signals, real files."""

import json
import os
import random
import signal
import struct
import subprocess
import time

import jax
import numpy as np
import pytest
import yaml
from tensorboardX.proto.event_pb2 import Event

from jaxdl.train.checkpoint import Checkpointer
from tests.conftest import ROOT
from tests.experiments.processes import command, environment, lines, run

TEST = "configs/resnet50/test.yaml"


def parameters(workdir):
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
    return restored.step, {name: np.asarray(leaf).tobytes() for name, leaf in restored.state.items()}


def scalars(workdir, tag):
    """(step, value) of a scalar, read from all event files as TensorBoard does."""
    found = []
    for path in sorted((workdir / "events").glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found += [(event.step, value.simple_value) for value in event.summary.value if value.tag == tag]
            at += 12 + length + 4
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that was never disturbed."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    done = run("--config", TEST, "--workdir", workdir)
    assert done.returncode == 0, done.stderr
    return workdir, done


def test_a_run_leaves_what_the_contract_names(finished):
    workdir, done = finished
    assert "Traceback" not in done.stderr
    assert {path.name for path in (workdir / "checkpoints").iterdir()} >= {"4", "6"}
    records = lines(workdir)
    training = [record for record in records if record["split"] == "train"]
    evaluations = [record for record in records if record["split"] == "eval"]
    assert [record["step"] for record in training] == [2, 4, 6]
    assert all({"loss", "learning_rate", "gradient_norm"} <= record.keys() for record in training)
    assert [record["step"] for record in evaluations] == [3, 6]
    assert all({"loss", "accuracy", "top5", "count", "weights"} <= record.keys() for record in evaluations)
    assert {record["count"] for record in evaluations} == {360}
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["step"] == 6
    assert scalars(workdir, "train/loss") == [
        (record["step"], pytest.approx(record["loss"])) for record in training
    ]


def test_its_stored_configuration_repeats_it(finished, tmp_path):
    workdir, _ = finished
    again = run("--config", workdir / "config.yaml", "--workdir", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    assert lines(tmp_path / "again") == lines(workdir)
    assert parameters(tmp_path / "again") == parameters(workdir)
    stored = (tmp_path / "again" / "config.yaml").read_text()
    assert stored == (workdir / "config.yaml").read_text()
    assert yaml.safe_load(stored)["data"]["name"] == "digits"


def test_a_finished_run_is_left_alone_by_resume(finished):
    workdir, _ = finished
    before = parameters(workdir), (workdir / "metrics.jsonl").read_bytes()
    again = run("--workdir", workdir, "--resume", "true")
    assert again.returncode == 0, again.stderr
    assert (parameters(workdir), (workdir / "metrics.jsonl").read_bytes()) == before


def test_eight_devices_learn_what_one_does(finished, tmp_path):
    workdir, _ = finished
    eight = run("--config", TEST, "--workdir", tmp_path / "eight", devices=8)
    assert eight.returncode == 0, eight.stderr
    for one, other in zip(lines(workdir), lines(tmp_path / "eight"), strict=True):
        for text in ("split", "weights"):
            assert other.pop(text, None) == one.pop(text, None)
        assert other == pytest.approx(one, rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_ends_as_if_it_had_not_been(finished, tmp_path, seed):
    """SIGKILL and SIGTERM at random moments, half of them while a checkpoint is being written."""
    reference, _ = finished
    workdir, rng = tmp_path / "run", random.Random(seed)
    for sent in [*rng.choices([signal.SIGKILL, signal.SIGTERM], k=3), None]:
        process = subprocess.Popen(
            command("--config", TEST, "--workdir", workdir, "--resume", "true"),
            cwd=ROOT,
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        saving = rng.random() < 0.5
        deadline = time.monotonic() + rng.uniform(2, 10)
        while sent is not None and process.poll() is None and time.monotonic() < deadline:
            if saving and any((workdir / "checkpoints").glob(".saving-*")):
                time.sleep(rng.uniform(0, 0.1))
                break
            time.sleep(0.005)
        if sent is not None:
            process.send_signal(sent)
        _, stderr = process.communicate(timeout=240)
        # A signal that comes before the handlers are in place ends the process as any other.
        assert process.returncode in (0, -signal.SIGKILL, -signal.SIGTERM, 75), stderr
    assert process.returncode == 0, stderr
    assert lines(workdir) == lines(reference)
    assert parameters(workdir) == parameters(reference)
    assert scalars(workdir, "train/loss") == scalars(reference, "train/loss")


@pytest.mark.parametrize("moment", ["compiling", "step 2/", "eval"])
def test_a_stopped_run_is_saved_and_goes_on(finished, tmp_path, moment):
    reference, _ = finished
    workdir = tmp_path / "run"
    flags = ("--config", TEST, "--workdir", workdir)
    process = subprocess.Popen(
        command(*flags), cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if moment in line:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            break
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 75, stderr
    assert "--resume true" in stderr
    assert json.loads((workdir / "summary.json").read_text())["status"] == "stopped"
    resumed = run("--workdir", workdir, "--resume", "true")
    assert resumed.returncode == 0, resumed.stderr
    assert lines(workdir) == lines(reference)
    assert parameters(workdir) == parameters(reference)


def test_an_existing_directory_is_not_touched(finished):
    workdir, _ = finished
    before = (workdir / "metrics.jsonl").read_bytes()
    refused = run("--config", TEST, "--workdir", workdir)
    assert refused.returncode == 2
    assert "--resume true" in refused.stderr
    assert (workdir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--optimizer.learning_rat", "1"], 2, "did you mean --optimizer.learning_rate"),
        (["--train.steps", "many"], 2, "whole number"),
        (["--data.batch_size", "12"], 2, "8 or 16"),
        (["--optimizer.warmup_epochs", "100"], 2, "warmup_epochs"),
        (["--profile.start", "6"], 2, "profile.start"),
        (["--data.name", "image_folder", "--data.dir", "EMPTY"], 4, "EMPTY"),
        (["--data.name", "fashion_mnist", "--data.dir", "EMPTY"], 4, "EMPTY"),
        (["--optimizer.learning_rate", "1e38", "--optimizer.schedule", "constant"], 3, "first bad parameter"),
        (["--model.weights", "EMPTY/none.npz"], 5, "none.npz"),
    ],
)
def test_bad_input_gets_one_paragraph_and_the_contracts_code(tmp_path, flags, code, words):
    empty = tmp_path / "empty"
    empty.mkdir()
    flags = [flag.replace("EMPTY", str(empty)) for flag in flags]
    workdir = tmp_path / "run"
    result = run("--config", TEST, "--workdir", workdir, *flags, devices=8)
    assert result.returncode == code, result.stderr
    assert words.replace("EMPTY", str(empty)) in result.stderr
    assert "Traceback" not in result.stderr
    assert workdir.exists() == (code == 3)


def test_a_run_that_diverges_says_so_in_its_metrics_and_keeps_finite_checkpoints(tmp_path):
    workdir = tmp_path / "run"
    result = run(
        "--config", TEST, "--workdir", workdir, "--optimizer.learning_rate", "3e4", "--train.steps", "40"
    )
    assert result.returncode == 3, result.stderr
    last = lines(workdir)[-1]
    assert last["split"] == "train"
    assert f"update {last['step']} is not finite" in result.stderr
    _, values = parameters(workdir)
    params = [np.frombuffer(values[name], np.float32) for name in values if "params" in name]
    assert all(np.isfinite(leaf).all() for leaf in params)


def test_a_full_disk_ends_the_run_with_the_former_checkpoint_intact(tmp_path):
    """A limit on the size of files stands in for the disk: writes fail with the same kind of error."""
    workdir = tmp_path / "run"
    script = (
        "import resource, runpy, signal, sys;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "sys.argv = sys.argv[:1] + sys.argv[1:];"
        "runpy.run_module('experiments.resnet50', run_name='__main__', alter_sys=True)"
    )
    result = subprocess.run(
        [*command()[:1], "-c", script, "--config", TEST, "--workdir", str(workdir)],
        cwd=ROOT,
        env=environment() | {"JAX_COMPILATION_CACHE_DIR": os.devnull},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 5, result.stderr
    assert "Traceback" not in result.stderr
    assert "checkpoint" in result.stderr


def test_a_run_cannot_be_resumed_to_a_length_it_has_passed(finished):
    workdir, _ = finished
    stored = (workdir / "config.yaml").read_bytes()
    refused = run("--workdir", workdir, "--resume", "true", "--train.steps", "4")
    assert refused.returncode == 2
    assert (workdir / "config.yaml").read_bytes() == stored
    assert "take at least 6" in refused.stderr


def test_evaluation_does_not_depend_on_the_batch_it_is_cut_into(finished, tmp_path):
    reference, _ = finished
    for size in (7, 64):
        workdir = tmp_path / str(size)
        done = run("--config", TEST, "--workdir", workdir, "--data.eval_batch_size", size)
        assert done.returncode == 0, done.stderr
        assert lines(workdir) == lines(reference)
