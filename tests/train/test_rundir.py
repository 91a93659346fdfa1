import contextlib
import datetime
import errno
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.errors import CheckpointError, ConfigError
from jaxdl.train import rundir
from jaxdl.train.rundir import MetricsFile
from tests.conftest import ROOT

YAML = "seed: 3\n"


@contextlib.contextmanager
def process(code, *arguments):
    """Another Python process that has `rundir` and `Path`, running `code` and then waiting to be killed."""
    script = (
        "import signal, sys\nfrom pathlib import Path\nfrom jaxdl.errors import JaxdlError\n"
        f"from jaxdl.train import rundir\n{code}\nprint('ready', flush=True)\nsignal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as started:
        try:
            yield started
        finally:
            started.kill()


@contextlib.contextmanager
def file_size_limit(size):
    """Writing beyond `size` fails, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def read_only(*_, **__):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.fixture
def one_second(monkeypatch):
    """Time stands still, so all runs start in one second."""

    class Frozen(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(rundir.datetime, "datetime", Frozen)


# Making the directory


def test_a_new_directory_holds_the_configuration_and_nothing_beside_it(tmp_path):
    target = tmp_path / "deep" / "er" / "run"
    assert rundir.create(target, "toy", YAML) == target
    assert (target / "config.yaml").read_text() == YAML
    assert [path.name for path in target.parent.iterdir()] == ["run"]
    assert target.stat().st_mode & 0o777 == 0o777 & ~umask()


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_default_name_tells_experiment_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = rundir.create(None, "toy", YAML)
    assert re.fullmatch(r"runs/toy-\d{8}-\d{6}", str(target))
    assert (target / "config.yaml").read_text() == YAML


def test_runs_of_one_second_never_share_a_directory(tmp_path, one_second):
    made, barrier = [], threading.Barrier(8)

    def start(number):
        barrier.wait()
        made.append((rundir.create(None, "toy", f"seed: {number}\n", root=tmp_path), number))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    base = "toy-20260102-030405"
    assert {target.name for target, _ in made} == {base, *(f"{base}-{k}" for k in range(2, 9))}
    assert all((target / "config.yaml").read_text() == f"seed: {number}\n" for target, number in made)
    assert len(list(tmp_path.iterdir())) == 8, "nothing is left of the attempts"


@pytest.mark.parametrize("empty", [False, True])
def test_of_several_processes_one_gets_a_named_directory(tmp_path, empty):
    target = tmp_path / "run"
    if empty:
        target.mkdir()
    code = (
        "try:\n    rundir.create(Path(sys.argv[1]), 'toy', 'seed: 0')\n    print('made', flush=True)\n"
        "except JaxdlError as error:\n    print(error.exit_code, flush=True)"
    )
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(process(code, target)) for _ in range(5)]
        outcomes = [one.stdout.readline().strip() for one in started]
    assert sorted(outcomes) == ["2"] * 4 + ["made"]


def test_a_directory_that_holds_a_run_is_refused_with_the_way_out(tmp_path):
    rundir.create(tmp_path / "run", "toy", YAML)
    with pytest.raises(ConfigError, match=r"choose another --workdir, or .* --resume true") as caught:
        rundir.create(tmp_path / "run", "toy", "seed: 4\n")
    assert caught.value.exit_code == 2
    assert (tmp_path / "run" / "config.yaml").read_text() == YAML


def test_a_directory_with_other_things_in_it_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="not empty: choose another --workdir"):
        rundir.create(tmp_path, "toy", YAML)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("linked", [False, True])
def test_an_empty_directory_is_taken_as_it_is(tmp_path, linked):
    target = made = tmp_path / "given"
    made.mkdir()
    if linked:
        target = tmp_path / "link"
        target.symlink_to(made)
    inode = made.stat().st_ino
    rundir.create(target, "toy", YAML)
    assert (made / "config.yaml").read_text() == YAML
    assert made.stat().st_ino == inode
    assert target.is_symlink() == linked


@pytest.mark.parametrize("name", ["file", "file/run", "file/a/b"])
def test_a_file_in_the_way_is_reported(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="--workdir") as caught:
        rundir.create(tmp_path / name, "toy", YAML)
    assert str(tmp_path / name) in str(caught.value)
    assert caught.value.exit_code == 5
    assert str(caught.value).count(". ") == 0, "one sentence"


def test_a_read_only_disk_is_reported(tmp_path, monkeypatch):
    """By a fake, since root may write wherever the disk allows it."""
    monkeypatch.setattr(Path, "mkdir", read_only)
    for workdir in (tmp_path / "run", None):
        with pytest.raises(CheckpointError, match="Read-only file system") as caught:
            rundir.create(workdir, "toy", YAML, root=tmp_path)
        assert caught.value.exit_code == 5


def test_a_directory_appears_complete_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", read_only)
    with pytest.raises(CheckpointError):
        rundir.create(tmp_path / "run", "toy", YAML)
    assert list(tmp_path.iterdir()) == []


# The lock


@pytest.mark.parametrize("how", ["fresh", "resumed"])
def test_two_processes_never_train_in_one_directory(tmp_path, how):
    target = tmp_path / "run"
    if how == "fresh":
        code = "rundir.create(Path(sys.argv[1]), 'toy', 'seed: 3')"
    else:
        target.mkdir()
        (target / "config.yaml").write_text(YAML)
        code = "rundir.reopen(Path(sys.argv[1]))"
    with process(code, target) as other:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(ConfigError, match=f"{target} is in use by process {other.pid} on .*--workdir"):
            rundir.reopen(target)
        other.kill()
        other.wait()
        rundir.reopen(target)  # the lock of a killed process is gone


def test_one_process_may_go_on_with_its_own_run(tmp_path):
    rundir.create(tmp_path / "run", "toy", YAML)
    assert rundir.reopen(tmp_path / "run") == YAML
    assert rundir.reopen(tmp_path / "run") == YAML


def test_a_lock_means_the_directory_not_its_name(tmp_path):
    rundir.create(tmp_path / "run", "toy", YAML)
    (tmp_path / "run").rename(tmp_path / "moved")
    rundir.create(tmp_path / "run", "toy", YAML)
    code = (
        "for path in sys.argv[1:]:\n    try:\n        rundir.reopen(Path(path))\n        print('free')\n"
        "    except JaxdlError:\n        print('locked')"
    )
    with process(code, tmp_path / "run", tmp_path / "moved") as other:
        assert [other.stdout.readline() for _ in range(2)] == ["locked\n", "locked\n"]


def test_a_disk_without_locks_is_usable_with_a_warning(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(rundir.fcntl, "flock", no_locks)
    rundir.create(tmp_path / "run", "toy", YAML)
    assert "cannot be locked" in caplog.text


def test_only_a_run_can_be_reopened(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        assert not rundir.is_run(path)
        with pytest.raises(ConfigError, match=r"holds no run.*--workdir"):
            rundir.reopen(path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_no_disk_takes_is_reported(tmp_path):
    for use in (rundir.is_run, rundir.reopen, lambda path: rundir.create(path, "toy", YAML)):
        with pytest.raises(CheckpointError, match=r"File name too long.*--workdir"):
            use(tmp_path / ("x" * 5000))


def test_jax_is_not_needed():
    """So that a directory that cannot be used is reported before a device is touched."""
    with process("print('jax' in sys.modules, flush=True)") as other:
        assert other.stdout.readline() == "False\n"


# Metrics


@pytest.fixture
def metrics(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        yield file


def test_every_line_is_in_the_file_at_once(metrics):
    metrics.write(1, "train", {"loss": 2.5, "note": "warm-up"})
    assert metrics.path.read_text() == '{"step": 1, "split": "train", "loss": 2.5, "note": "warm-up"}\n'
    metrics.write(1, "eval", {"count": 360})
    assert metrics.read() == [
        {"step": 1, "split": "train", "loss": 2.5, "note": "warm-up"},
        {"step": 1, "split": "eval", "count": 360},
    ]


def test_values_that_are_not_finite_become_words(metrics):
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32("nan"), "e": jnp.float32("inf")}
    metrics.write(1, "train", values)
    assert metrics.read() == [
        {"step": 1, "split": "train", "a": "nan", "b": "inf", "c": "-inf", "d": "nan", "e": "inf"}
    ]


def test_arrays_of_one_number_are_numbers(metrics):
    metrics.write(np.int64(7), "train", {"a": np.int32(3), "b": jnp.float32(0.5), "c": np.float64(0.25)})
    assert metrics.path.read_text() == '{"step": 7, "split": "train", "a": 3, "b": 0.5, "c": 0.25}\n'


def test_truncation_removes_later_steps_and_keeps_the_rest_byte_for_byte(metrics):
    kept = b'{"step": 0, "split": "eval"}\n{ "split":"train",\t"step":2 , "x": 1e-3}\n'
    metrics.path.write_bytes(kept + b'{"step": 3, "split": "train"}\n{"step": 10, "split": "train"}\n')
    metrics.truncate_after(2)
    assert metrics.path.read_bytes() == kept
    metrics.write(3, "train", {})
    assert metrics.path.read_bytes() == kept + b'{"step": 3, "split": "train"}\n'
    assert [path.name for path in metrics.path.parent.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "torn", [b'{"step": 2, "spl', b'{"step": 2}', b"\0\0\0\0", b'{"step": \xff\n', b"7\n"]
)
def test_truncation_removes_a_torn_last_line(metrics, torn):
    whole = b'{"step": 1, "split": "train"}\n'
    metrics.path.write_bytes(whole + torn)
    metrics.truncate_after(5)
    assert metrics.path.read_bytes() == whole


def test_truncation_of_nothing_leaves_the_file_alone(metrics):
    metrics.write(1, "train", {})
    before = metrics.path.stat()
    metrics.truncate_after(1)
    assert metrics.path.stat().st_ino == before.st_ino
    assert metrics.path.stat().st_mtime_ns == before.st_mtime_ns


def test_a_failed_truncation_leaves_the_file_whole(metrics, monkeypatch):
    metrics.write(1, "train", {})
    metrics.write(2, "train", {})
    before = metrics.path.read_bytes()
    monkeypatch.setattr(Path, "replace", read_only)
    with pytest.raises(CheckpointError, match="Read-only"):
        metrics.truncate_after(1)
    assert metrics.path.read_bytes() == before
    assert [path.name for path in metrics.path.parent.iterdir()] == ["metrics.jsonl"]


def test_sync_waits_for_the_disk(metrics, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    metrics.write(1, "train", {})
    assert synced == []
    metrics.sync()
    assert synced == [metrics.path.stat().st_ino]


def test_a_full_disk_is_reported_and_leaves_no_half_line(metrics):
    metrics.write(1, "train", {"loss": 1.0})
    before = metrics.path.read_bytes()
    with file_size_limit(len(before) + 10):
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl.*File too large.*free") as caught:
            metrics.write(2, "train", {"loss": 1.0})
        assert caught.value.exit_code == 5
        assert metrics.path.read_bytes() == before
    metrics.write(3, "train", {"loss": 1.0})
    assert [line["step"] for line in metrics.read()] == [1, 3]


def test_metrics_that_cannot_be_opened_are_reported(tmp_path):
    with pytest.raises(CheckpointError, match="Is a directory"):
        MetricsFile(tmp_path)


def test_a_summary_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    rundir.write_summary(path, {"accuracy": 0.5, "nested": {"values": [1, math.nan, (np.float32(2), None)]}})
    first = path.read_bytes()
    assert json.loads(first) == {"accuracy": 0.5, "nested": {"values": [1, "nan", [2.0, None]]}}
    with file_size_limit(10), pytest.raises(CheckpointError, match="File too large"):
        rundir.write_summary(path, {"accuracy": 0.625, "padding": "x" * 100})
    assert path.read_bytes() == first
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_the_reason_is_told_with_the_room_left(tmp_path):
    try:
        raise ValueError("RESOURCE_EXHAUSTED: Failed [os_error_code='28']")
    except ValueError as error:
        text = rundir.reason(error, tmp_path / "not" / "there", needed=3 << 20)
    assert re.fullmatch(r"No space left on device: 3 MiB are needed and [\d.]+ GiB are free", text)
    assert rundir.reason(ValueError("one\ntwo"), tmp_path) == "one"
