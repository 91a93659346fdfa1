import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.config import (
    ImageConfig,
    ImageDataConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from jaxdl.data.images.batches import train_batches
from jaxdl.data.images.sources import open_source
from jaxdl.train.finders import range_program, range_test, smoothed, smoothing_over, suggest
from jaxdl.train.program import prepare
from jaxdl.train.task import Task

FIRST, LAST = 1e-6, 10.0


def geometric(updates, first=FIRST, last=LAST):
    return first * (last / first) ** (np.arange(updates) / (updates - 1))


def descent(curvature, noise=0.0, seed=0, updates=100, **metrics):
    """Gradient descent on a parabola, with noise in the loss it reports; the state is (update, weight)."""
    rates, rng = geometric(updates), np.random.default_rng(seed)

    def step(state, batch):
        update, weight = state
        loss = 0.05 + weight**2 / 2 + noise * rng.normal()
        seen = {"learning_rate": rates[min(update, updates - 1)], "loss": loss, "finite": np.isfinite(loss)}
        return (update + 1, weight * (1 - rates[min(update, updates - 1)] * curvature)), seen | metrics

    return step


def curve(*arguments, updates=100, **keywords):
    step = descent(*arguments, updates=updates, **keywords)
    found = range_test(step, (0, 1.0), itertools.count(), updates=updates, smoothing=smoothing_over(updates))
    return zip(*found, strict=True)


@pytest.mark.parametrize("curvature", [0.3, 1, 10, 1e3, 1e4])
@pytest.mark.parametrize(("noise", "seeds"), [(0.0, 1), (0.02, 10), (0.1, 10)])
def test_the_suggestion_is_in_the_decade_below_the_limit_of_stability(curvature, noise, seeds):
    """The parabola is stable up to 2 / curvature, so the weight is gone before the rate gets there."""
    for seed in range(seeds):
        suggestion = suggest(*curve(curvature, noise, seed))
        assert suggestion.reason is None
        assert 0.05 <= suggestion.steepest * curvature <= 0.6
        assert suggestion.minimum_tenth == suggestion.minimum / 10
        assert suggestion.steepest < suggestion.minimum


@pytest.mark.parametrize("updates", [30, 100, 400])
def test_the_length_of_the_test_hardly_moves_the_minimum(updates):
    suggestion = suggest(*curve(1e3, updates=updates), smoothing_over(updates))
    assert 5e-3 <= suggestion.minimum <= 2e-2


def test_it_ends_soon_after_the_loss_blows_up():
    rates, losses = curve(1e3)
    averages = smoothed(losses)
    assert averages[-1] > 4 * averages.min()
    assert np.all(averages[:-1] <= 4 * np.minimum.accumulate(averages)[:-1])
    assert 2e-3 < rates[-1] < 0.1


def test_the_average_is_corrected_for_its_start():
    np.testing.assert_allclose(smoothed([3.0] * 20), 3)
    np.testing.assert_allclose(smoothed([1.0, 2.0]), [1, (0.09 * 1 + 0.1 * 2) / 0.19])


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (np.linspace(2, 9, 100), "does not clearly fall"),
        (2 + np.geomspace(1e-6, 5, 100), "does not clearly fall"),
        (np.full(100, 2.3), "end the range at a larger rate"),
        (np.linspace(2, 1, 6), "only 6 updates"),
        ([], "only 0 updates"),
    ],
)
def test_a_curve_that_tells_nothing_gets_a_reason_and_no_number(losses, words):
    suggestion = suggest(geometric(100)[: len(losses)], losses)
    assert suggestion.steepest is suggestion.minimum is suggestion.minimum_tenth is None
    assert words in suggestion.reason


def test_noise_is_not_taken_for_a_descent():
    found = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        found += suggest(geometric(100), 2.3 + 0.1 * rng.normal(size=100)).steepest is not None
    assert found <= 5


def test_a_loss_that_is_not_finite_ends_it():
    def step(state, batch):
        loss = 2.0 if batch < 12 else float("nan")
        return state, {"learning_rate": batch + 1.0, "loss": loss, "finite": np.array([True, loss == 2.0])}

    assert range_test(step, None, itertools.count(), updates=50) == [(i + 1.0, 2.0) for i in range(12)]


def test_updates_that_the_loss_scale_skips_are_made_up_for_unless_there_is_no_end_to_them():
    def step(state, batch):
        fine = batch % 3 == 0 and batch < 30
        metrics = {"learning_rate": state + 1.0, "loss": 2.0, "finite": fine, "loss_scale": 1.0}
        return state + fine, metrics

    made = range_test(step, 0, itertools.count(), updates=5, max_skipped=4)
    assert made == [(i + 1.0, 2.0) for i in range(5)]
    assert len(range_test(step, 0, itertools.count(), updates=50, max_skipped=4)) == 10
    assert len(range_test(step, 0, itertools.count(), updates=50, max_skipped=2)) == 1


@dataclass(frozen=True)
class Linear(Task):
    """A linear classifier of the digits' pixels."""

    def init(self, key):
        return {"kernel": 0.01 * jax.random.normal(key, (192, 10))}, {}

    def axes(self):
        return None

    def loss(self, params, model_state, batch, key):
        pixels = batch["image"].reshape(-1, 192).astype(jnp.float32) / 255
        scores = jax.nn.log_softmax(pixels @ params["kernel"])
        losses = -jnp.take_along_axis(scores, batch["label"][:, None], axis=-1)
        return losses.sum(), jnp.float32(losses.size), model_state

    def evaluate(self, params, model_state, batch):
        raise NotImplementedError


CONFIG = ImageConfig(
    data=ImageDataConfig(name="digits", image_size=8, batch_size=64, workers=0),
    optimizer=OptimizerConfig(name="adamw", learning_rate=0.3, warmup_epochs=0),
    parallel=ParallelConfig(data=2),
    train=TrainConfig(steps=5),
)


def losses_of(config, program, count):
    """Rates and losses of the first updates of a real run."""
    source = open_source(config.data, "train")
    batches = train_batches(source, config.data, seed=config.seed)
    first = next(batches)
    step = program.plan.compile_train(program.train_step, program.state, first)
    state = program.plan.compile_init(program.init)()
    return range_test(
        lambda state, batch: step(state, program.plan.put(batch)),
        state,
        itertools.chain([first], batches),
        updates=count,
    )


@pytest.fixture
def optax_promotes():
    """optax's Adam raises a float to its int32 count, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("optax_promotes")
@pytest.mark.parametrize(("optimizer", "precision"), [("adamw", "fp32"), ("lars", "fp32"), ("sgd", "fp16")])
def test_the_real_step_runs_from_the_runs_own_start_with_growing_rates(optimizer, precision):
    config = replace(
        CONFIG,
        optimizer=replace(CONFIG.optimizer, name=optimizer),
        precision=PrecisionConfig(policy=precision),
    )
    examples = len(open_source(config.data, "train"))
    program = range_program(config, Linear(), examples, first=1e-4, last=1.0, updates=20)
    rates, losses = zip(*losses_of(config, program, 20), strict=True)
    np.testing.assert_allclose(rates, geometric(20, 1e-4, 1.0), rtol=1e-5)
    own = losses_of(config, prepare(config, Linear(), examples), 2)
    # Same values, same batch: the loss of the first update is that of the run, bit for bit.
    assert losses[0] == own[0][1]
    assert losses[1] != own[1][1]
    again = range_program(config, Linear(), examples, first=1e-4, last=1.0, updates=20)
    assert losses_of(config, again, 20) == list(zip(rates, losses, strict=True))


def test_the_configured_schedule_cannot_stand_in_the_way():
    config = replace(CONFIG, optimizer=replace(CONFIG.optimizer, warmup_epochs=50.0))
    assert range_program(config, Linear(), 1437, first=1e-4, last=1.0, updates=20).updates == 20


def test_a_linear_classifier_of_the_digits_gets_a_rate_that_trains_it():
    """Softmax regression: stable to about 2 / (a quarter of the largest eigenvalue of the mean x x')."""
    config = replace(CONFIG, optimizer=OptimizerConfig(name="sgd", momentum=0.0, weight_decay=0.0))
    examples = len(open_source(config.data, "train"))
    program = range_program(config, Linear(), examples, first=1e-5, last=100.0, updates=100)
    suggestion = suggest(*zip(*losses_of(config, program, 100), strict=True))
    assert suggestion.reason is None
    assert 0.003 < suggestion.steepest < 0.5
