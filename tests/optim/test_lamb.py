"""LAMB against the paper and the MLPerf reference, written out in NumPy and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdl.config import OptimizerConfig
from jaxdl.optim.build import build_optimizer
from jaxdl.optim.lamb import layer_norms, scale_by_trust_ratio
from jaxdl.optim.masks import decay_mask

STEPS = 20
RATES = 0.02 * np.minimum(np.arange(1, STEPS + 1) / 5, 1) * (1 - np.arange(STEPS) / STEPS)
CLIP, DECAY = 1.0, 0.05
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
    size = 0.02 if step % 3 == 0 else 2.0
    return {
        name: size * random.normal(size=value.shape) * (name != "still") for name, value in start().items()
    }


def lamb(weights: dict, gradients: list[dict], b1: float = 0.9, b2: float = 0.999, eps: float = 1e-6) -> dict:
    first = {name: np.zeros_like(value) for name, value in weights.items()}
    second = {name: np.zeros_like(value) for name, value in weights.items()}
    for t, (rate, gradient) in enumerate(zip(RATES, gradients, strict=True), 1):
        norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
        next_weights = {}
        for name, weight in weights.items():
            g = gradient[name] / max(norm / CLIP, 1)
            first[name] = b1 * first[name] + (1 - b1) * g
            second[name] = b2 * second[name] + (1 - b2) * g**2
            step = first[name] / (1 - b1**t) / (np.sqrt(second[name] / (1 - b2**t)) + eps)
            ratio = 1.0
            if name in ADAPTED:
                step = step + DECAY * weight
                norms = np.linalg.norm(weight), np.linalg.norm(step)
                if all(norms):
                    ratio = norms[0] / norms[1]
            next_weights[name] = weight - rate * ratio * step
        weights = next_weights
    return weights


def build(layer_axes=lambda path: 0, **settings):
    config = OptimizerConfig(name="lamb", **settings)
    return build_optimizer(
        config, lambda count: jnp.asarray(RATES, jnp.float32)[count], layer_axes=layer_axes
    )


def run(optimizer, params, gradients):
    # optax's Adam raises a float to its int32 count, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        update = jax.jit(optimizer.update)
        state = optimizer.init(params)
        for gradient in gradients:
            updates, state = update(gradient, state, params)
            params = optax.apply_updates(params, updates)
    return params, state


@pytest.fixture
def trust():
    return scale_by_trust_ratio(decay_mask)


def apply(transformation, updates, params):
    return transformation.update(updates, transformation.init(params), params)[0]


def test_twenty_steps_equal_the_definition():
    gradients = [gradients_of(step) for step in range(STEPS)]
    norms = [np.sqrt(sum(np.sum(g**2) for g in gradient.values())) for gradient in gradients]
    assert min(norms) < CLIP < max(norms)
    got, _ = run(build(clip_norm=CLIP, weight_decay=DECAY), as_tree(start()), map(as_tree, gradients))
    expected = lamb(start(), gradients)
    for path, name in jax.tree_util.tree_leaves_with_path(TREE):
        leaf = got[path[0].key][path[1].key]
        # Not relative: Adam's correction 1 - 0.999 is 1e-5 off in float32, which the tiny `zero` shows.
        np.testing.assert_allclose(leaf, expected[name], rtol=0, atol=1e-6, err_msg=name)
        assert np.abs(expected[name] - start()[name]).max() > 1e-3, f"{name} hardly moves: no test"


def test_without_decay_kernels_are_still_adapted():
    params = {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.full(2, 3.0)}
    got, _ = run(build(weight_decay=0), params, [jax.tree.map(jnp.ones_like, params)])
    # Adam's first step has elements 1.
    np.testing.assert_allclose(got["kernel"], 3 - RATES[0] * 3, rtol=1e-6)
    np.testing.assert_allclose(got["bias"], 3 - RATES[0], rtol=1e-6)


@pytest.mark.parametrize(("weight", "update"), [(0.0, 2.0), (2.0, 0.0), (0.0, 0.0)])
def test_ratio_is_one_where_a_norm_is_zero(trust, weight, update):
    got = apply(trust, {"kernel": jnp.full((2, 3), update)}, {"kernel": jnp.full((2, 3), weight)})
    np.testing.assert_array_equal(got["kernel"], update)


def whole(*shape: int, seed: int) -> np.ndarray:
    """Small whole numbers: their squares add up without rounding, so that equal means bitwise equal."""
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


def test_stacked_layers_get_exactly_the_ratios_of_the_single_layers(trust):
    params = {name: whole(3, 4, 5, seed=seed) for seed, name in enumerate(("kernel", "bias"))}
    updates = {name: whole(3, 4, 5, seed=9 + seed) for seed, name in enumerate(("kernel", "bias"))}
    # One layer at zero, and one without update.
    params["kernel"][1] = 0
    updates["kernel"][2] = 0
    layers = [
        apply(trust, *jax.tree.map(lambda leaf, layer=layer: jnp.asarray(leaf[layer]), (updates, params)))
        for layer in range(3)
    ]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    stacked = scale_by_trust_ratio(decay_mask, lambda path: int("layers" in path.split("/")))
    tree = jax.tree.map(jnp.asarray, {"layers": params, "head": params})
    steps = jax.tree.map(jnp.asarray, {"layers": updates, "head": updates})
    got = apply(stacked, steps, tree)
    jax.tree.map(np.testing.assert_array_equal, got["layers"], expected)
    # What is not a stack of layers keeps one ratio.
    jax.tree.map(np.testing.assert_array_equal, got["head"], apply(trust, steps["head"], tree["head"]))
    assert np.abs(got["head"]["kernel"] - got["layers"]["kernel"]).max() > 0.1


def test_build_hands_the_layer_axes_on():
    params = {"layers": {"kernel": jnp.asarray(whole(2, 3, 3, seed=1))}}
    gradients = [{"layers": {"kernel": jnp.asarray(whole(2, 3, 3, seed=seed))}} for seed in (2, 3)]
    together, _ = run(build(lambda path: 1, weight_decay=DECAY), params, gradients)
    for layer in range(2):
        alone, _ = run(
            build(weight_decay=DECAY),
            *jax.tree.map(lambda leaf, layer=layer: leaf[layer], (params, gradients)),
        )
        np.testing.assert_allclose(together["layers"]["kernel"][layer], alone["layers"]["kernel"], rtol=1e-6)


def test_layers_must_be_counted_by_axes_that_exist():
    with pytest.raises(ValueError, match=r"2 axes .* shape \(3,\)"):
        layer_norms(jnp.ones(3), 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_norms_are_float32_whatever_the_parameters_are_stored_in(trust, dtype):
    # The square of 300 is no float16; 1 + 1/128 squared is no bfloat16.
    weight = jnp.asarray([[300.0, 1.0078125, 0.001]], dtype)
    update = jnp.asarray([[0.5, -300.0, 0.3]], dtype)
    exact_weight, exact_update = np.asarray(weight, np.float64), np.asarray(update, np.float64)
    exact = exact_update * np.linalg.norm(exact_weight) / np.linalg.norm(exact_update)
    half = apply(trust, {"kernel": update}, {"kernel": weight})["kernel"]
    assert half.dtype == dtype
    np.testing.assert_array_equal(half, jnp.asarray(exact, dtype))
    single = apply(trust, {"kernel": update.astype(jnp.float32)}, {"kernel": weight})["kernel"]
    np.testing.assert_allclose(single, exact, rtol=1e-6)


def test_state_holds_two_moments_and_two_counters_and_nothing_else():
    params = as_tree(start())
    _, state = run(build(clip_norm=CLIP), params, [as_tree(gradients_of(0))])
    leaves = jax.tree.leaves(state)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    shapes = sorted(leaf.shape for leaf in leaves)
    assert shapes == sorted([(), ()] + 2 * [leaf.shape for leaf in jax.tree.leaves(params)])
