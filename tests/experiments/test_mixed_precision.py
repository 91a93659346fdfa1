"""The study of precisions as its users meet it."""

import json

import pytest

from tests.experiments.processes import run

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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--policies", "fp32", "fp33"), "'fp33' is not one of fp32"),
        (("--workdir", "."), "exists already"),
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
