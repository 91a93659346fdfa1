import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxdl.models.layers import BatchNorm
from jaxdl.models.normalization import normalize_by_batch
from jaxdl.models.pooling import max_pool


def random(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def plain(x, scale, bias, residual, epsilon, rectify):
    """The definition, for autodiff."""
    mean = x.mean((0, 1, 2))
    var = jnp.square(x - mean[None, None, None]).mean((0, 1, 2))
    y = (x - mean[None, None, None]) / jnp.sqrt(var + epsilon)[None, None, None]
    y = y * scale[None, None, None] + bias[None, None, None]
    y = y if residual is None else y + residual
    return nn.relu(y) if rectify else y, mean, var


@pytest.mark.parametrize("rectify", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
def test_gradient_of_batch_normalisation_is_that_of_its_definition(rectify, with_residual):
    x, scale, bias = 2 * random(0, 3, 4, 5, 6) + 1, random(1, 6), random(2, 6)
    residual = random(3, *x.shape) if with_residual else None
    cotangents = random(4, *x.shape), random(5, 6), random(6, 6)  # mean and variance too

    def run(function):
        out, pull = jax.vjp(lambda *a: function(*a, 1e-5, rectify), x, scale, bias, residual)
        return out, pull(cotangents)

    actual, expected = run(normalize_by_batch), run(plain)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("train", [True, False])
def test_equals_flax(train):
    x = random(0, 4, 3, 3, 8) * 3 + 2
    ours, theirs = BatchNorm(), nn.BatchNorm(momentum=0.9, epsilon=1e-5, use_fast_variance=False)
    variables = nn.unbox(ours.init(jax.random.key(0), x, train))
    variables["batch_stats"] = {"mean": random(1, 8), "var": jnp.exp(random(2, 8))}
    a, a_stats = ours.apply(variables, x, train, mutable=["batch_stats"])
    b, b_stats = theirs.apply(variables, x, use_running_average=not train, mutable=["batch_stats"])
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), a_stats, b_stats)


@pytest.mark.parametrize("mean", [0.0, 1e3, 1e4])
def test_a_large_mean_does_not_spoil_the_variance(mean):
    noise = np.random.default_rng(0).standard_normal((16, 8, 8, 4))
    x = jnp.asarray(noise + mean, jnp.float32)
    y, _ = BatchNorm().init_with_output(jax.random.key(0), x, True)
    np.testing.assert_allclose(np.asarray(y).std((0, 1, 2)), 1, rtol=2e-3)
    np.testing.assert_allclose(np.asarray(y).mean((0, 1, 2)), 0, atol=2e-3)


def test_statistics_stay_float32_in_bfloat16():
    layer = BatchNorm(dtype=jnp.bfloat16)
    x = (random(0, 64, 8, 8, 4) + 5).astype(jnp.bfloat16)
    variables = nn.unbox(layer.init(jax.random.key(0), x, True))
    y, updates = layer.apply(variables, x, True, mutable=["batch_stats"])
    assert y.dtype == jnp.bfloat16
    expected = 0.1 * np.asarray(x, np.float64).mean((0, 1, 2))
    np.testing.assert_allclose(updates["batch_stats"]["mean"], expected, rtol=1e-5)
    assert updates["batch_stats"]["mean"].dtype == jnp.float32


def test_constant_channels_give_finite_gradients():
    gradient = jax.grad(lambda x: normalize_by_batch(x, jnp.ones(2), jnp.ones(2), None, 1e-5, True)[0].sum())
    assert jnp.isfinite(gradient(jnp.full((2, 2, 2, 2), 7.0))).all()


@pytest.mark.parametrize(
    ("size", "settings"),
    [(size, settings) for size in [(8, 8), (7, 9)] for settings in [(3, 2, 1), (2, 2, 0), (3, 1, 1)]]
    + [((1, 2), (3, 2, 1)), ((1, 2), (3, 1, 1))],
)
def test_max_pool_equals_flax_in_value_and_gradient_with_ties_too(size, settings):
    x = nn.relu(jnp.round(random(0, 2, *size, 5) * 2))  # few different values: many ties
    window, strides, padding = settings

    def flax_pool(x):
        return nn.max_pool(x, (window, window), (strides, strides), ((padding, padding), (padding, padding)))

    y, pull = jax.vjp(lambda x: max_pool(x, *settings), x)
    expected, flax_pull = jax.vjp(flax_pool, x)
    assert jnp.array_equal(y, expected)
    dy = random(1, *y.shape)
    np.testing.assert_allclose(pull(dy)[0], flax_pull(dy)[0], rtol=1e-6, atol=1e-6)
