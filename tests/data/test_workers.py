"""Worker processes: the data of threads, and an end with a message, and nobody left behind."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from jaxdl.config import ImageDataConfig
from jaxdl.data.images.batches import eval_batches, train_batches
from jaxdl.data.images.types import Pixels, Source
from jaxdl.errors import DataError

pytestmark = pytest.mark.slow

N = 13


def read(index):
    if index < 0:
        raise AssertionError
    pixels = np.random.default_rng(index).integers(256, size=(12, 10, 3), dtype=np.uint8)
    return {"image": Pixels(pixels), "label": index}


def unreadable(index):
    raise DataError(f"picture-{index}.jpg is damaged")


def numbered(read=read):
    return Source("numbered", "train", N, read, num_classes=N, augment="crop_flip", photographs=True)


def config(processes, **other):
    settings = {"batch_size": 6, "eval_batch_size": 5, "workers": 1, "image_size": 8} | other
    return ImageDataConfig(worker_processes=processes, **settings)


def children():
    return [child for child in multiprocessing.active_children() if "grain" in child.name]


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])


def test_processes_change_nothing():
    mixed = {"mixup": 0.2, "policy": "trivialaugment", "on_bad": "skip"}
    with contextlib.closing(train_batches(numbered(), config(0, **mixed), seed=3, start=2)) as batches:
        expected = list(itertools.islice(batches, 5))
    with contextlib.closing(train_batches(numbered(), config(2, **mixed), seed=3, start=2)) as batches:
        assert_same(itertools.islice(batches, 5), expected)
        assert len(children()) == 2
    assert children() == []
    assert_same(eval_batches(numbered(), config(3)), list(eval_batches(numbered(), config(0))))
    assert children() == []


def test_an_unreadable_example_is_named_from_a_process():
    with pytest.raises(DataError, match=r"^picture-\d+\.jpg is damaged$"):
        next(train_batches(numbered(unreadable), config(2), seed=0))
    assert children() == []


def test_a_killed_process_is_told():
    batches = train_batches(numbered(), config(2), seed=0)
    next(batches)
    first, second = sorted(children(), key=lambda child: child.pid)
    began = time.monotonic()
    os.kill(second.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=rf"was lost: number 1 \(pid {second.pid}\) by SIGKILL"):
        list(itertools.islice(batches, 1000))
    assert time.monotonic() - began < 60
    assert children() == []
    assert not first.is_alive()


def test_interrupts_are_left_to_the_parent():
    with contextlib.closing(train_batches(numbered(), config(2), seed=0)) as batches:
        next(batches)
        for child in children():
            os.kill(child.pid, signal.SIGINT)
            os.kill(child.pid, signal.SIGTERM)
        assert len(list(itertools.islice(batches, 40))) == 40


def test_no_process_outlives_a_killed_parent():
    program = textwrap.dedent("""
        import multiprocessing, sys, time
        from tests.data.test_workers import config, numbered
        from jaxdl.data.images.batches import train_batches

        if __name__ == "__main__":
            batches = train_batches(numbered(), config(2), seed=0)
            next(batches)
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)
            time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    deadline = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))


def alive(pid):
    """Whether a process runs; one that ended and that nobody waits for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
