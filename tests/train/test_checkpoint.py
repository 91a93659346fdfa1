import contextlib
import errno
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxdl.errors import CheckpointError
from jaxdl.train.checkpoint import Checkpointer
from tests.conftest import ROOT


@flax.struct.dataclass
class State:
    step: Any
    params: Any
    opt_state: Any
    ema: Any
    name: str = flax.struct.field(pytree_node=False, default="static")


def make_state(seed: int = 0, width: int = 16, sharding: Any = None) -> State:
    """A state with every kind of leaf that training has, and values that differ between seeds."""
    rng = np.random.default_rng(seed)
    params = {
        "dense": {
            "kernel": rng.normal(size=(8, width)).astype(np.float32),
            "bias": np.full(8, seed, np.float32),
        },
        "half": rng.normal(size=(8, 4)).astype(jnp.bfloat16),
        "empty": np.zeros((0, 3), np.float32),
        "without": {},
    }
    params["dense"]["bias"][:3] = [np.nan, np.inf, -0.0]
    state = State(
        step=np.int32(seed),
        params=params,
        opt_state=optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(jax.tree.map(jnp.asarray, params)),
        ema=None,
    )
    return jax.device_put(state, jax.devices()[0] if sharding is None else sharding(state))


def spread(devices: int, *, split: bool):
    """Shardings of a state over some of the devices: all replicated, or cut along the first axis."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    replicated, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    return lambda tree: jax.tree.map(lambda x: cut if split and np.ndim(x) and len(x) else replicated, tree)


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def host(state: Any) -> Any:
    return jax.tree.map(lambda x: np.array(x, copy=True), state)


def assert_same(one: Any, other: Any) -> None:
    """Equal structure, types and bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(host(one)), jax.tree.leaves(host(other)), strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpointer(directory):
    with Checkpointer(directory, keep=3) as made:
        yield made


def save_all(checkpointer, *steps):
    for step in steps:
        checkpointer.save(step, make_state(step), record={}, score=None)
    checkpointer.close()


def names(directory):
    return sorted(path.name for path in directory.iterdir())


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


# Values


def test_every_kind_of_leaf_comes_back_bit_for_bit(checkpointer):
    state = make_state(5)
    record = {"config": "seed: 1\n", "position": 7, "window": {"loss": [0.1, 1e-300]}}
    checkpointer.save(5, state, record=record, score=0.5)
    restored = checkpointer.restore(abstract(state))
    assert (restored.step, restored.record) == (5, record)
    assert_same(restored.state, state)
    for new, old in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True):
        assert new.committed
        assert not new.weak_type
        assert new.sharding == old.sharding


@pytest.mark.parametrize("devices", [1, 8])
def test_saved_values_are_of_their_step_while_a_donated_step_goes_on(directory, devices):
    """On CPUs the copy on the host may be the device's own memory, which the next step overwrites."""
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x * 3 + 1, state), donate_argnums=0)
    for split in (False, True):
        sharding = spread(devices, split=split)(np.zeros(8))
        state = {f"w{i}": jax.device_put(np.arange(1 << 18, dtype=np.uint32) + i, sharding) for i in range(4)}
        state = advance(state)  # buffers that XLA owns, as in training
        with Checkpointer(directory / str(split), keep=9) as checkpointer:
            for step in range(4):
                expected = host(state)
                checkpointer.save(step, state, record={}, score=None)
                for _ in range(5):
                    state = advance(state)
                jax.block_until_ready(state)
                assert_same(checkpointer.restore(abstract(state)).state, expected)


def test_save_returns_before_the_writing_is_done(checkpointer, directory, monkeypatch):
    go_on = threading.Event()
    commit = Checkpointer._commit
    monkeypatch.setattr(Checkpointer, "_commit", lambda *a: (go_on.wait(10), commit(*a)))
    checkpointer.save(1, make_state(1), record={}, score=None)
    assert checkpointer.steps() == []
    assert names(directory) == [".saving-1"], "what is incomplete has no step's name"
    go_on.set()
    checkpointer.wait()
    assert checkpointer.steps() == [1]


def test_one_save_goes_on_at_a_time(checkpointer, monkeypatch):
    commit = Checkpointer._commit
    monkeypatch.setattr(Checkpointer, "_commit", lambda *a: (time.sleep(0.3), commit(*a)))
    checkpointer.save(1, make_state(1), record={}, score=None)
    checkpointer.save(2, make_state(2), record={}, score=None)
    assert checkpointer.steps() == [1]
    checkpointer.close()
    assert checkpointer.steps() == [1, 2]


def test_the_record_is_a_copy_and_must_be_json(checkpointer):
    record = {"window": {"loss": 1.0}}
    state = make_state()
    checkpointer.save(1, state, record=record, score=None)
    record["window"]["loss"] = 2.0
    assert checkpointer.restore(abstract(state)).record == {"window": {"loss": 1.0}}
    with pytest.raises(TypeError):
        checkpointer.save(2, state, record={"array": np.zeros(2)}, score=None)


def test_nothing_is_said_and_no_thread_stays(directory, capfd, caplog):
    caplog.set_level(logging.WARNING)
    with Checkpointer(directory, keep=1) as checkpointer:
        save_all(checkpointer, 1, 2)
        checkpointer.restore(abstract(make_state()))
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


# Devices


@pytest.mark.parametrize(("saved", "restored"), [(8, 1), (8, 4), (1, 8), (4, 8), (8, 8)])
@pytest.mark.parametrize("split", [False, True])
def test_it_opens_on_any_number_of_devices(checkpointer, saved, restored, split):
    state = make_state(3, sharding=spread(saved, split=split))
    target = make_state(0, sharding=spread(restored, split=not split if saved == restored else split))
    checkpointer.save(3, state, record={}, score=None)
    got = checkpointer.restore(abstract(target)).state
    assert_same(got, state)
    for new, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(target), strict=True):
        assert new.sharding == wanted.sharding


def run_python(script, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_it_opens_in_a_process_with_one_device(checkpointer, directory):
    state = {"w": jax.device_put(jnp.arange(16.0), spread(8, split=True)(jnp.arange(16.0)))}
    checkpointer.save(3, state, record={}, score=None)
    script = (
        "import sys\nfrom pathlib import Path\nimport jax\nfrom jaxdl.train.checkpoint import Checkpointer\n"
        "here = jax.sharding.SingleDeviceSharding(jax.devices()[0])\n"
        "wanted = {'w': jax.ShapeDtypeStruct((16,), 'float32', sharding=here)}\n"
        "print(Checkpointer(Path(sys.argv[1]), keep=1).restore(wanted).state['w'].tolist())"
    )
    result = run_python(script, directory, JAX_NUM_CPU_DEVICES="1")
    assert (result.stdout.strip(), result.stderr) == (str(list(map(float, range(16)))), "")


def test_an_evaluation_that_comes_later_can_make_a_checkpoint_the_best(checkpointer, directory):
    state = make_state(0)
    checkpointer.save(1, state, record={"x": 1}, score=None)
    checkpointer.save(1, state, record={}, score=0.9)
    for step in (2, 3, 4):
        checkpointer.save(step, state, record={}, score=0.1)
    checkpointer.wait()
    assert checkpointer.steps()[0] == 1


@pytest.mark.parametrize("devices", [1, 8])
def test_a_restored_state_can_be_donated(checkpointer, devices):
    """Orbax may give all replicas one piece of NumPy's memory."""
    sharding = spread(devices, split=False)(np.zeros(8))
    state = {f"w{i}": jax.device_put(np.full(1 << 14, i, np.float32), sharding) for i in range(8)}
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x * 2 + 1, state), donate_argnums=0)
    checkpointer.save(1, state, record={}, score=None)
    got = checkpointer.restore(abstract(state)).state

    def buffers(tree):
        return [
            shard.data.unsafe_buffer_pointer()
            for x in jax.tree.leaves(tree)
            for shard in x.addressable_shards
        ]

    before = buffers(got)
    assert len(set(before)) == len(before) == 8 * devices
    got = advance(got)
    assert set(buffers(got)) == set(before), "the donated memory is used again"
    got = advance(got)
    for i in range(8):
        for shard in got[f"w{i}"].addressable_shards:
            np.testing.assert_array_equal(shard.data, np.full(1 << 14, 4 * i + 3, np.float32))


def test_a_restored_state_needs_no_new_compilation(checkpointer):
    state = make_state(1, sharding=spread(8, split=True))
    step = jax.jit(lambda state: state.replace(step=state.step + 1), donate_argnums=0)
    step(make_state(1, sharding=spread(8, split=True)))
    checkpointer.save(1, state, record={}, score=None)
    step(checkpointer.restore(abstract(state)).state)
    assert step._cache_size() == 1


# Another configuration


def test_a_state_of_another_kind_is_refused_leaf_by_leaf(checkpointer):
    checkpointer.save(1, make_state(), record={}, score=None)
    target = abstract(make_state(width=32))
    params = target.params | {
        "half": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=target.params["half"].sharding)
    }
    params["new"] = target.params["dense"]["bias"]
    del params["empty"]
    with pytest.raises(CheckpointError) as caught:
        checkpointer.restore(target.replace(params=params))
    text = str(caught.value)
    assert caught.value.exit_code == 5
    for line in (
        "params/dense/kernel: float32[8,16] in the checkpoint, float32[8,32] expected",
        "params/half: bfloat16[8,4] in the checkpoint, float32[8,4] expected",
        "params/new: float32[8] expected, missing",
        "params/empty: float32[0,3] in the checkpoint only",
        "opt_state/1/0/mu/dense/kernel: float32[8,16] in the checkpoint, float32[8,32] expected",
    ):
        assert f"\n  {line}" in text
    assert "dense/bias" not in text


def test_averages_that_are_new_are_missing_and_a_long_list_is_cut(checkpointer):
    checkpointer.save(1, make_state(), record={}, score=None)
    target = abstract(make_state())
    leaf = target.params["dense"]["bias"]
    with pytest.raises(CheckpointError, match=r"(?s)ema/0/w00: float32\[8\] expected, missing.*and 10 more$"):
        checkpointer.restore(target.replace(ema=({f"w{i:02}": leaf for i in range(30)},)))


def test_a_layout_must_be_given(checkpointer):
    with pytest.raises(ValueError, match="sharding"):
        checkpointer.restore({"x": jax.ShapeDtypeStruct((3,), jnp.float32)})


# Which one


def test_the_newest_is_found_by_number_and_other_names_are_ignored(directory):
    with Checkpointer(directory, keep=9) as checkpointer:
        save_all(checkpointer, 9, 10, 100)
        for name in ("100.bak", "step_700", "best", "0200", "-300", ".saving-400", ".removing-500", "６００"):
            shutil.copytree(directory / "100", directory / name)
        (directory / "800").mkdir()
        (directory / "900").touch()
        assert checkpointer.steps() == [9, 10, 100]
        assert checkpointer.restore(abstract(make_state())).step == 100


def test_no_checkpoint_is_none_and_restoring_writes_nothing(tmp_path):
    for directory in (tmp_path / "missing", tmp_path / "there"):
        (tmp_path / "there").mkdir(exist_ok=True)
        with Checkpointer(directory, keep=1) as checkpointer:
            assert checkpointer.restore(abstract(make_state())) is None
            assert checkpointer.steps() == []
    assert names(tmp_path) == ["there"]
    assert names(tmp_path / "there") == []


def test_a_directory_without_manifest_is_reported_and_skipped(checkpointer, directory, caplog):
    (directory / "20").mkdir(parents=True)
    (directory / "20" / "something").touch()
    with pytest.raises(CheckpointError, match=r"None of .* is sound.*20/manifest\.json"):
        checkpointer.restore(abstract(make_state()))
    save_all(checkpointer, 10)
    caplog.clear()
    assert checkpointer.restore(abstract(make_state())).step == 10
    assert f"{directory / '20' / 'manifest.json'} cannot be read" in caplog.text
    assert checkpointer.steps() == [10]


def test_a_renamed_checkpoint_and_a_newer_format_are_not_trusted(checkpointer, directory, caplog):
    save_all(checkpointer, 1)
    shutil.copytree(directory / "1", directory / "2")
    assert checkpointer.restore(abstract(make_state())).step == 1
    assert "renamed checkpoint of step 1" in caplog.text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxdl.train.manifests.FORMAT", 2)
        save_all(checkpointer, 3)
    with pytest.raises(CheckpointError, match=r"format 2.*reads format 1"):
        checkpointer.restore(abstract(make_state()))


# Damage


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    middle = max(0, len(content) // 2 - 32)
    content[middle : middle + 64] = bytes(byte ^ 0x55 for byte in content[middle : middle + 64])
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink])
def test_any_damaged_file_makes_the_older_one_the_choice(directory, caplog, harm):
    with Checkpointer(directory, keep=2) as checkpointer:
        save_all(checkpointer, 1, 2)
    sound, files = directory.with_name("sound"), [p for p in (directory / "2").rglob("*") if p.is_file()]
    shutil.copytree(directory / "2", sound)
    assert len(files) > 5
    for path in files:
        if path.stat().st_size == 0 and harm is not Path.unlink:
            continue
        harm(path)
        caplog.clear()
        restored = Checkpointer(directory, keep=2).restore(abstract(make_state()))
        assert restored.step == 1, path
        assert_same(restored.state, make_state(1))
        assert str(path) in caplog.text
        shutil.copy(sound / path.relative_to(directory / "2"), path)
    assert Checkpointer(directory, keep=2).restore(abstract(make_state())).step == 2


def test_a_damaged_one_is_replaced_and_no_reason_to_remove_a_sound_one(directory):
    with Checkpointer(directory, keep=1) as checkpointer:
        save_all(checkpointer, 100)
    with Checkpointer(directory, keep=2) as checkpointer:
        save_all(checkpointer, 200)
    flip(directory / "200" / "arrays" / "state" / "_METADATA")
    with Checkpointer(directory, keep=1) as checkpointer:
        assert checkpointer.restore(abstract(make_state())).step == 100
        assert checkpointer.steps() == [100]
        save_all(checkpointer, 150)
        assert checkpointer.steps() == [150]
        assert checkpointer.restore(abstract(make_state())).step == 150
        save_all(checkpointer, 200)
        assert names(directory) == ["200"]
        assert_same(checkpointer.restore(abstract(make_state())).state, make_state(200))


def test_if_none_is_sound_training_does_not_start_afresh(checkpointer, directory):
    save_all(checkpointer, 1, 2)
    flip(directory / "1" / "manifest.json")
    truncate(directory / "2" / "arrays" / "state" / "_METADATA")
    with pytest.raises(CheckpointError, match="None of the checkpoints") as caught:
        checkpointer.restore(abstract(make_state()))
    assert str(directory / "1" / "manifest.json") in str(caught.value)
    assert str(directory / "2" / "arrays" / "state" / "_METADATA") in str(caught.value)


# What is kept


@pytest.mark.parametrize(
    ("keep", "scores", "kept"),
    [
        (2, {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3, 5: None}, ["2", "4", "5"]),
        (1, {1: None, 2: None}, ["2"]),
        (1, {1: float("nan"), 2: -5.0, 3: float("nan"), 4: None}, ["2", "4"]),
        (1, {1: 0.5, 2: 0.5, 3: 0.5}, ["1", "3"]),
        (1, {9: 0.1, 10: 0.2, 100: 0.15}, ["10", "100"]),
        (2, {20: 0.1, 30: 0.1, 5: 0.0}, ["20", "30", "5"]),
    ],
)
def test_the_newest_and_the_best_are_kept(directory, keep, scores, kept):
    with Checkpointer(directory, keep=keep) as checkpointer:
        for step, score in scores.items():
            checkpointer.save(step, {"x": jnp.float32(step)}, record={}, score=score)
    assert names(directory) == kept


def test_an_old_one_goes_only_after_the_new_one_is_complete_and_by_a_rename(directory, monkeypatch):
    removed = []

    def rmtree(path, *_, **__):
        if path.exists():
            removed.append((path.name, names(directory)))

    with Checkpointer(directory, keep=1) as checkpointer:
        save_all(checkpointer, 1)
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        save_all(checkpointer, 2)
        assert removed == [(".removing-1", [".removing-1", "2"])]
        assert checkpointer.restore(abstract(make_state())).step == 2


def test_an_existing_step_is_left_alone_unless_incomplete(checkpointer, directory):
    save_all(checkpointer, 1)
    before = (directory / "1" / "manifest.json").stat()
    checkpointer.save(1, make_state(7), record={}, score=None)
    checkpointer.close()
    assert (directory / "1" / "manifest.json").stat() == before
    (directory / "1" / "manifest.json").unlink()
    checkpointer.save(1, make_state(7), record={}, score=None)
    assert_same(checkpointer.restore(abstract(make_state())).state, make_state(7))
    assert names(directory) == ["1"]


def test_leftovers_are_never_read_and_the_next_save_removes_them(directory):
    with Checkpointer(directory, keep=3) as checkpointer:
        save_all(checkpointer, 1)
    shutil.copytree(directory / "1", directory / ".saving-5")
    shutil.copytree(directory / "1", directory / ".removing-3")
    with Checkpointer(directory, keep=3) as checkpointer:
        assert checkpointer.restore(abstract(make_state())).step == 1
        assert names(directory) == [".removing-3", ".saving-5", "1"], "a reader changes nothing"
        save_all(checkpointer, 5)
        assert names(directory) == ["1", "5"]


# Failures


def test_a_full_disk_is_reported_by_the_next_call_and_the_former_one_stays(directory, capfd, caplog):
    big = {"w": jnp.arange(1 << 16, dtype=jnp.float32)}
    checkpointer = Checkpointer(directory, keep=1)
    checkpointer.save(1, big, record={}, score=None)
    checkpointer.wait()
    for step, call in enumerate(
        (checkpointer.close, checkpointer.check, lambda: checkpointer.save(9, big, record={}, score=None)), 2
    ):
        with file_size_limit(1 << 16):
            checkpointer.save(step, big, record={}, score=None)
            checkpointer.wait()
        with pytest.raises(CheckpointError) as caught:
            call()
        text = str(caught.value)
        assert caught.value.exit_code == 5
        for part in (
            f"Checkpoint {step} ",
            str(directory),
            "File too large: 1.25 MiB are needed and ",
            "checkpoint 1 is intact",
        ):
            assert part in text
        assert text.count("\n") == 0
        checkpointer.close()  # told once
        assert names(directory) == ["1"]
    assert_same(checkpointer.restore(abstract(big)).state, big)
    checkpointer.save(5, big, record={}, score=None)
    checkpointer.close()
    assert names(directory) == ["5"]
    assert (capfd.readouterr(), caplog.text) == (("", ""), "")


def test_room_is_checked_before_anything_is_written(checkpointer, directory, monkeypatch):
    save_all(checkpointer, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 3 << 20))
    with pytest.raises(
        CheckpointError, match=r"No space left on device: 5 MiB are needed and 3 MiB are free"
    ):
        checkpointer.save(2, {"w": jnp.zeros(1 << 20)}, record={}, score=None)
    assert names(directory) == ["1"]
    assert checkpointer.restore(abstract(make_state())).step == 1


@pytest.mark.parametrize("step", [1, 2])
def test_a_read_only_disk_is_reported(checkpointer, monkeypatch, capfd, caplog, step):
    """By a fake, since root may write wherever the disk allows it."""
    if step == 2:
        save_all(checkpointer, 1)

    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(CheckpointError, match="Read-only file system") as caught:
        checkpointer.save(step, make_state(), record={}, score=None)
    assert ("checkpoint 1 is intact" in str(caught.value)) == (step == 2)
    assert (capfd.readouterr(), caplog.text) == (("", ""), "")


def test_a_file_in_the_way_is_reported(tmp_path):
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with Checkpointer(directory, keep=1) as checkpointer:
            assert checkpointer.restore(abstract(make_state())) is None
            with pytest.raises(CheckpointError, match=str(directory)):
                checkpointer.save(1, make_state(), record={}, score=None)


def test_a_directory_that_cannot_be_read_is_reported(checkpointer, monkeypatch):
    save_all(checkpointer, 1)

    def denied(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", denied)
        with pytest.raises(CheckpointError, match="cannot be read \\(Permission denied"):
            checkpointer.restore(abstract(make_state()))


def test_another_error_is_not_replaced_by_that_of_the_save(directory, caplog):
    def fail():
        with Checkpointer(directory, keep=1) as checkpointer:
            with file_size_limit(1 << 16):
                checkpointer.save(1, {"w": jnp.zeros(1 << 16)}, record={}, score=None)
                checkpointer.wait()
            raise KeyError("the first one")

    with pytest.raises(KeyError, match="the first one"):
        fail()
    assert "Checkpoint 1 could not be written" in caplog.text


def test_leaving_the_context_waits_and_reports(directory):
    with Checkpointer(directory, keep=1) as checkpointer:
        checkpointer.save(1, make_state(), record={}, score=None)
    assert checkpointer.steps() == [1]

    def fail():
        with Checkpointer(directory, keep=1) as checkpointer, file_size_limit(1 << 16):
            checkpointer.save(2, {"w": jnp.zeros(1 << 16)}, record={}, score=None)
            checkpointer.wait()

    with pytest.raises(CheckpointError, match="Checkpoint 2"):
        fail()


VICTIM = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxdl.train.checkpoint import Checkpointer

advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
with Checkpointer(Path(sys.argv[1]), keep=1) as checkpointer:
    state = {"w": jnp.zeros((8, 1 << 16)), "step": jnp.int32(0)}
    restored = checkpointer.restore(jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state))
    state = restored.state if restored else state
    for step in range(int(state["step"]) + 1, 10**6):
        state = advance(state)
        checkpointer.save(step, state, record={"step": step}, score=None)
        print(step, flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_sound_checkpoint(directory):
    rng, reached = random.Random(0), 0
    target = abstract({"w": jnp.zeros((8, 1 << 16)), "step": jnp.int32(0)})
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", VICTIM, directory], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as victim:
            for _ in range(3):
                begun = int(victim.stdout.readline())
            time.sleep(rng.uniform(0, 0.05))
            victim.kill()
        checkpointer = Checkpointer(directory, keep=1)
        restored = checkpointer.restore(target)
        assert restored.step >= begun - 1 > reached, "the last but one that was begun had been complete"
        assert restored.record == {"step": restored.step}
        assert_same(
            restored.state,
            {"w": np.full((8, 1 << 16), restored.step, np.float32), "step": np.int32(restored.step)},
        )
        reached = restored.step
    checkpointer.save(10**6, restored.state, record={}, score=None)
    checkpointer.close()
    assert names(directory) == ["1000000"]
    assert json.loads((directory / "1000000" / "manifest.json").read_text())["step"] == 10**6
