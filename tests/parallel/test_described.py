"""Plans compile for machines that are not there: of 8 chips and of 64, with and without several nodes."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

CASES = [
    ("h100x8", ["encoder:data", "encoder:fsdp", "encoder:tensor 4", "resnet:local"]),
    ("h100x64", ["encoder:fsdp 2 x tensor 2", "encoder:circular 2"]),
    ("v5e:2x4", ["encoder:fsdp", "encoder:tensor 4, sequence", "encoder:1f1b 2"]),
    ("v5e:8x8", ["encoder:zero1", "resnet:local"]),
]


def installed(chip):
    plugin = "libtpu" if ":" in chip else "jax_plugins.xla_cuda12"
    try:
        return importlib.util.find_spec(plugin) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "plans"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_plans_compile_for_chips_that_are_not_there_and_move_no_more_than_they_must(chip, plans):
    if not installed(chip):
        pytest.skip("the compilers come with the extra `plan`")
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.described", chip, *plans],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["plan"] for each in reports] == plans
    for each in reports:
        # A TPU's compiler sums whole where it finds that as fast, as for ZeRO-1.
        if chip.startswith("h100") or each["plan"].endswith(":fsdp"):
            assert each["too_much"] == {}, each
        if (chip, each["plan"]) == ("h100x8", "encoder:fsdp"):
            gathers, scatters = each["ratios"]["all-gather"], each["ratios"]["reduce-scatter"]
            assert 0.9 < gathers < 1.1, each
            assert 0.9 < scatters < 1.1, each
