"""The study of scaling as its users meet it."""

import json

import jax
import pytest

from experiments import scaling, scaling_plans
from experiments.scaling_figures import Row
from jaxdl.errors import ConfigError
from tests.experiments.processes import run

SMALL = ("--batch_size", 8, "--length", 16, "--steps", 2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("resnet51",), "invalid choice"),
        (("--plans", "datta"), "'datta' is none of single, data"),
        (("--plans", "datta=2"), "no parallel.datta; there are backend, node, data"),
        (("--plans", "data=two"), "whole numbers of at least 1"),
        (("--plans",), "expected at least one argument"),
        (("--devices", 0), "whole number of at least 1"),
        (("--fixed", "both"), "invalid choice"),
        (("--steps", 0), "whole number of at least 1"),
        (("--json", "nowhere/x.json"), "--json nowhere/x.json cannot be written: name a file"),
        (("--chart", "."), "--chart . cannot be written: name a file"),
        (("--chart", "chart.txt"), "must end in one of .png"),
        (("--on", "h99"), "h99 is no chip"),
    ],
)
def test_bad_input_gets_one_message_and_exit_code_2(flags, words):
    done = run(*flags, experiment="scaling")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert words in done.stderr


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path):
    # A link into nowhere is refused even to those who may write everywhere.
    file = tmp_path / "link.json"
    file.symlink_to(tmp_path / "missing" / "x.json")
    done = run("--json", file, experiment="scaling")
    assert done.returncode == 5
    assert done.stderr == f"error: --json {file} cannot be written (No such file or directory).\n"


@pytest.mark.parametrize(
    ("text", "devices", "flags", "fixed"),
    [
        ("single", 8, {"data": 1}, 1),
        ("data", 8, {"data": 8}, None),
        ("fsdp", 4, {"data": 1, "fsdp": 4}, None),
        ("tensor+sequence", 2, {"data": 1, "tensor": 2, "sequence": "true"}, None),
        ("tensor+sequence", 1, {"data": 1}, None),
        ("pmap", 1, {"data": 1, "backend": "pmap"}, None),
        ("hybrid", 8, {"data": 2, "fsdp": 2, "tensor": 2}, None),
        ("circular", 4, {"data": 1, "pipeline": 4, "schedule": "circular"}, None),
        ("data=2,tensor=4", 8, {"data": 2, "tensor": 4}, 8),
        ("data=-1,tensor=2", 8, {"data": -1, "tensor": 2}, None),
        ("pipeline=2,cut=3,3", 2, {"data": 1, "pipeline": 2, "cut": "3,3"}, 2),
    ],
)
def test_plans_are_names_or_options(text, devices, flags, fixed):
    plan, count = scaling_plans.read(text)
    assert count == fixed
    expected = sorted(f"--parallel.{name}={value}" for name, value in flags.items())
    assert sorted(scaling_plans.flags(plan, 1 if text == "single" else devices)) == expected


def test_a_hybrid_of_too_few_devices_is_refused():
    with pytest.raises(ConfigError, match="6 devices are no multiple of 4"):
        scaling_plans.flags(scaling_plans.read("hybrid")[0], 6)


@pytest.mark.slow
def test_plans_are_measured_on_simulated_devices(tmp_path):
    file, picture = tmp_path / "rows.json", tmp_path / "chart.png"
    plans = ("data", "tensor", "pmap", "gpipe", "tensor=8")
    flags = ("--plans", *plans, "--devices", 1, 2, *SMALL, "--json", file, "--chart", picture)
    done = run("encoder-tiny", *flags, experiment="scaling")
    assert done.returncode == 0, done.stderr
    study = json.loads(file.read_text())
    assert (study["subject"], study["fixed"], study["simulated"]) == ("encoder-tiny", "batch", True)
    rows = {(row["plan"], row["devices"]): row for row in study["rows"]}
    assert list(rows) == [
        *(("single", 1), ("pmap", 1)),
        *(("data", 2), ("tensor", 2), ("pmap", 2), ("gpipe", 2), ("tensor=8", 8)),
    ]
    # What does not fit has a reason, and nothing else is known.
    refused = rows.pop(("tensor=8", 8))
    assert refused["reason"].startswith("parallel.tensor 8 does not divide the 4 heads")
    assert refused["step_seconds"] is refused["sent"] is None
    for (plan, devices), row in rows.items():
        assert row["reason"] is None
        assert row["batch_size"] == 8
        assert len(row["seconds"]) == 2
        assert row["examples_per_second"] * row["step_seconds"] == pytest.approx(8)
        assert row["efficiency"] * devices == pytest.approx(row["speedup"])
        assert len(row["reference"]) == (0 if plan == "single" else 2)
        # Parts, and what each device has whole: the embedding of positions, norms, biases.
        share = row["state_bytes"] / rows["single", 1]["state_bytes"]
        assert share < 0.65 if (plan, devices) in (("tensor", 2), ("gpipe", 2)) else share == 1
    assert rows["single", 1]["speedup"] == 1
    assert rows["single", 1]["sent"] == {}
    for plan in ("data", "pmap", "gpipe"):
        row = rows[plan, 2]
        assert sum(row["sent"].values()) == pytest.approx(row["expected"], rel=0.1)
        assert row["exact"]
    # Two micro-batches, each of 4 examples of 16 words of 64 numbers, go one way.
    assert rows["gpipe", 2]["sent"][scaling_plans.BETWEEN] == 2 * 4 * 16 * 64 * 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = done.stdout.splitlines()
    heads = [line.split()[0] for line in table]
    assert heads[-8:] == ["plan", *("single", "pmap", "data", "tensor", "pmap", "gpipe", "tensor=8")]
    assert done.stderr.count("\n") == 7
    notes = " ".join(table[:-8])
    assert "share the CPU's cores" in notes


def test_a_share_that_is_fixed_grows_the_batch():
    flags = "--fixed share --batch_size 8 --devices 2 4 --length 4"
    arguments = scaling.parse(flags.split())
    plans = [(text, *scaling_plans.read(text)) for text in ("data", "tensor")]
    cases = scaling_plans.combinations(arguments, plans, "cpu", jax.devices())
    assert [(case.plan, case.devices, case.batch_size) for case in cases] == [
        ("single", 1, 8),
        *(("data", 2, 16), ("tensor", 2, 16), ("data", 4, 32), ("tensor", 4, 32)),
    ]
    assert [case.program.plan.mesh.size for case in cases] == [1, 2, 2, 4, 4]


def test_times_are_related_to_the_first_row_and_to_the_reference():
    first = Row("single", 1, "cpu", 8, step_seconds=2.0)
    row = Row("data", 4, "cpu", 32, step_seconds=4.0, reference=[5.0, 3.0, 2.0])
    compared = scaling.compared(row, first)
    assert (compared.examples_per_second, compared.speedup, compared.efficiency) == (8.0, 2.0, 0.5)
    assert compared.overhead == pytest.approx(4 / 3)
