import numpy as np
import pytest

from jaxdl.config import OptimizerConfig
from jaxdl.errors import ConfigError
from jaxdl.optim.schedules import build_schedule, peak_learning_rate


def rates(
    count: int, updates: int, per_epoch: float, batch_size: int = 256, **settings: object
) -> np.ndarray:
    config = OptimizerConfig(**settings)
    schedule = build_schedule(config, batch_size=batch_size, updates=updates, updates_per_epoch=per_epoch)
    return np.array([float(schedule(step)) for step in range(count)])


def test_learning_rate_follows_the_batch_only_when_asked():
    assert peak_learning_rate(OptimizerConfig(learning_rate=0.1), 1024) == pytest.approx(0.4)
    assert peak_learning_rate(OptimizerConfig(learning_rate=0.1, scale_with_batch=False), 1024) == 0.1


@pytest.mark.parametrize("schedule", ["cosine", "step", "polynomial", "constant"])
def test_warmup_is_linear_and_reaches_the_peak_at_its_last_update(schedule):
    got = rates(11, 100, 10, learning_rate=1.0, schedule=schedule, warmup_epochs=1, step_epochs=(3, 6))
    np.testing.assert_allclose(got[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert got[10] == pytest.approx(1.0)


def test_cosine_falls_to_its_floor_and_stays_there():
    got = rates(200, 100, 10, learning_rate=1.0, schedule="cosine", warmup_epochs=0, end_factor=0.1)
    progress = np.minimum(np.arange(200) / 100, 1)
    np.testing.assert_allclose(got, 0.1 + 0.9 * (1 + np.cos(np.pi * progress)) / 2, rtol=1e-5)


def test_polynomial_falls_to_its_floor_and_stays_there():
    got = rates(200, 100, 10, learning_rate=2.0, schedule="polynomial", warmup_epochs=0, polynomial_power=2)
    np.testing.assert_allclose(got, 2 * (1 - np.minimum(np.arange(200) / 100, 1)) ** 2, atol=1e-6)


def test_step_schedule_drops_at_the_epochs_it_names():
    got = rates(100, 100, 10, learning_rate=1.0, schedule="step", warmup_epochs=1, step_epochs=(3, 6, 8))
    expected = np.repeat([1.0, 0.1, 0.01, 0.001], [20, 30, 20, 20])
    np.testing.assert_allclose(got[10:], expected, rtol=1e-5)


def test_warmup_of_one_update_starts_at_the_peak():
    assert rates(1, 10, 1, learning_rate=1.0, warmup_epochs=1)[0] == pytest.approx(1.0)


@pytest.mark.parametrize("warmup", [10.0, 20.0])
def test_warmup_that_leaves_no_update_is_refused(warmup):
    with pytest.raises(ConfigError, match=r"warmup_epochs.*100"):
        rates(1, 100, 10, warmup_epochs=warmup)


def test_drop_within_the_warmup_is_refused():
    with pytest.raises(ConfigError, match="step_epochs"):
        rates(1, 100, 10, schedule="step", warmup_epochs=5, step_epochs=(3, 6))
