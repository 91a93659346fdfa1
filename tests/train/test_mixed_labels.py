"""Examples of two labels, as mixup and CutMix make them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxdl.commandline import parse
from jaxdl.config import ImageConfig
from jaxdl.train.program import prepare
from jaxdl.train.task import Classification
from tests.conftest import ROOT

CLASSES, SIZE = 5, 8


class Linear(nn.Module):
    @nn.compact
    def __call__(self, images, train):
        return nn.Dense(CLASSES)(images.reshape(images.shape[0], -1))


def task(**options):
    return Classification(Linear(), SIZE, (0.5,) * 3, (0.2,) * 3, **options)


def batch(examples=16, *, mixed=True):
    rng = np.random.default_rng(0)
    made = {
        "image": rng.integers(256, size=(examples, SIZE, SIZE, 3), dtype=np.uint8),
        "label": rng.integers(CLASSES, size=examples).astype(np.int32),
    }
    if mixed:
        made["other"] = rng.integers(CLASSES, size=examples).astype(np.int32)
        made["share"] = rng.random(examples).astype(np.float32)
    return made


def loss(task, batch):
    params, state = task.init(jax.random.key(0))
    total, weight, _ = task.loss(
        params, state, batch, jax.random.split(jax.random.key(1), len(batch["label"]))
    )
    assert weight == len(batch["label"])
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_of_both_by_share(smoothing):
    mixed, made = task(mixed=True, label_smoothing=smoothing), batch()
    got = loss(mixed, made)
    expected = 0.0
    for row in range(16):
        one = {name: column[row : row + 1] for name, column in made.items()}
        plain = task(label_smoothing=smoothing)
        first = loss(plain, {"image": one["image"], "label": one["label"]})
        second = loss(plain, {"image": one["image"], "label": one["other"]})
        expected += made["share"][row] * first + (1 - made["share"][row]) * second
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_whole_share_is_the_plain_loss():
    made = batch()
    made["share"] = np.ones_like(made["share"])
    plain = {name: made[name] for name in ("image", "label")}
    np.testing.assert_allclose(loss(task(mixed=True), made), loss(task(), plain), rtol=1e-6)


@pytest.mark.parametrize(
    "flags",
    [
        ("--parallel.data", 8),
        ("--parallel.backend", "pmap"),
        ("--memory.accumulate", 2, "--parallel.data", 4),
    ],
)
def test_every_plan_takes_mixed_batches(flags):
    def step(*flags):
        config = parse(
            "",
            [
                "--config",
                str(ROOT / "configs/resnet50/test.yaml"),
                "--optimizer.schedule=constant",
                *map(str, flags),
            ],
            ImageConfig,
        )
        program = prepare(config, task(mixed=True), 64)
        made = batch()
        compiled = program.plan.compile_train(program.train_step, program.state, made)
        state, metrics = compiled(program.plan.compile_init(program.init)(), program.plan.put(made))
        return float(metrics["loss"]), jax.device_get(state.params)

    (expected, wanted), (got, params) = step("--parallel.data", 1), step(*flags)
    assert got == pytest.approx(expected, rel=1e-5)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), params, wanted
    )


def test_the_shapes_of_a_batch_say_so():
    shapes = task(mixed=True).example(4)
    assert (shapes["other"].dtype, shapes["share"].dtype) == (jnp.int32, jnp.float32)
    assert "other" not in task().example(4)
