from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxdl.models import ResNet
from jaxdl.models.convolution import convolve

# (height, width), kernel, stride, input channels, output channels
CASES = [
    (size, kernel, strides, *channels)
    for size in [(9, 7), (2, 1)]
    for kernel in (1, 3, 7)
    for strides in (1, 2)
    for channels in [(3, 5), (16, 24)]
] + [((14, 14), 3, 1, 64, 32), ((7, 7), 1, 2, 96, 64), ((32, 30), 7, 2, 3, 64), ((20, 20), 3, 2, 32, 32)]


def random(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def value_and_gradients(formulation, x, kernel, strides, padding):
    @jax.jit
    def run(x, kernel, weight):
        convolution = partial(convolve, strides=strides, padding=padding, formulation=formulation)
        y, pull = jax.vjp(convolution, x, kernel)
        return y, *pull(weight[: y.shape[0], : y.shape[1], : y.shape[2]])

    return run(x, kernel, random(2, *x.shape[:3], kernel.shape[-1], dtype=x.dtype))


def distance(a, b):
    """Largest difference relative to the largest value."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)


@pytest.mark.parametrize(("size", "kernel", "strides", "channel_in", "channel"), CASES)
def test_products_equal_lax_in_value_and_both_gradients(size, kernel, strides, channel_in, channel):
    x = random(0, 2, *size, channel_in)
    weights = random(1, kernel, kernel, channel_in, channel)
    expected = value_and_gradients("lax", x, weights, strides, kernel // 2)
    actual = value_and_gradients("product", x, weights, strides, kernel // 2)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert distance(a, b) < 3e-6


@pytest.mark.parametrize("padding", [0, 2])
def test_other_paddings(padding):
    x, weights = random(0, 2, 9, 8, 16), random(1, 3, 3, 16, 8)

    def run(formulation):
        f = partial(convolve, strides=2, padding=padding, formulation=formulation)
        y, pull = jax.vjp(f, x, weights)
        return y, *pull(jnp.cos(y))

    expected = run("lax")
    for formulation in ("product", "auto"):
        for a, b in zip(run(formulation), expected, strict=True):
            assert distance(a, b) < 1e-5  # the rounding of y is in its cosine too


@pytest.mark.parametrize("formulation", ["lax", "product", "auto"])
def test_bfloat16_is_as_near_to_float32_as_its_rounding(formulation):
    x, weights = random(0, 2, 8, 8, 32), random(1, 3, 3, 32, 32)
    expected = value_and_gradients("lax", x, weights, 1, 1)
    actual = value_and_gradients(formulation, x.astype(jnp.bfloat16), weights.astype(jnp.bfloat16), 1, 1)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        assert distance(a, b) < 0.03


def primitives(formulation, platform, size=8, kernel=1):
    """StableHLO of value and gradients, lowered for a platform that need not be here."""
    x, weights = random(0, 2, size, size, 16), random(1, kernel, kernel, 16, 16)

    def run(x, weights):
        y, pull = jax.vjp(partial(convolve, padding=kernel // 2, formulation=formulation), x, weights)
        return pull(y)

    return jax.jit(run).trace(x, weights).lower(lowering_platforms=(platform,)).as_text()


def test_auto_is_chosen_for_the_platform_compiled_for_not_the_one_compiling():
    for kernel in (1, 3):
        for platform in ("cuda", "tpu"):
            text = primitives("auto", platform, kernel=kernel)
            assert "stablehlo.convolution" in text
            assert "stablehlo.dot_general" not in text
        text = primitives("auto", "cpu", kernel=kernel)
        assert "stablehlo.convolution" not in text
        assert "stablehlo.dot_general" in text
    assert "stablehlo.convolution" in primitives("auto", "cpu", size=32, kernel=3)


def test_lax_and_product_are_forced_on_every_platform():
    for platform in ("cpu", "cuda"):
        assert "stablehlo.dot_general" not in primitives("lax", platform)
        assert "stablehlo.convolution" not in primitives("product", platform, kernel=3)


def test_taps_that_meet_only_padding_are_left_out():
    assert primitives("product", "cpu", size=1, kernel=3).count("stablehlo.dot_general") == 3
    assert primitives("product", "cpu", size=8, kernel=3).count("stablehlo.dot_general") == 27


@pytest.mark.parametrize(("bottleneck", "stem", "size"), [(True, "imagenet", 48), (False, "small", 16)])
def test_a_whole_network_has_the_same_loss_and_gradients_in_every_formulation(bottleneck, stem, size):
    x = random(0, 4, size, size, 3)

    def run(formulation):
        model = ResNet((1, 1, 1), bottleneck, 10, width=16, stem=stem, convolution=formulation)
        variables = nn.unbox(jax.jit(partial(model.init, train=False))(jax.random.key(0), x))
        # A fresh network's blocks end in a zero scale, which would hide the gradients within.
        params = jax.tree.map(lambda a: a + 0.1, variables["params"])

        @jax.jit
        def step(params):
            def loss(params):
                logits, updates = model.apply(
                    {**variables, "params": params}, x, train=True, mutable=["batch_stats"]
                )
                return jax.nn.logsumexp(logits, -1).mean() - logits[:, 0].mean(), updates

            return jax.value_and_grad(loss, has_aux=True)(params)

        return step(params)

    (loss, stats), gradients = run("lax")
    for formulation in ("product", "auto"):
        (other_loss, other_stats), other_gradients = run(formulation)
        assert distance(other_loss, loss) < 1e-5
        norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(gradients)))
        difference = jax.tree.map(lambda a, b: np.square(a - b).sum(), other_gradients, gradients)
        assert np.sqrt(sum(jax.tree.leaves(difference))) < 1e-5 * norm
        assert max(jax.tree.leaves(jax.tree.map(distance, other_stats, stats))) < 1e-5
