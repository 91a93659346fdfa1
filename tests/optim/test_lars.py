"""LARS against the MLPerf reference (the LARSOptimizer of TensorFlow), written out in NumPy and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdl.config import OptimizerConfig
from jaxdl.optim.build import build_optimizer
from jaxdl.optim.lars import scale_by_lars
from jaxdl.optim.masks import decay_mask

STEPS = 20
RATES = 2.0 * np.minimum(np.arange(1, STEPS + 1) / 5, 1) * (1 - np.arange(STEPS) / STEPS) ** 2
ETA, DECAY, MOMENTUM, CLIP = 0.02, 0.05, 0.9, 3.0
ADAPTED = ("kernel", "zero", "still")
TREE = {
    "dense": {"kernel": "kernel", "bias": "bias"},
    "norm": {"scale": "scale"},
    "zero": {"kernel": "zero"},
    "still": {"kernel": "still"},
}


def as_tree(values: dict) -> dict:
    """Gives the arrays the paths by which the mask knows them."""
    return jax.tree.map(lambda name: jnp.asarray(values[name], jnp.float32), TREE)


def start() -> dict:
    random = np.random.default_rng(0)
    shapes = {"kernel": (6, 5), "bias": (5,), "scale": (5,), "still": (4, 3)}
    return {name: random.normal(size=shape) for name, shape in shapes.items()} | {"zero": np.zeros((3, 4))}


def gradients_of(step: int) -> dict:
    """Gradients of norms on both sides of the clip; `still` has none."""
    random = np.random.default_rng(100 + step)
    size = 0.02 if step % 3 else 0.8
    return {
        name: size * random.normal(size=value.shape) * (name != "still") for name, value in start().items()
    }


def lars(weights: dict, gradients: list[dict]) -> dict:
    velocity = {name: np.zeros_like(value) for name, value in weights.items()}
    for rate, gradient in zip(RATES, gradients, strict=True):
        norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
        next_weights = {}
        for name, weight in weights.items():
            g, trust = gradient[name] / max(norm / CLIP, 1), 1.0
            if name in ADAPTED:
                norms = np.linalg.norm(weight), np.linalg.norm(g)
                if all(norms):
                    trust = ETA * norms[0] / (norms[1] + DECAY * norms[0])
                g = g + DECAY * weight
            velocity[name] = MOMENTUM * velocity[name] + rate * trust * g
            next_weights[name] = weight - velocity[name]
        weights = next_weights
    return weights


def build(rates, layer_axes=lambda path: 0, **settings):
    config = OptimizerConfig(name="lars", **settings)
    return build_optimizer(
        config, lambda count: jnp.asarray(rates, jnp.float32)[count], layer_axes=layer_axes
    )


def run(optimizer, params, gradients):
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.fixture
def trust():
    return scale_by_lars(ETA, DECAY, decay_mask)


def apply(transformation, gradients, params):
    return transformation.update(gradients, transformation.init(params), params)[0]


def test_twenty_steps_equal_the_reference():
    gradients = [gradients_of(step) for step in range(STEPS)]
    norms = [np.sqrt(sum(np.sum(g**2) for g in gradient.values())) for gradient in gradients]
    assert min(norms) < CLIP < max(norms)
    optimizer = build(RATES, trust_coefficient=ETA, weight_decay=DECAY, momentum=MOMENTUM, clip_norm=CLIP)
    got, _ = run(optimizer, as_tree(start()), map(as_tree, gradients))
    expected = lars(start(), gradients)
    for path, name in jax.tree_util.tree_leaves_with_path(TREE):
        leaf = got[path[0].key][path[1].key]
        atol = 1e-6 * np.abs(expected[name]).max()
        np.testing.assert_allclose(leaf, expected[name], rtol=0, atol=atol, err_msg=name)
        assert np.abs(expected[name] - start()[name]).max() > 1000 * atol, f"{name} hardly moves: no test"


def test_learning_rate_is_inside_the_momentum_buffer():
    params = {"bias": jnp.float32(0), "kernel": jnp.float32(1)}
    gradients = 2 * [{"bias": jnp.float32(1), "kernel": jnp.float32(0)}]
    optimizer = build([0.5, 0.0], weight_decay=0, momentum=0.9)
    got, _ = run(optimizer, params, gradients)
    # At rate 0 the buffer still moves by what the first step left in it; outside it, nothing would move.
    assert float(got["bias"]) == pytest.approx(-0.5 - 0.9 * 0.5)


@pytest.mark.parametrize(("weight", "gradient"), [(0.0, 2.0), (2.0, 0.0), (0.0, 0.0)])
def test_ratio_is_one_where_a_norm_is_zero(trust, weight, gradient):
    got = apply(trust, {"kernel": jnp.full((2, 3), gradient)}, {"kernel": jnp.full((2, 3), weight)})
    np.testing.assert_allclose(got["kernel"], gradient + DECAY * weight, rtol=1e-6)


def test_stacked_layers_get_the_ratios_of_the_single_layers(trust):
    random = np.random.default_rng(0)
    params, gradients = (
        {name: jnp.asarray(random.normal(size=(3, 4, 5)), jnp.float32) for name in ("kernel", "bias")}
        for _ in range(2)
    )
    # One layer at zero, and one without gradient.
    params["kernel"] = params["kernel"].at[1].set(0)
    gradients["kernel"] = gradients["kernel"].at[2].set(0)
    stacked = scale_by_lars(ETA, DECAY, decay_mask, lambda path: int("layers" in path.split("/")))
    got = apply(stacked, {"layers": gradients}, {"layers": params})["layers"]
    for layer in range(3):
        alone = apply(trust, *jax.tree.map(lambda leaf, layer=layer: leaf[layer], (gradients, params)))
        np.testing.assert_allclose(got["kernel"][layer], alone["kernel"], rtol=1e-6)
        np.testing.assert_array_equal(got["bias"][layer], alone["bias"])
    whole = apply(trust, gradients, params)["kernel"]
    assert np.abs(whole - got["kernel"]).max() > 1e-3


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_norms_are_float32_whatever_the_parameters_are_stored_in(trust, dtype):
    # The square of 300 is no float16; 1 + 1/128 squared is no bfloat16.
    weight = jnp.asarray([[300.0, 1.0078125, 0.001]], dtype)
    gradient = jnp.asarray([[0.5, -300.0, 0.3]], dtype)
    w, g = np.asarray(weight, np.float64), np.asarray(gradient, np.float64)
    exact = ETA * np.linalg.norm(w) / (np.linalg.norm(g) + DECAY * np.linalg.norm(w)) * (g + DECAY * w)
    half = apply(trust, {"kernel": gradient}, {"kernel": weight})["kernel"]
    assert half.dtype == dtype
    np.testing.assert_array_equal(half, jnp.asarray(exact, dtype))
    single = apply(trust, {"kernel": gradient.astype(jnp.float32)}, {"kernel": weight})["kernel"]
    np.testing.assert_allclose(single, exact, rtol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_holds_the_momentum_and_a_counter_and_nothing_else(momentum):
    params = as_tree(start())
    _, state = run(build(RATES, momentum=momentum), params, [as_tree(gradients_of(0))])
    leaves = jax.tree.leaves(state)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    buffers = [leaf.shape for leaf in jax.tree.leaves(params)] if momentum else []
    assert sorted(leaf.shape for leaf in leaves) == sorted([(), *buffers])
