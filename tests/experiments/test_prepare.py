"""The preparation of data sets as its users meet it."""

import hashlib
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxdl.config import ImageDataConfig
from jaxdl.data.images.sources import open_source
from tests.conftest import ROOT
from tests.data.images.test_prepare import pictures, state, write
from tests.experiments.processes import command, environment, run

# Noise: a PNG file of it takes about as long as a photograph.
SLOW = ("--data.name", "synthetic", "--data.synthetic_examples", 160, "--data.image_size", 192)


def prepare(*flags, **options):
    return run(*flags, experiment="prepare", **options)


def digests(root):
    """Of everything that a reader opens."""
    found = {}
    for path in root.rglob("*"):
        if path.is_file() and path.name != "prepared.json":
            found[str(path.relative_to(root))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--to"),
        (("--to", "x", "--as", "Imagenet"), "'Imagenet' is not a name of lower-case letters"),
        (("--to", "x", "--size", "0"), "'0' is not a whole number"),
        (("--to", "x", "--quality", "101"), "--quality 101"),
        (("--to", "x", "--data.nmae", "digits"), "data.nmae"),
    ],
)
def test_wrong_options(tmp_path, flags, message):
    done = prepare(*flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("size", [(), ("--size", 40)])
def test_the_same_bytes_for_any_number_of_processes(tmp_path, size):
    write(tmp_path / "folder", pictures())
    source = ("--data.name", "image_folder", "--data.dir", tmp_path / "folder", "--shard_size", 3)
    for processes in (1, 3):
        to = tmp_path / f"by-{processes}"
        done = prepare(*source, *size, "--to", to, "--as", "insects", "--processes", processes)
        assert done.returncode == 0, done.stderr
        assert "8/8 shards" in done.stderr
        assert f"--data.name tfds --data.dataset insects --data.dir {to}" in done.stdout
    assert len(digests(tmp_path / "by-1")) == 8 * 2 + 4  # with the lock and TFDS's three
    assert digests(tmp_path / "by-1") == digests(tmp_path / "by-3")
    done = prepare("--to", tmp_path / "by-3", "--as", "insects", "--verify")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/by-3/insects/1.0.0 is sound: 20 examples\n")


def gone(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_it_goes_on_where_it_was_killed(tmp_path, end):
    flags = [*SLOW, "--to", tmp_path, "--shard_size", 10, "--processes", 2]
    directory = tmp_path / "images/1.0.0"
    started = subprocess.Popen(
        command(*flags, experiment="prepare"),
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        limit = time.monotonic() + 120
        while len(list(directory.glob("shards/*.json"))) < 3:
            assert started.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.01)
        started.send_signal(end)
        error = started.communicate(timeout=60)[1]
        assert started.returncode == (75 if end == signal.SIGTERM else -signal.SIGKILL), error
        while not gone(started.pid):  # the other processes end with the first
            assert time.monotonic() < limit
            time.sleep(0.01)
    finally:
        started.kill()
    before = state(directory)
    recorded = {path.stem for path in directory.glob("shards/*.json")}
    assert 3 <= len(recorded) < 20
    assert not (directory / "dataset_info.json").exists()

    done = prepare(*flags)
    assert done.returncode == 0, done.stderr
    after = state(directory)
    assert len(after) == 20
    assert all(before[name] == after[name] for name in recorded)
    assert f"20/20 shards, {len(recorded)} of them there before" in done.stderr
    assert not list(directory.rglob(".*.tmp"))
    whole = open_source(ImageDataConfig(name="tfds", dir=str(tmp_path), dataset="images"), "train")
    assert len(whole) == 160
    assert {whole[i]["image"].pixels().shape for i in range(0, 160, 40)} == {(192, 192, 3)}


@pytest.mark.slow
def test_damage(tmp_path):
    write(tmp_path / "folder", pictures())
    flags = ("--data.name", "image_folder", "--data.dir", tmp_path / "folder", "--to", tmp_path)
    broken = tmp_path / "folder/train/bee/09.png"
    data = broken.read_bytes()
    broken.write_bytes(data[:80])
    done = prepare(*flags, "--processes", 2)
    assert done.returncode == 4
    assert f"{broken} cannot be decoded" in done.stderr
    assert "Traceback" not in done.stderr

    skipping = (*flags, "--data.on_bad", "skip", "--data.max_bad", 0.1)
    done = prepare(*skipping)
    assert done.returncode == 0, done.stderr
    assert "left out 1 images" in done.stderr
    assert f"{broken} cannot be decoded" in done.stderr
    assert "15 examples for training and 4 for evaluation" in done.stdout

    shard = tmp_path / "images/1.0.0/images-train.array_record-00000-of-00001"
    content = bytearray(shard.read_bytes())
    content[2000] ^= 1
    shard.write_bytes(content)
    done = prepare("--to", tmp_path, "--verify")
    assert done.returncode == 4
    assert f"{shard} record " in done.stderr
    assert prepare(*skipping).returncode == 0  # mends it
    assert prepare("--to", tmp_path, "--verify").returncode == 0


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The program inherits it. A `preexec_fn` would make Python fork, of which jax, once imported, warns.
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        done = prepare(*SLOW, "--to", tmp_path, "--shard_size", 10, "--processes", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    assert "images-train.array_record-00000-of-00016 cannot be written (" in done.stderr
    assert "File too large" in done.stderr
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_neither_tensorflow_nor_jax_is_needed(tmp_path):
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from jaxdl.config import ImageDataConfig\n"
        "from jaxdl.data.images.prepare import Plan, prepare, verify\n"
        "plan = Plan(ImageDataConfig(name='digits'), Path(sys.argv[1]), 'digits', size=8)\n"
        "prepare(plan, 1, print)\n"
        "assert verify(plan.directory, 1, print) == 1797\n"
        "assert not {'tensorflow', 'jax'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:jaxdl", "-c", program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    source = open_source(ImageDataConfig(name="tfds", dir=str(tmp_path), dataset="digits"), "eval")
    labels = np.bincount([source[i]["label"] for i in range(len(source))])
    assert labels.min() > 30
