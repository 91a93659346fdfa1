"""The flagship run as several real processes on one machine."""

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.experiments.processes import command, environment, lines, parameters, run, summary

# A rate at which rounding does not grow within the test, and blocks of every kind.
OPTIONS = ("--config", "configs/resnet50/test.yaml", "--optimizer.learning_rate", 0.01)
pytestmark = pytest.mark.slow


def launched(*flags, processes, devices):
    return [
        *command("--processes", processes, "--devices", devices, "--", experiment="launch"),
        *command(*OPTIONS, *flags),
    ]


def start(*flags, processes=2, devices=4, log):
    with log.open("w") as stderr:
        return subprocess.Popen(
            launched(*flags, processes=processes, devices=devices),
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
        )


def finish(*flags, processes=2, devices=4):
    return subprocess.run(
        launched(*flags, processes=processes, devices=devices),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def children(process):
    """Process ids of what the launcher started, in their order."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    return sorted(int(child) for task in tasks for child in task.read_text().split())


def wait_for_lines(workdir, process, count):
    path = workdir / "metrics.jsonl"
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert process.poll() is None
        time.sleep(0.1)


def arrays(workdir):
    step, leaves = parameters(workdir)
    floats = {name: np.frombuffer(leaf, np.float32) for name, leaf in leaves.items() if name != "step"}
    return step, floats


def assert_agree(workdir, other):
    (step, left), (expected, right) = arrays(workdir), arrays(other)
    assert step == expected
    assert left.keys() == right.keys()
    for name, leaf in left.items():
        # The optimizer counts updates in integers, which are equal in this form too.
        np.testing.assert_allclose(leaf, right[name], rtol=1e-5, atol=1e-5, err_msg=name)
    for record, wanted in zip(lines(workdir), lines(other), strict=True):
        assert record.keys() == wanted.keys()
        for name, value in record.items():
            near = isinstance(value, float)
            assert value == (pytest.approx(wanted[name], rel=1e-4, abs=1e-5) if near else wanted[name])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process with eight devices."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    done = run(*OPTIONS, "--workdir", workdir, devices=8)
    assert done.returncode == 0, done.stderr
    return workdir


@pytest.mark.parametrize(
    ("processes", "devices", "plan"),
    [(2, 4, ()), (4, 2, ("--parallel.node", 4, "--parallel.fsdp", 2)), (2, 4, ("--parallel.tensor", 2))],
)
def test_several_processes_agree_with_one(alone, tmp_path, processes, devices, plan):
    done = finish("--workdir", tmp_path / "run", *plan, processes=processes, devices=devices)
    assert done.returncode == 0, done.stderr
    assert_agree(tmp_path / "run", alone)
    assert summary(tmp_path / "run")["status"] == "done"


def test_sigterm_to_one_stops_all_at_one_update_and_another_number_goes_on(alone, tmp_path):
    workdir, log = tmp_path / "run", tmp_path / "log"
    process = start("--workdir", workdir, log=log)
    wait_for_lines(workdir, process, 1)
    os.kill(children(process)[1], signal.SIGTERM)
    assert process.wait(120) == 75, log.read_text()[-2000:]
    step, _ = parameters(workdir)
    assert 2 <= step < 6
    assert summary(workdir)["status"] == "stopped"
    done = finish("--workdir", workdir, "--resume", "true", processes=4, devices=1)
    assert done.returncode == 0, done.stderr
    assert_agree(workdir, alone)


def test_a_killed_process_ends_the_others_with_a_message(tmp_path):
    workdir, log = tmp_path / "run", tmp_path / "log"
    process = start("--workdir", workdir, "--train.steps", 2000, "--parallel.timeout", 20, log=log)
    wait_for_lines(workdir, process, 1)
    first, second = children(process)
    os.kill(second, signal.SIGKILL)
    killed = time.monotonic()
    assert process.wait(120) == 128 + signal.SIGKILL
    assert time.monotonic() - killed < 60
    told = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert "process 1 " in told[0]
    assert "--resume true" in told[0]
    assert "last update" in told[0]
    assert not Path(f"/proc/{first}").exists()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--parallel.data", 4), 2, "leave some of the 8 devices of 2 processes idle"),
        (("--data.batch_size", 12), 2, "data.batch_size 12 is not a multiple of 8"),
        (("--parallel.backend", "pmap"), 2, "pmap is for one process"),
        (("--parallel.pipeline", 2, "--parallel.data", 4), 2, "hands out work from one process"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_by_all(tmp_path, flags, code, message):
    done = finish("--workdir", tmp_path / "run", *flags)
    assert done.returncode == code, done.stderr
    assert done.stderr.count(message) == 2
    assert done.stderr.count("Traceback") == 0
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_taken_is_refused_by_all(alone):
    done = finish("--workdir", alone)
    assert done.returncode == 2
    assert done.stderr.count("already holds a run") == 2
