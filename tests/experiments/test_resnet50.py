"""The flagship run as its users meet it: real processes, real signals, real files."""

import os
import random
import signal
import struct
import subprocess
import time

import numpy as np
import pytest
import yaml
from tensorboardX.proto.event_pb2 import Event

from tests.conftest import ROOT
from tests.experiments.processes import command, environment, lines, parameters, run, summary

TEST = "configs/resnet50/test.yaml"


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
    assert summary(workdir)["status"] == "done"
    assert summary(workdir)["step"] == 6
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
    assert summary(workdir)["status"] == "stopped"
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
        (["--data.name", "image_folder", "--data.dir", "~nosuchuser/x"], 4, "data.dir ~nosuchuser/x"),
        (["--data.name", "image_folder", "--data.dir", "x" * 5000], 4, "File name too long"),
        (["--model.weights", "EMPTY/none.npz"], 5, "none.npz"),
        (["--workdir", "x" * 5000], 5, "File name too long"),
        (["--workdir", "x" * 5000, "--resume", "true"], 5, "File name too long"),
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
    assert result.stderr.count("error: ") == 1
    assert workdir.exists() == (code == 3)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("JAX_PLATFORMS", "cuda", "check JAX_PLATFORMS"),
        ("JAX_NUM_CPU_DEVICES", "abc", "JAX_NUM_CPU_DEVICES: 'abc'"),
    ],
)
def test_devices_that_there_are_not_are_refused(tmp_path, variable, value, words):
    # No device is visible to CUDA, where there is one.
    variables = {"CUDA_VISIBLE_DEVICES": "", variable: value}
    result = run("--config", TEST, "--workdir", tmp_path / "run", variables=variables)
    assert result.returncode == 2, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


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
    assert summary(workdir)["status"] == "diverged"
    assert summary(workdir)["step"] == last["step"]


@pytest.mark.parametrize(
    ("flags", "words", "updates"),
    [([], "no update was finite", 6), (["--precision.max_skipped_updates", 3], "It is number 3 in a row", 3)],
)
def test_a_run_that_skips_every_update_has_failed(tmp_path, flags, words, updates):
    """No gradient in float16 survives such a loss scale."""
    workdir = tmp_path / "run"
    impossible = ("--precision.policy", "fp16", "--precision.loss_scale", "1e37")
    result = run("--config", TEST, "--workdir", workdir, *impossible, *flags)
    assert result.returncode == 3, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert summary(workdir)["status"] == "diverged"
    assert lines(workdir)[-1]["step"] == summary(workdir)["step"] == updates
    assert max(record.get("skipped_updates", 0) for record in lines(workdir)) == updates


def test_a_run_needs_no_standard_output(finished, tmp_path):
    reference, _ = finished
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command("--config", TEST, "--workdir", tmp_path / "run")]
    done = subprocess.run(
        shell, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert lines(tmp_path / "run") == lines(reference)
    assert parameters(tmp_path / "run") == parameters(reference)


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
