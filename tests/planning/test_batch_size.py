import resource
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxdl.config import ImageConfig, ImageDataConfig, MemoryConfig, ParallelConfig, TrainConfig
from jaxdl.data.images.sources import open_source
from jaxdl.errors import ConfigError
from jaxdl.planning.batch_size import fitting_accumulation, largest, need, plan_batch_size, try_step
from jaxdl.planning.isolated import in_own_process
from jaxdl.train.task import Task

MIB = 2**20


@dataclass(frozen=True)
class Hungry(Task):
    """A model that takes memory in proportion to the batch: a sorted copy of its parameters an example."""

    width: int = MIB // 4

    def init(self, key):
        return {"kernel": jax.random.normal(key, (self.width,))}, {}

    def axes(self):
        return None

    def loss(self, params, model_state, batch, key):
        size = batch["image"].shape[0]
        shift = batch["label"][:, None].astype(jnp.float32)
        ordered = jnp.sort(jnp.broadcast_to(params["kernel"], (size, self.width)) * (shift + 1), axis=1)
        return jnp.sum(ordered**2), jnp.float32(size), model_state

    def evaluate(self, params, model_state, batch):
        raise NotImplementedError


def config(batch=16, accumulate=1, devices=1, **data):
    return ImageConfig(
        data=ImageDataConfig(
            name="synthetic", synthetic_classes=2, image_size=8, batch_size=batch, workers=0, **data
        ),
        memory=MemoryConfig(accumulate=accumulate),
        parallel=ParallelConfig(data=devices),
        train=TrainConfig(epochs=1),
    )


def plan(settings, limit, capacity, task=None):
    source, said = open_source(settings.data, "train"), []
    task = task or Hungry()
    found = plan_batch_size(settings, task, source, limit=limit, capacity=capacity, say=said.append)
    assert len(said) == len(found.needs)
    return found


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 31, 32, 1000])
def test_the_search_finds_the_boundary_from_everywhere_and_asks_no_size_twice(start, limit):
    candidates, asked = [1, 2, 4, 8, 16, 32], []

    def fits(size):
        asked.append(size)
        return size <= limit

    fitting = [size for size in candidates if size <= limit]
    assert largest(candidates, fits, start) == (fitting[-1] if fitting else None)
    assert len(set(asked)) == len(asked)
    # Never further into what does not fit than one doubling past the start.
    assert max(asked) <= max(2 * max(fitting, default=0), candidates[start])


@pytest.fixture(scope="module")
def per_example():
    """Bytes that one example more costs."""
    settings = config()
    source = open_source(settings.data, "train")
    sizes = [
        need(settings, Hungry(), source, batch=batch, accumulate=1, usable=0).needed for batch in (8, 16)
    ]
    return (sizes[1] - sizes[0]) / 8


def test_memory_grows_by_what_an_example_needs(per_example):
    # The values to sort, or their order for the gradient, and the sorted ones.
    assert MIB <= per_example <= 8 * MIB


@pytest.mark.parametrize("configured", [4, 24, 64])
def test_the_answer_is_the_largest_power_of_two_within_the_margin(per_example, configured):
    found = plan(config(configured), limit=64, capacity=round(20 * per_example / 0.9) + 10 * MIB)
    assert found.best == 16
    assert found.usable == round(found.capacity * 0.9)
    assert found.configured.batch == configured
    assert [item.batch for item in found.needs] == sorted(item.batch for item in found.needs)
    for item in found.needs:
        assert item.fits == (item.needed <= found.usable) == (item.batch <= 16)


def test_devices_share_the_batch_and_each_needs_its_part(per_example):
    found = plan(config(16, devices=4), limit=256, capacity=round(20 * per_example / 0.9) + 10 * MIB)
    assert found.devices == 4
    assert found.best == 64


def test_the_limit_ends_the_search_and_nothing_may_fit():
    found = plan(config(16), limit=16, capacity=2**40)
    assert found.best == 16 == found.candidates[-1]
    found = plan(config(4), limit=16, capacity=MIB)
    assert found.best is None
    assert [item.batch for item in found.needs] == [1, 2, 4]
    with pytest.raises(ConfigError, match="take 8 or more"):
        plan(config(8, accumulate=2, devices=4), limit=7, capacity=2**40)


def test_the_schedule_of_a_short_run_forbids_no_batch():
    """Five epochs of warm-up in one epoch are refused in a run, but change nothing about memory."""
    found = plan(config(16, synthetic_examples=20), limit=32, capacity=2**40)
    assert found.best == 32


def test_micro_batches_make_the_configured_batch_fit(per_example):
    settings = config(48)
    usable = round(20 * per_example) + 10 * MIB
    found = fitting_accumulation(
        settings, Hungry(), open_source(settings.data, "train"), micro_batch=16, usable=usable, say=print
    )
    assert (found.batch, found.accumulate, found.fits) == (48, 3, True)
    prime = config(47)
    none = fitting_accumulation(
        prime, Hungry(), open_source(prime.data, "train"), micro_batch=16, usable=MIB, say=print
    )
    assert none is None


def try_within(settings, task, batch, headroom):
    """A trial in a process whose address space may grow by so much and no more."""
    jax.config.update("jax_platforms", "cpu")
    jax.devices()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + headroom, size + headroom))
    return try_step(settings, task, open_source(settings.data, "train"), batch)


@pytest.mark.slow
def test_a_real_step_shows_what_does_not_fit():
    settings, task = config(), Hungry(MIB)
    done = in_own_process(try_within, settings, task, 4, 8 * 2**30)
    assert done.fits
    assert done.peak > 4 * 4 * MIB
    refused = in_own_process(try_within, settings, task, 4096, 8 * 2**30)
    assert not refused.fits
    assert "RESOURCE_EXHAUSTED" in refused.reason


def test_a_trial_makes_one_update_of_the_given_size():
    settings = replace(config(), data=replace(config().data, synthetic_examples=5))
    trial = try_step(settings, Hungry(), open_source(settings.data, "train"), 8)
    assert (trial.batch, trial.fits, trial.reason) == (8, True, None)
