from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdl.config import ParallelConfig, PrecisionConfig
from jaxdl.models import ResNet
from jaxdl.parallel.mesh import make_mesh
from jaxdl.precision import init_loss_scale
from jaxdl.train.state import init_state
from jaxdl.train.step import TrainStep
from jaxdl.train.task import Classification, Task
from tests.parallel.plans import jit_plan


@dataclass(frozen=True)
class Weighted(Task):
    """Least squares in which every example carries its own weight."""

    def init(self, key):
        return {"kernel": jax.random.normal(key, (4, 1)), "bias": jnp.zeros(1)}, {"seen": jnp.float32(0)}

    def loss(self, params, model_state, batch, keys):
        error = (batch["x"] @ params["kernel"])[:, 0] + params["bias"][0] - batch["y"]
        seen = {"seen": model_state["seen"] + jnp.float32(error.size)}
        return jnp.sum(batch["weight"] * error**2), jnp.sum(batch["weight"]), seen


def examples(count=24, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.normal(size=(count, 4)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=count), jnp.float32),
        "weight": jnp.asarray(rng.integers(1, 9, count), jnp.float32),
    }


def images(count=16, size=8, classes=5, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "image": jnp.asarray(rng.integers(0, 256, (count, size, size, 3)), jnp.uint8),
        "label": jnp.asarray(rng.integers(0, classes, count), jnp.int32),
    }


def classification(**settings):
    model = ResNet((1, 1), bottleneck=True, num_classes=5, width=8, stem="small")
    return Classification(model=model, image_size=8, mean=(0.5,) * 3, std=(0.25,) * 3, **settings)


SCHEDULE = optax.constant_schedule(0.1)
SGD = optax.sgd(SCHEDULE, momentum=0.9)


def assert_bitwise(left, right):
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def gradients_of(task, state, batch, accumulate=1):
    keys = jax.random.split(jax.random.key(0), 24)
    return TrainStep(task, SGD, SCHEDULE, seed=0, accumulate=accumulate).mean_gradients(state, batch, keys)


@pytest.mark.parametrize("accumulate", [2, 3, 8])
def test_micro_batches_of_unequal_weight_give_the_gradient_of_the_whole(accumulate):
    task, batch = Weighted(), examples()
    state = init_state(task, SGD, seed=0, keep_average=False)
    whole, whole_loss, _ = gradients_of(task, state, batch)
    parts, parts_loss, model_state = gradients_of(task, state, batch, accumulate)
    np.testing.assert_allclose(parts_loss, whole_loss, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert float(model_state["seen"]) == 24


def test_a_batch_without_weight_gives_loss_and_gradient_zero():
    task, batch = Weighted(), examples() | {"weight": jnp.zeros(24)}
    state = init_state(task, SGD, seed=0, keep_average=False)
    gradients, loss, _ = gradients_of(task, state, batch)
    assert float(loss) == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradients))


SCALED = PrecisionConfig(loss_scale="dynamic", scale_start=4.0)


def scaled_state(task, optimizer, *, keep_average=False):
    scale = init_loss_scale(SCALED)
    return init_state(task, optimizer, seed=0, keep_average=keep_average, loss_scale=scale)


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_an_update_that_is_not_finite_changes_nothing_but_the_scale(ema_decay):
    task = Weighted()
    step = jax.jit(TrainStep(task, SGD, SCHEDULE, seed=0, ema_decay=ema_decay, precision=SCALED))
    state, _ = step(scaled_state(task, SGD, keep_average=ema_decay is not None), examples())
    bad = examples(seed=1)
    bad["x"] = bad["x"].at[5, 2].set(jnp.inf)
    after, metrics = step(state, bad)
    assert not np.all(metrics["finite"])
    assert_bitwise(replace(after, loss_scale=None), replace(state, loss_scale=None))
    assert float(after.loss_scale.scale) == 2
    moved, metrics = step(after, examples(seed=2))
    assert np.all(metrics["finite"])
    assert int(moved.step) == 2


def test_overflowing_parameters_are_refused_although_gradients_are_finite():
    task, batch, huge = Weighted(), examples(), optax.sgd(3e38)
    batch["y"] = batch["y"] + 10
    state = scaled_state(task, huge)
    after, metrics = TrainStep(task, huge, SCHEDULE, seed=0, precision=SCALED)(state, batch)
    assert np.isfinite(metrics["gradient_norm"])
    assert not np.all(metrics["finite"])
    assert_bitwise(replace(after, loss_scale=None), replace(state, loss_scale=None))

    # Without a scale nothing is held back, but it is told of, which ends the run.
    _, metrics = TrainStep(task, huge, SCHEDULE, seed=0)(replace(state, loss_scale=None), batch)
    assert not np.all(metrics["finite"])


def test_averages_are_ramped_and_include_the_statistics():
    task = Weighted()
    step = jax.jit(TrainStep(task, SGD, SCHEDULE, seed=0, ema_decay=0.9999))
    state = init_state(task, SGD, seed=0, keep_average=True)
    expected, seen = np.asarray(state.params["kernel"], np.float64), 0.0
    for update in range(5):
        state, _ = step(state, examples(seed=update))
        decay = min(0.9999, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * np.asarray(state.params["kernel"], np.float64)
        seen = decay * seen + (1 - decay) * float(state.model_state["seen"])
    params, model_state = state.evaluated
    np.testing.assert_allclose(params["kernel"], expected, rtol=1e-5)
    np.testing.assert_allclose(model_state["seen"], seen, rtol=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_eight_devices_give_the_numbers_of_one(accumulate):
    task, batch = classification(label_smoothing=0.1), images()
    step = TrainStep(task, SGD, SCHEDULE, seed=0, accumulate=accumulate)
    results = []
    for devices in (1, 8):
        plan = jit_plan(make_mesh(ParallelConfig(data=devices), batch_size=16, accumulate=accumulate))
        state = plan.compile_init(lambda: init_state(task, SGD, seed=0, keep_average=False))()
        compiled = plan.compile_train(step, state, batch)
        state, metrics = compiled(state, plan.put(jax.device_get(batch)))
        results.append(jax.device_get((state.params, state.model_state, metrics["loss"])))
    for one, eight in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(eight, one, rtol=1e-5, atol=1e-5)


def test_the_state_is_donated():
    task, batch = classification(), images()
    plan = jit_plan(make_mesh(ParallelConfig(data=1), batch_size=16, accumulate=1))
    state = plan.compile_init(lambda: init_state(task, SGD, seed=0, keep_average=True))()
    step = TrainStep(task, SGD, SCHEDULE, seed=0, ema_decay=0.9)
    compiled = plan.compile_train(step, state, batch)
    compiled(state, plan.put(jax.device_get(batch)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_label_smoothing_is_the_mean_over_all_classes():
    task, batch = classification(label_smoothing=0.2), images()
    params, statistics = jax.jit(task.init)(jax.random.key(0))
    loss, weight, _ = task.loss(params, statistics, batch, jax.random.key(0))
    plain, _, _ = classification().loss(params, statistics, batch, jax.random.key(0))
    logits, _ = task.model.apply(
        {"params": params, "batch_stats": statistics},
        (jnp.float32(batch["image"]) / 255 - 0.5) / 0.25,
        train=True,
        mutable=["batch_stats"],
    )
    uniform = -jnp.sum(jax.nn.log_softmax(logits)) / 5
    np.testing.assert_allclose(loss, 0.8 * plain + 0.2 * uniform, rtol=1e-5)
    assert float(weight) == 16


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_network_that_cannot_tell_classes_apart_is_not_right(value):
    task, batch = classification(), images()
    params, statistics = jax.jit(task.init)(jax.random.key(0))
    blank = jax.tree.map(lambda leaf: jnp.full_like(leaf, value), params)
    metrics = jax.jit(task.evaluate)(blank, statistics, batch)
    assert not np.any(metrics["accuracy"])


FP16 = PrecisionConfig(policy="fp16", scale_window=3)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_bad_micro_batch_on_one_device_skips_the_update_and_halves_the_scale_once(accumulate):
    task = classification()
    step = TrainStep(task, SGD, SCHEDULE, seed=0, accumulate=accumulate, ema_decay=0.9, precision=FP16)
    plan = jit_plan(make_mesh(ParallelConfig(), batch_size=32, accumulate=accumulate))
    state = plan.compile_init(
        lambda: init_state(task, SGD, seed=0, keep_average=True, loss_scale=init_loss_scale(FP16))
    )()
    good = jax.device_get(images(count=32))
    good["image"] = good["image"].astype(np.float32)
    bad = good | {"image": good["image"].copy()}
    bad["image"][13, 2, 3] = np.inf
    compiled = plan.compile_train(step, state, good)

    state, _ = compiled(state, plan.put(good))
    before = jax.device_get(state)
    state, metrics = compiled(state, plan.put(bad))
    after = jax.device_get(state)
    assert not np.all(metrics["finite"])
    assert_bitwise(replace(after, loss_scale=None), replace(before, loss_scale=None))
    assert after.loss_scale.scale == before.loss_scale.scale / 2
    assert (int(metrics["skipped_updates"]), int(metrics["skipped_in_a_row"])) == (1, 1)
    for shard in state.params["head"]["kernel"].addressable_shards:
        assert_bitwise(shard.data, before.params["head"]["kernel"])

    state, metrics = compiled(state, plan.put(good))
    assert np.all(metrics["finite"])
    assert (int(state.step), int(metrics["skipped_updates"]), int(metrics["skipped_in_a_row"])) == (2, 1, 0)


def test_the_scale_leaves_no_trace_in_float32_gradients():
    task, batch = Weighted(), examples()
    scaled = PrecisionConfig(loss_scale="65536")
    state = init_state(task, SGD, seed=0, keep_average=False)
    with_scale = replace(state, loss_scale=init_loss_scale(scaled))
    plain, loss, _ = gradients_of(task, state, batch)
    unscaled, scaled_loss, _ = gradients_of(task, with_scale, batch)
    assert_bitwise(unscaled, plain)
    assert_bitwise(scaled_loss, loss)


def test_master_weights_add_up_updates_that_bfloat16_loses():
    @dataclass(frozen=True)
    class Constant(Task):
        dtype: object

        def init(self, key):
            return {"kernel": jnp.ones((), self.dtype)}, {}

        def loss(self, params, model_state, batch, keys):
            return params["kernel"].astype(jnp.float32), jnp.float32(1), {}

    ends = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        optimizer = optax.sgd(6e-4)
        step = jax.jit(TrainStep(Constant(dtype), optimizer, SCHEDULE, seed=0))
        state = init_state(Constant(dtype), optimizer, seed=0, keep_average=False)
        for _ in range(100):
            state, _ = step(state, {"x": jnp.zeros(1)})
        ends[dtype] = float(state.params["kernel"])
    assert ends[jnp.float32] == pytest.approx(0.94, abs=1e-4)
    assert ends[jnp.bfloat16] == 1.0
