"""The study of precisions as its users meet it."""

import json
import os
import signal
import subprocess

import pytest

from tests.conftest import ROOT
from tests.experiments.processes import command, environment, run, summary

TEST = ("--config", "configs/resnet50/test.yaml")


@pytest.mark.slow
def test_each_policy_gets_a_row_in_text_and_json_and_a_bar(tmp_path):
    workdir = tmp_path / "study"
    flags = ("--policies", "fp32", "params=bfloat16,compute=bfloat16", "--workdir", workdir)
    done = run(*flags, *TEST, experiment="mixed_precision")
    assert done.returncode == 0, done.stderr
    rows = json.loads((workdir / "table.json").read_text())
    assert [row["policy"] for row in rows] == ["fp32", "params=bfloat16,compute=bfloat16"]
    for row in rows:
        assert row["exit_code"] == 0
        assert 0 <= row["accuracy"] <= 1
        assert row["seconds_per_epoch"] * row["examples_per_second"] == pytest.approx(1437)
        assert row["peak_memory_mib"] > 100
    assert rows[0]["speedup"] == 1
    text = (workdir / "table.txt").read_text()
    assert text in done.stdout
    assert len({len(line) for line in text.splitlines()}) == 1
    assert (workdir / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_policy_that_fails_keeps_its_row_and_the_others_go_on(tmp_path):
    workdir = tmp_path / "study"
    policies = ("params=float16,compute=float16,output=float16", "fp32")
    # Gradients in float16 cannot hold what such a scale makes of them; in float32 they can.
    flags = ("--precision.loss_scale", "1e9", "--train.steps", 2)
    done = run("--policies", *policies, "--workdir", workdir, *TEST, *flags, experiment="mixed_precision")
    rows = json.loads((workdir / "table.json").read_text())
    assert [row["exit_code"] for row in rows] == [3, 0]
    assert done.returncode == 3
    assert "(exit 3)" in done.stdout
    assert "accuracy" not in rows[0]
    assert "accuracy" in rows[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_study_waits_until_its_run_has_saved(tmp_path, number):
    workdir = tmp_path / "study"
    flags = ("--policies", "fp32", "--workdir", workdir, *TEST, "--train.steps", 400)
    with subprocess.Popen(
        command(*flags, experiment="mixed_precision"),
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 2/"):
                break
        if number == signal.SIGINT:  # Ctrl-C reaches the whole group
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        rest = process.stderr.read()
    assert process.returncode == 75, rest
    assert summary(workdir / "fp32")["status"] == "stopped"
    assert list((workdir / "fp32" / "checkpoints").glob("[0-9]*"))
    assert rest.endswith("error: interrupted\n")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--policies", "fp32", "fp33"), "'fp33' is not one of fp32"),
        (("--workdir", "."), "exists already"),
        (("--policies", "fp32", "bf16", "fp32"), "give each policy once"),
        (("--policies",), "expected at least one argument"),
        (("--data.batch_sise", 3), "did you mean --data.batch_size"),
    ],
)
def test_bad_input_runs_nothing(flags, words):
    done = run(*TEST, *flags, experiment="mixed_precision")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert "==" not in done.stderr
