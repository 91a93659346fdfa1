"""The study of large batches as its users meet it."""

import json

import pytest

from experiments import lamb_batch
from tests.experiments.processes import run


def corpus(directory):
    """A small text, and the options that make a run of it take seconds."""
    text = "the quick brown fox jumps over a lazy dog while seven wizards mix bold potions"
    words = text.split()
    lines = [" ".join(words[(i * k) % len(words)] for k in range(1, 14)) + "." for i in range(400)]
    (directory / "text.txt").write_text("\n\n".join(lines))
    return (
        *("--config", "configs/bert/test.yaml", "--data.name", "text", "--data.dir", directory),
        *("--data.documents", "blank_line", "--data.vocabulary_size", 256, "--data.length", 16),
        *("--data.held_out", 0.05, "--data.cache", directory / "cache", "--data.workers", 0),
    )


@pytest.mark.slow
def test_each_optimizer_and_batch_sees_as_many_examples_and_its_best_rate_counts(tmp_path):
    workdir = tmp_path / "study"
    flags = ("--batch_sizes", 4, 16, "--examples", 160, "--rates", 0.1, 1, "--workdir", workdir)
    done = run(*flags, *corpus(tmp_path), experiment="lamb_batch")
    assert done.returncode == 0, done.stderr
    rows = json.loads((workdir / "table.json").read_text())
    assert len(rows) == 8
    assert all(row["updates"] * row["batch_size"] == 160 for row in rows)
    rates = {(row["optimizer"], row["batch_size"]): row["learning_rate"] for row in rows[1::2]}
    for optimizer in ("adamw", "lamb"):
        assert rates[optimizer, 4] == lamb_batch.RATES[optimizer]
        assert rates[optimizer, 16] == pytest.approx(2 * rates[optimizer, 4])  # the square root of 16 / 4
    best = lamb_batch.best_of(rows)
    assert len(best) == 4
    for row in best:
        same = [r for r in rows if (r["optimizer"], r["batch_size"]) == (row["optimizer"], row["batch_size"])]
        assert row["loss"] == min(each["loss"] for each in same)
    text = (workdir / "table.txt").read_text()
    assert text.count(" best") == 4
    assert text in done.stdout
    assert (workdir / "chart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--examples", 100), "fewer than 10 updates"),
        (("--rates", 0), "not a number above 0"),
        (("--data.lenght", 5), "did you mean"),
    ],
)
def test_bad_input_exits_with_2_before_anything_runs(flags, words):
    done = run(*flags, experiment="lamb_batch")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
