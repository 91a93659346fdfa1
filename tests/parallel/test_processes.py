"""Real processes that work together and lose each other."""

import re
import signal
import time

import pytest

from jaxdl.config import ParallelConfig
from jaxdl.errors import LostProcessError
from jaxdl.parallel import processes
from tests.parallel.processes import ALONE, TOGETHER, started


@pytest.mark.slow
def test_two_processes_join_and_sum(tmp_path):
    body = 'text = processes.agree_on_text("name" if processes.speaks() else None); print(text, total())'
    with started(tmp_path, body, body, devices=2) as run:
        assert [run.end(index) for index in (0, 1)] == [(0, "name 4.0")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [1, 0])
def test_a_lost_process_ends_the_other(tmp_path, victim, sent):
    with started(tmp_path, ALONE, ALONE) as run:
        run.until_step(10)
        run.all[victim].send_signal(sent)
        began = time.monotonic()
        code, last = run.end(1 - victim)
        print(f"ended after {time.monotonic() - began:.1f} s: {last}")
        assert code == 6, last[-500:]
        pattern = (
            rf"error: process {victim} has been silent for \d+ s \(last update: \d+\); this is process "
            rf"{1 - victim} \(last update: \d+\)\. --resume true goes on from the last checkpoint\."
        )
        assert re.fullmatch(pattern, last), last[-500:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "devices", "sent"),
    [
        (1, 1, signal.SIGKILL),
        (0, 1, signal.SIGKILL),
        (1, 2, signal.SIGKILL),
        (0, 2, signal.SIGKILL),
        (1, 1, signal.SIGSTOP),
        (0, 1, signal.SIGSTOP),
    ],
)
def test_a_process_lost_in_a_collective_ends_the_other(tmp_path, victim, devices, sent):
    with started(tmp_path, TOGETHER, TOGETHER, devices=devices) as run:
        run.until_step(5)
        run.all[victim].send_signal(sent)
        began = time.monotonic()
        code, last = run.end(1 - victim)
        print(f"ended after {time.monotonic() - began:.1f} s: {last}")
        assert (code, last[: len("error: process 0")]) == (6, f"error: process {victim}"), last[-500:]


@pytest.mark.slow
def test_all_survivors_name_the_same_process(tmp_path):
    with started(tmp_path, ALONE, ALONE, ALONE) as run:
        run.until_step(10)
        run.all[2].kill()
        for index in (0, 1):
            code, last = run.end(index)
            assert (code, last[: len("error: process 2")]) == (6, "error: process 2"), last[-500:]


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_one_may_end_before_the_other(tmp_path, late):
    bodies = ["print('early')", "time.sleep(9)"]
    with started(tmp_path, *(bodies[index != 1 - late] for index in (0, 1))) as run:
        assert run.end(1 - late) == (0, "early")
        began = time.monotonic()
        assert run.end(late) == (0, "")
        assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_failed_process_ends_the_other(tmp_path):
    with started(tmp_path, "raise DataError('this one is broken')", ALONE) as run:
        assert run.end(0) == (4, "error: this one is broken")
        code, last = run.end(1)
        assert (code, last[:38]) == (6, "error: process 0 ended with an error (")


@pytest.mark.slow
def test_processes_that_fail_alike_keep_their_exit_code(tmp_path):
    body = "time.sleep(0 if processes.speaks() else 2); raise DataError('broken')"
    with started(tmp_path, body, body) as run:
        assert [run.end(index) for index in (0, 1)] == [(4, "error: broken")] * 2


@pytest.mark.slow
def test_a_busy_process_is_not_lost(tmp_path):
    body = "time.sleep(0 if processes.speaks() else 12); print(total())"
    with started(tmp_path, body, body) as run:
        assert [run.end(index) for index in (0, 1)] == [(0, "2.0")] * 2


def test_one_process_does_nothing(monkeypatch):
    for name in processes.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    processes.start(ParallelConfig())
    processes.start(ParallelConfig(coordinator="node1:99", processes=1, process=0))
    with processes.Watchdog(ParallelConfig()) as watchdog, processes.lost_processes():
        watchdog.beat(1)
    assert processes.speaks()
    assert processes.agree_on_text("name") == "name"
    assert processes.explained(RuntimeError("Gloo all-reduce failed")) is None
    assert LostProcessError.exit_code == 6
