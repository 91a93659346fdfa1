import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdl.parallel.exchange import wire

TREE = {
    "dense": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(3, ml_dtypes.bfloat16)},
    "step": np.asarray(7, np.int32),
    "empty": np.zeros((0, 4), np.float16),
    "list": [np.asarray([True, False]), np.arange(3, dtype=np.int8)],
}


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert jax.tree.map(lambda leaf: leaf.dtype, left) == jax.tree.map(lambda leaf: leaf.dtype, right)
    assert jax.tree.map(np.shape, left) == jax.tree.map(np.shape, right)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, lambda leaf: np.asarray(leaf, order="F")])
def test_a_tree_comes_back_bit_for_bit(kind):
    tree = jax.tree.map(kind, TREE)
    frames = wire.pack({"kind": "token", "hops": 3}, tree)
    assert wire.read(frames) == {"kind": "token", "hops": 3}
    back = wire.unpack(frames, tree)
    same(jax.tree.map(np.asarray, tree), back)
    # A template of shapes does as well.
    same(back, wire.unpack(frames, jax.eval_shape(lambda: jax.tree.map(jnp.asarray, TREE))))


def test_values_that_are_not_finite_and_negative_zero_keep_their_bits():
    tree = {"w": np.asarray([np.nan, np.inf, -0.0, 1e-40], np.float32)}
    back = wire.unpack(wire.pack({}, tree), tree)
    np.testing.assert_array_equal(back["w"].view(np.uint32), tree["w"].view(np.uint32))


def test_what_is_sent_is_a_copy():
    tree = {"w": np.zeros(3, np.float32)}
    frames = wire.pack({}, tree)
    tree["w"][:] = 1
    assert not wire.unpack(frames, tree)["w"].any()


def test_bytes_are_the_arrays_and_a_small_header():
    tree = {"w": np.zeros(10_000, np.float32), "v": np.zeros(10_000, ml_dtypes.bfloat16)}
    frames = wire.pack({"kind": "token"}, tree)
    assert 60_000 < wire.size(frames) < 60_300
    assert wire.size(frames) == sum(len(frame) for frame in frames)


def test_a_message_may_have_no_arrays():
    frames = wire.pack({"kind": "ask"})
    assert len(frames) == 1
    assert wire.unpack(frames, None) is None


@pytest.mark.parametrize(
    ("sent", "cause"),
    [
        ({"w": np.zeros(4, np.float32)}, r"\[4\]\] instead of .*\[3\]\]"),
        ({"w": np.zeros((3, 1), np.float32)}, r"\[3, 1\]\] instead of"),
        ({"w": np.zeros(3, np.int32)}, "int32"),
        ({"w": np.zeros(3, ml_dtypes.bfloat16)}, "bfloat16"),
        ({"v": np.zeros(3, np.float32)}, r"\['v'\]"),
        ({"w": np.zeros(3, np.float32), "x": np.zeros(1, np.float32)}, "the number of arrays"),
        (None, "the number of arrays"),
    ],
)
def test_another_model_is_refused(sent, cause):
    with pytest.raises(wire.WireError, match=f"(?s)what differs: .*{cause}"):
        wire.unpack(wire.pack({}, sent), {"w": np.zeros(3, np.float32)})


def test_damaged_arrays_are_refused():
    tree = {"v": np.zeros(2, np.float32), "w": np.zeros(3, np.float32)}
    header, first, second = wire.pack({}, tree)
    for damaged in ([header, first], [header, first, second[:-1]], [header, second, first]):
        with pytest.raises(wire.WireError, match="damaged"):
            wire.unpack(damaged, tree)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x80\x04K\x01."],  # a pickle
        [b"GET / HTTP/1.1"],
        [b"[1, 2]"],
        [b"[" * 100_000],
        [b"{}"],
        [json.dumps({"mark": "another"}).encode()],
        [json.dumps({"mark": wire.MARK}).encode()],
        [json.dumps({"mark": wire.MARK, "fields": 3}).encode()],
    ],
)
def test_what_is_no_message_is_refused(frames):
    with pytest.raises(wire.WireError, match="no message of jaxdl"):
        wire.read(frames)


def test_a_header_without_arrays_is_refused_where_some_are_expected():
    frames = [json.dumps({"mark": wire.MARK, "fields": {}, "leaves": "w"}).encode()]
    with pytest.raises(wire.WireError, match="0 arrays where 1 were expected"):
        wire.unpack(frames, {"w": np.zeros(3, np.float32)})
