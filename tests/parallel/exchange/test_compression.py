import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.parallel.exchange import compression, tree


def updates(steps, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (40, 25), "bias": (7,)}
    return [
        {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
        for _ in range(steps)
    ]


@pytest.mark.parametrize("kind", ["none", "bfloat16", "int8", "top_k"])
def test_what_is_sent_and_what_is_kept_is_all_there_was(kind):
    given, residual = updates(20), None
    arrived = tree.zeros(given[0])
    residual = tree.zeros(given[0])
    for update in given:
        sent, residual = jax.jit(compression.compress, static_argnums=2)(update, residual, kind)
        arrived = tree.add(arrived, compression.expand(sent, update))
    total = jax.tree.map(lambda *leaves: sum(leaves), *given)
    for name in total:
        np.testing.assert_allclose(arrived[name] + residual[name], total[name], atol=2e-5)
        # And what is kept does not grow for ever.
        assert (
            np.abs(residual[name]).max() < {"none": 1e-9, "bfloat16": 0.02, "int8": 0.05, "top_k": 60}[kind]
        )


def test_bytes_on_the_wire():
    (update,) = updates(1)
    none = tree.zeros(update)
    sizes = {kind: compression.wire_bytes(compression.compress(update, none, kind)[0]) for kind in
             ("none", "bfloat16", "int8", "top_k")}  # fmt: skip
    assert sizes == {"none": 1007 * 4, "bfloat16": 1007 * 2, "int8": 1007 + 2 * 4, "top_k": (10 + 1) * 8}


def test_eight_bits_are_within_half_a_step():
    (update,) = updates(1)
    _, left = compression.compress(update, tree.zeros(update), "int8")
    for name in update:
        step = float(jnp.abs(update[name]).max()) / 127
        assert float(jnp.abs(left[name]).max()) <= step / 2 * 1.001
    zeros = tree.zeros(update)
    np.testing.assert_array_equal(
        compression.expand(compression.compress(zeros, zeros, "int8")[0], zeros)["bias"], 0
    )


def test_the_largest_entries_are_sent_exactly():
    leaf = {"w": jnp.asarray([[0.1, -5.0], [3.0, 0.2]])}
    sent, left = compression.compress(leaf, tree.zeros(leaf), "top_k", share=0.5)
    np.testing.assert_array_equal(compression.expand(sent, leaf)["w"], [[0, -5], [3, 0]])
    np.testing.assert_allclose(left["w"], [[0.1, 0], [0, 0.2]])
