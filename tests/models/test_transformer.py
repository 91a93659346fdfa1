"""Encoder layers against plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from jaxdl.models.attention import drop
from jaxdl.models.transformer import Encoder, EncoderLayer

BATCH, LENGTH, EMBED, HEADS, MLP = 2, 7, 12, 3, 20


def example() -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, EMBED))
    return x, jnp.arange(LENGTH)[None, :] < jnp.array([LENGTH, 4])[:, None]


def keys(seed: int | None) -> jax.Array | None:
    return None if seed is None else jax.random.split(jax.random.key(seed), BATCH)


def layer(**settings) -> EncoderLayer:
    return EncoderLayer(**{"heads": HEADS, "mlp": MLP, **settings})


def randomized(variables):
    """No bias of 0, no scale of 1: else a formula that forgets them would pass."""
    leaves, structure = jax.tree.flatten(nn.unbox(variables))
    keys = jax.random.split(jax.random.key(5), len(leaves))
    return structure.unflatten(
        [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    )


def written_out(params, x, mask, pre_norm):
    """One layer in float64 NumPy, example by example and head by head; padding attends to padding."""
    erf = np.vectorize(__import__("math").erf)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(y, name):
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-12)
        return y * p[name]["scale"] + p[name]["bias"]

    def attention(y, seen):
        out = np.zeros_like(y) + p["attention_out"]["bias"]
        for head in range(HEADS):
            q, k, v = (y @ p[n]["kernel"][:, head] + p[n]["bias"][head] for n in ("query", "key", "value"))
            weights = np.exp(q @ k.T / np.sqrt(EMBED / HEADS)) * (seen[:, None] == seen)
            out += (weights / weights.sum(-1, keepdims=True)) @ v @ p["attention_out"]["kernel"][head]
        return out

    def perceptron(y):
        hidden = y @ p["mlp_in"]["kernel"] + p["mlp_in"]["bias"]
        hidden = hidden * 0.5 * (1 + erf(hidden / np.sqrt(2)))
        return hidden @ p["mlp_out"]["kernel"] + p["mlp_out"]["bias"]

    results = []
    for y, seen in zip(np.asarray(x, np.float64), np.asarray(mask), strict=True):
        if pre_norm:
            y = y + attention(norm(y, "attention_norm"), seen)
            y = y + perceptron(norm(y, "mlp_norm"))
        else:
            y = norm(y + attention(y, seen), "attention_norm")
            y = norm(y + perceptron(y), "mlp_norm")
        results.append(y)
    return np.stack(results)


SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 2, 3], [1, 1, 2, 2, 0, 0, 0]])


@pytest.mark.parametrize("segment", [example()[1], SEGMENTS], ids=["mask", "segments"])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_layer_computes_the_formula(pre_norm, segment):
    x, mask = example()[0], segment
    model = layer(pre_norm=pre_norm)
    variables = randomized(model.init(jax.random.key(0), x, mask))
    expected = written_out(variables["params"], x, mask, pre_norm)
    np.testing.assert_allclose(model.apply(variables, x, mask), expected, rtol=1e-5, atol=1e-5)


def test_attention_with_vanishing_dropout_equals_attention_without():
    x, mask = example()
    model = layer(dropout=0.0, attention_dropout=1e-9)
    variables = randomized(model.init(jax.random.key(0), x, mask))
    np.testing.assert_allclose(
        model.apply(variables, x, mask, keys(2)),
        model.apply(variables, x, mask),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("key", [None, 4])
def test_padding_never_reaches_a_token(key):
    x, mask = example()
    model = layer()
    variables = randomized(model.init(jax.random.key(0), x, mask))
    other = jnp.where(mask[..., None], x, 1e3)
    results = [model.apply(variables, y, mask, keys(key)) for y in (x, other)]
    np.testing.assert_array_equal(*[np.asarray(y)[np.asarray(mask)] for y in results])


def test_an_encoder_is_its_layers_one_after_another():
    x, mask = example()
    settings = {"heads": HEADS, "mlp": MLP}
    model = Encoder(3, settings)
    variables = randomized(model.init(jax.random.key(0), x, mask))
    y = x
    for i in range(3):
        params = jax.tree.map(lambda leaf, i=i: leaf[i], variables["params"]["layers"])
        y = layer().apply({"params": params}, y, mask)
    np.testing.assert_allclose(model.apply(variables, x, mask), y, rtol=1e-6, atol=1e-6)


def test_layers_start_from_different_values_and_drop_different_values():
    x, mask = example()
    model = Encoder(2, {"heads": HEADS, "mlp": MLP, "dropout": 0.5})
    params = nn.unbox(model.init(jax.random.key(0), x, mask))["params"]["layers"]
    first, second = params["query"]["kernel"]
    assert not np.array_equal(first, second)
    runs = [model.apply({"params": {"layers": params}}, x, mask, keys(i)) for i in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_every_parameter_carries_the_names_of_its_axes():
    x, mask = example()
    boxed = jax.eval_shape(lambda: Encoder(2, {"heads": HEADS, "mlp": MLP}).init(jax.random.key(0), x, mask))
    specs = nn.get_partition_spec(boxed)["params"]["layers"]
    assert specs["query"]["kernel"] == P("layers", "embed", "heads", "head_width")
    assert specs["attention_out"]["kernel"] == P("layers", "heads", "head_width", "embed")
    assert specs["mlp_in"]["kernel"] == P("layers", "embed", "mlp")
    assert specs["mlp_out"]["bias"] == P("layers", "embed")
    for leaf, spec in zip(
        jax.tree.leaves(nn.unbox(boxed)),
        jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)),
        strict=True,
    ):
        assert leaf.ndim == len(spec)


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("seed", [None, 0])
def test_float16_is_computed_on_every_platform(seed):
    x, mask = example()
    model = layer(attention_dropout=0.0, dropout=0.0)
    variables = model.init(jax.random.key(0), x, mask)
    half = layer(attention_dropout=0.0, dropout=0.0, dtype=jnp.float16)
    found = jax.jit(half.apply)(variables, x, mask, keys(seed))
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found, model.apply(variables, x, mask, keys(seed)), atol=1e-2)


@jax.numpy_dtype_promotion("standard")  # flax and JAX's own attention mix dtypes on their way to float32
def test_bfloat16_keeps_softmax_and_statistics_in_float32():
    x, mask = example()
    model = layer(dtype=jnp.bfloat16, attention_dropout=0.1)
    variables = nn.unbox(model.init(jax.random.key(0), x, mask))
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    for key in (None, keys(1)):
        jaxpr = jax.make_jaxpr(lambda x, key=key: model.apply(variables, x, mask, key))(x)
        assert [aval.dtype for aval in jaxpr.out_avals] == [jnp.bfloat16]
        exponentials = [line for line in str(jaxpr).splitlines() if "= exp" in line]
        assert exponentials
        assert all(":f32[" in line for line in exponentials)


def test_drop_keeps_the_mean_and_drops_the_share():
    x = jnp.ones((200, 200))
    y = drop(x, 0.25, jax.random.split(jax.random.key(0), 200))
    assert abs(float((y == 0).mean()) - 0.25) < 0.01
    np.testing.assert_allclose(y[y != 0], 1 / 0.75, rtol=1e-6)
    assert drop(x, 0.25, None) is x
