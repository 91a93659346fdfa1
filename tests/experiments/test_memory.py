"""The memory study as its users meet it."""

import json
import sys

import jax
import pytest

from experiments import memory
from jaxdl.commandline.programs import leave_after


def call(monkeypatch, *flags: object) -> int:
    monkeypatch.setattr(sys, "argv", ["memory", *map(str, flags)])
    with pytest.raises(SystemExit) as left:
        leave_after(memory.main)
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "subject"),
        (["resnet51"], "invalid choice"),
        (["resnet50", "--policies", "fp33"], "precision.policy 'fp33' is not one of fp32"),
        (["resnet50", "--remat", "dot"], "memory.remat 'dot' is not none"),
        (["resnet50", "--remat", "names:conv9"], "no activation conv9; it names conv"),
        (["encoder-base", "--remat", "names:conv1"], "no activation conv1; it names query"),
        (["resnet50", "--offload", "activations"], "set memory.remat to dots or names"),
        (["resnet50", "--offload", "optimizer"], "saves nothing on a CPU"),
        (["resnet50", "--accumulate", "3"], "not a multiple of 3"),
        (["resnet50", "--batch_size", "0"], "whole number of at least 1"),
        (["resnet50", "--json", "nowhere/x.json"], "name a file in a directory that exists"),
        (["resnet50", "--json", "."], "name a file in a directory that exists"),
        (["resnet50", "--on", "h99"], "h99 is no chip"),
    ],
)
def test_bad_input_gets_one_message_and_exit_code_2(monkeypatch, capsys, flags, words):
    assert call(monkeypatch, *flags) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert words in told.err


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # flax mixes dtypes on its way to float32
def test_the_largest_batch_fits_and_the_next_does_not(monkeypatch, capsys, tmp_path):
    file = tmp_path / "largest.json"
    flags = ("--length", 16, "--capacity", "1GiB", "--remat", "none", "full", "--largest", "--json", file)
    assert call(monkeypatch, "encoder-tiny", *flags) == 0
    report = json.loads(file.read_text())
    assert report["usable"] == round(0.9 * 2**30)
    devices = jax.device_count()
    batches = []
    for *_, best, tried in report["largest"]:
        assert best % (8 * devices) == 0
        assert tried[str(best)] <= report["usable"]
        assert tried[str(best + 8 * devices)] > report["usable"]
        batches.append(best)
    assert batches[1] > batches[0]
    told = capsys.readouterr()
    assert f"{batches[0]:,}" in told.out
    assert "does not fit" not in told.err


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # flax mixes dtypes on its way to float32
def test_an_encoder_needs_less_with_rematerialisation_and_with_bfloat16(monkeypatch, capsys, tmp_path):
    file = tmp_path / "needs.json"
    flags = ("--batch_size", 64, "--remat", "none", "full", "--policies", "fp32", "bf16", "--json", file)
    assert call(monkeypatch, "encoder-base", *flags) == 0
    needs = {(need["policy"], need["remat"]): need for need in json.loads(file.read_text())["needs"]}
    for policy in ("fp32", "bf16"):
        assert needs[policy, "full"]["temporaries"] < needs[policy, "none"]["temporaries"] / 2
    # Float32 master weights, whatever the compute: the state is the same.
    assert needs["bf16", "none"]["arguments"] == needs["fp32", "none"]["arguments"]
    told = capsys.readouterr().out
    assert "12 encoder layers" in told
    assert told.count("\n") == 3 + len(needs)
