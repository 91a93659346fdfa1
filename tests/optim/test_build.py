import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from pydantic import ValidationError

from jaxdl.commandline.schema import options
from jaxdl.config import EPSILON, Config, OptimizerConfig
from jaxdl.models import ResNet
from jaxdl.optim.build import build_optimizer
from jaxdl.optim.masks import decay_mask, leaf_names


@pytest.fixture(scope="module")
def params():
    model = ResNet((1, 1), bottleneck=True, num_classes=3, width=4, stem="small")
    variables = jax.jit(lambda: model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)), train=False))()
    return jax.tree.map(lambda leaf: leaf + 0.5, nn.unbox(variables)["params"])


def one_update(params, gradients, **settings):
    optimizer = build_optimizer(OptimizerConfig(**settings), optax.constant_schedule(0.1))
    # optax's Adam raises a float to its int32 count, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


@pytest.fixture(scope="module")
def scanned():
    layers = nn.scan(
        lambda layer, carry, _: (layer(carry), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
    )

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            return layers(nn.Dense(4, name="layers"), x, None)[0]

    params = jax.jit(lambda: Stack().init(jax.random.key(0), jnp.zeros((1, 4))))()["params"]
    assert params["layers"]["kernel"].shape == (3, 4, 4)
    return jax.tree.map(lambda leaf: leaf + 0.5, params)


# The share of a kernel that one step at rate 0.1 with decay 0.1 takes when there is no gradient. LAMB scales
# the decay to the kernel's own norm; LARS has ratio 1 without a gradient.
SHARES = {"sgd": 0.1 * 0.1, "adamw": 0.1 * 0.1, "lamb": 0.1, "lars": 0.1 * 0.1}


@pytest.mark.parametrize("tree", ["params", "scanned"])
@pytest.mark.parametrize("name", SHARES)
def test_weight_decay_shrinks_kernels_and_leaves_the_rest_bitwise(request, tree, name):
    params = request.getfixturevalue(tree)
    zeros = jax.tree.map(jnp.zeros_like, params)
    after = one_update(params, zeros, name=name, weight_decay=0.1)
    for path, before, now in zip(
        leaf_names(params), jax.tree.leaves(params), jax.tree.leaves(after), strict=True
    ):
        if path.endswith("kernel"):
            np.testing.assert_allclose(now, before * (1 - SHARES[name]), rtol=1e-5, err_msg=path)
        else:
            np.testing.assert_array_equal(now, before, err_msg=path)


@pytest.mark.parametrize("name", SHARES)
def test_kernel_at_zero_moves_and_everything_stays_finite(name):
    params = {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}
    after = one_update(params, jax.tree.map(jnp.ones_like, params), name=name, weight_decay=0.1)
    # A gradient of 1 is also Adam's first step.
    jax.tree.map(lambda now: np.testing.assert_allclose(now, -0.1, rtol=1e-5), after)


def test_decay_mask_refuses_a_tree_in_which_it_finds_nothing():
    with pytest.raises(ValueError, match="kernel"):
        decay_mask({"weight": jnp.ones(3)})


def test_sgd_equals_the_recipe_written_out():
    weight, rate, decay, momentum = 1.0, 0.1, 0.01, 0.9
    config = OptimizerConfig(name="sgd", momentum=momentum, weight_decay=decay)
    optimizer = build_optimizer(config, optax.constant_schedule(rate))
    params = {"kernel": jnp.float32(weight)}
    state, velocity = optimizer.init(params), 0.0
    for gradient in (0.3, -0.2, 0.5):
        updates, state = optimizer.update({"kernel": jnp.float32(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
        velocity = momentum * velocity + gradient + decay * weight
        weight -= rate * velocity
    assert float(params["kernel"]) == pytest.approx(weight, rel=1e-6)


def test_nesterov_looks_ahead():
    after = one_update(
        {"kernel": jnp.float32(1)}, {"kernel": jnp.float32(1)}, weight_decay=0, momentum=0.9, nesterov=True
    )
    assert float(after["kernel"]) == pytest.approx(1 - 0.1 * 1.9)


def test_clip_bounds_the_global_norm():
    params = {"a": {"kernel": jnp.zeros(2)}, "b": {"kernel": jnp.zeros(2)}}
    gradients = jax.tree.map(lambda leaf: leaf + 3.0, params)
    after = one_update(params, gradients, weight_decay=0, momentum=0, clip_norm=2.0)
    assert float(optax.tree.norm(after)) == pytest.approx(0.1 * 2.0, rel=1e-5)


@pytest.mark.parametrize(("name", "expected"), [("adamw", 1e-8), ("lamb", 1e-6)])
def test_epsilon_is_the_published_one_unless_given(name, expected):
    tiny = {"bias": jnp.float32(1e-7), "kernel": jnp.float32(1)}
    params = jax.tree.map(jnp.zeros_like, tiny)
    for settings, epsilon in (({}, expected), ({"epsilon": 1e-7}, 1e-7)):
        after = one_update(params, tiny, name=name, **settings)
        assert float(after["bias"]) == pytest.approx(-0.1 * 1e-7 / (1e-7 + epsilon), rel=1e-4)


def test_help_names_the_epsilons():
    words = options(Config)["optimizer.epsilon"]["description"]
    assert {name.lower(): float(value) for value, name in re.findall(r"(1e-\d+) for (\w+)", words)} == EPSILON


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_nesterov_belongs_to_sgd(name):
    with pytest.raises(ValidationError, match=f"optimizer.nesterov works .* sgd only, not with {name}"):
        OptimizerConfig(name=name, nesterov=True)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "lars"])
def test_clipping_and_decay_may_be_switched_on_in_a_resumed_run(name):
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    configs = [
        OptimizerConfig(name=name, clip_norm=clip, weight_decay=decay)
        for clip in (None, 1.0)
        for decay in (0.0, 0.1)
    ]
    states = [build_optimizer(config, lambda _: 0.1).init(params) for config in configs]
    paths = [[path for path, _ in jax.tree_util.tree_leaves_with_path(state)] for state in states]
    assert paths[0]
    assert all(other == paths[0] for other in paths)
