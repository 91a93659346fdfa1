"""The launcher, with commands that do little."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from experiments import launch
from jaxdl.errors import ConfigError
from tests.conftest import ROOT

LAUNCH = [sys.executable, "-m", "experiments.launch"]
PLACE = "import os, sys, time, signal; place = int(os.environ['JAX_PROCESS_ID'])\n"


def arguments(script: str, *flags: str) -> list[str]:
    return [*LAUNCH, *flags, "--", sys.executable, "-c", PLACE + script]


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, **options
    )


def wait_for(files: list[Path]) -> None:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_each_learns_its_place():
    names = "NUM_PROCESSES", "PROCESS_ID", "NUM_CPU_DEVICES"
    script = f"print(*(os.environ['JAX_' + name] for name in {names}))"
    ended = run(*arguments(script, "--processes", "2", "--devices", "3"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == ["2 0 3", "[process 1] 2 1 3"]


def test_streams_stay_apart():
    script = "print('out'); print('error', file=sys.stderr)"
    ended = run(*arguments(script, "--processes", "2"))
    assert sorted(ended.stdout.splitlines()) == ["[process 1] out", "out"]
    assert sorted(ended.stderr.splitlines()) == ["[process 1] error", "error"]


def test_they_can_meet():
    script = """
import socket
host, port = os.environ['JAX_COORDINATOR_ADDRESS'].split(':')
print(host, 0 < int(port))
"""
    ended = run(*arguments(script, "--processes", "1"))
    assert (ended.returncode, ended.stdout) == (0, "127.0.0.1 True\n")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("sys.exit(3 if place else 0)", 3),
        ("sys.exit(0 if place else 4)", 4),
        ("time.sleep(2 * place); sys.exit(5 + place)", 5),
        ("place and os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_the_first_failure_is_the_exit_code(script, code):
    ended = run(*arguments(script, "--processes", "2"))
    assert (ended.returncode, ended.stderr) == (code, "")


def test_stragglers_are_killed():
    script = "sys.exit(3) if place else time.sleep(100)"
    began = time.monotonic()
    ended = run(*arguments(script, "--processes", "2", "--grace", "1"))
    assert ended.returncode == 3
    assert ended.stderr == "error: process 0 had not ended 1 s after another failed, and was killed\n"
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once(tmp_path, sent):
    script = f"""
count = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: count.append(number))
open(rf'{tmp_path}/{{place}}', 'w').close()
while not count: time.sleep(0.05)
time.sleep(1)
print(*map(int, count))
sys.exit(75)
"""
    with subprocess.Popen(
        arguments(script, "--processes", "2"), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_for([tmp_path / "0", tmp_path / "1"])
            process.send_signal(sent)
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 75
    assert sorted(output.splitlines()) == [f"{int(sent)}", f"[process 1] {int(sent)}"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_processes_end_with_a_killed_launcher(tmp_path):
    script = f"""
def end(number, frame):
    open(rf'{tmp_path}/ended{{place}}', 'w').close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
open(rf'{tmp_path}/{{place}}', 'w').close()
time.sleep(60)
"""
    with subprocess.Popen(arguments(script, "--processes", "2"), cwd=ROOT) as process:
        try:
            wait_for([tmp_path / "0", tmp_path / "1"])
        finally:
            process.kill()
    wait_for([tmp_path / "ended0", tmp_path / "ended1"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--processes", "2"], "put the command after --"),
        (["--processes", "2", "--"], "put the command after --"),
        (["--processes", "2", "python", "x.py"], "put the command after --"),
        (["--processes", "0", "--", "python"], "'0' is not a whole number of at least 1"),
        (["--", "python"], "--processes"),
        (["--processes", "2", "--devices", "none", "--", "python"], "'none' is not a whole number"),
        (["--processes", "2", "--", "no-such-command"], "there is no command 'no-such-command'"),
        (["--process", "2", "--", "python"], "--process"),
    ],
)
def test_wrong_arguments_are_refused(argv, words):
    with pytest.raises(ConfigError) as refused:
        launch.parse(argv)
    assert words in str(refused.value)


def test_python_is_this_one_where_there_is_none(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert launch.parse(["--processes", "1", "--", "python", "x.py"]).command == [sys.executable, "x.py"]


def test_an_error_is_one_message_and_jax_stays_out():
    ended = run(*LAUNCH, "--processes", "2", "--", "no-such-command")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    code = "import sys, experiments.launch; sys.exit('jax' in sys.modules)"
    assert run(sys.executable, "-c", code).returncode == 0
