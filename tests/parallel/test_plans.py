"""Every plan gives the numbers of one device: initial values to the bit, losses and parameters to 1e-5."""

import functools

import jax
import numpy as np
import pytest

from tests.parallel.plans import configuration, sequential, trained

EITHER = {
    "data 8": {},
    "node 2 x data 4": {"node": 2},
    "fsdp 8": {"fsdp": 8},
    "zero1": {"zero1": True},
    "tensor 2": {"data": 1, "tensor": 2},
    "tensor 4": {"data": 1, "tensor": 4},
    "data 4 x tensor 2": {"tensor": 2},
    "data 2 x fsdp 2 x tensor 2": {"fsdp": 2, "tensor": 2},
    "gpipe 2": {"data": 1, "pipeline": 2, "schedule": "gpipe", "microbatches": 4},
    "gpipe 4": {"data": 1, "pipeline": 4, "schedule": "gpipe", "microbatches": 4},
    "1f1b 2": {"data": 1, "pipeline": 2, "schedule": "1f1b", "microbatches": 4},
    "1f1b 4": {"data": 1, "pipeline": 4, "schedule": "1f1b", "microbatches": 4},
    "1f1b 2 x data 2 x tensor 2": {"pipeline": 2, "tensor": 2, "microbatches": 4},
    "gpipe 2 x fsdp 2": {"data": 1, "fsdp": 2, "pipeline": 2, "schedule": "gpipe", "microbatches": 2},
    "pmap 8": {"backend": "pmap"},
    "shard_map 8": {"backend": "shard_map"},
}
ENCODER = {
    "data 2 x tensor 4, sequence": {"tensor": 4, "sequence": True},
    "circular 2": {"data": 1, "pipeline": 2, "schedule": "circular", "microbatches": 4},
    "circular 4 x data 2": {"pipeline": 4, "schedule": "circular", "microbatches": 4},
    "circular 2 x 2 x data 2": {
        "data": 2, "pipeline": 2, "schedule": "circular", "repeats": 2, "microbatches": 4
    },
    "circular 2 x data 2 x tensor 2": {"tensor": 2, "pipeline": 2, "schedule": "circular"},
    "circular 2 x fsdp 2 x tensor 2": {"fsdp": 2, "tensor": 2, "pipeline": 2, "schedule": "circular"},
}  # fmt: skip
RESNET = {
    "pmap 8, local": {"backend": "pmap", "batch_norm": "local"},
    "shard_map 8, local": {"backend": "shard_map", "batch_norm": "local"},
    "shard_map 8, 2 groups": {"backend": "shard_map", "batch_norm": "groups:2"},
    "data 8, 2 groups": {"batch_norm": "groups:2"},
    "data 8, 8 groups": {"batch_norm": "groups:8"},
}
CASES = [
    *(("encoder", plan) for plan in [*EITHER, *ENCODER]),
    *(("resnet", plan) for plan in [*EITHER, *RESNET]),
]


@functools.cache
def on_one_device(task, config):
    return trained(task, config)


def assert_near(one, other):
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "plan"), CASES, ids=lambda each: each)
def test_a_plan_gives_the_numbers_of_one_device(task, plan):
    config = configuration(**(EITHER | ENCODER | RESNET)[plan])
    reference = sequential(config)
    first, losses, last = trained(task, config)
    expected_first, expected_losses, expected_last = on_one_device(task, reference)
    jax.tree.map(np.testing.assert_array_equal, first, expected_first)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5, atol=1e-5)
    assert_near(last, expected_last)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["1f1b 4", "circular 4 x data 2"])
def test_micro_batches_change_nothing_where_layers_treat_examples_apart(plan):
    _, losses, last = trained("encoder", configuration(**(EITHER | ENCODER)[plan]))
    _, expected_losses, expected_last = on_one_device("encoder", configuration(data=1))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5, atol=1e-5)
    assert_near(last, expected_last)


@pytest.mark.slow
def test_accumulation_changes_nothing_where_layers_treat_examples_apart():
    _, losses, last = trained("encoder", configuration(accumulate=2))
    _, expected_losses, expected_last = on_one_device("encoder", configuration(data=1))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5, atol=1e-5)
    assert_near(last, expected_last)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [{}, {"fsdp": 2}, {"tensor": 2}, {"batch_norm": "groups:4"}, {"backend": "shard_map"}], ids=str
)
def test_accumulation_on_eight_devices_gives_the_numbers_of_one(plan):
    config = configuration(accumulate=2, **plan)
    _, losses, last = trained("resnet", config)
    _, expected_losses, expected_last = on_one_device("resnet", sequential(config))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5, atol=1e-5)
    assert_near(last, expected_last)
