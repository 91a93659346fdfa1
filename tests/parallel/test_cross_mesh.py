"""A checkpoint that was saved under one plan opens under any other, bit for bit, and on one device."""

import jax
import numpy as np
import optax
import pytest

from jaxdl.parallel.plan import abstract
from jaxdl.train.checkpoint import Checkpointer
from tests.parallel.plans import Run, configuration

PLANS = {
    "one device": {"data": 1},
    "data 8": {},
    "fsdp 8": {"fsdp": 8},
    "zero1": {"zero1": True},
    "tensor 4": {"data": 1, "tensor": 4},
    "data 2 x fsdp 2 x tensor 2": {"fsdp": 2, "tensor": 2},
    "1f1b 2 x fsdp 2": {"data": 1, "fsdp": 2, "pipeline": 2},
    "1f1b 4": {"data": 1, "pipeline": 4},
    "shard_map": {"backend": "shard_map"},
}
ORDER = [*PLANS, "one device"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["encoder", "resnet"])
def test_a_state_goes_through_all_plans_unchanged(task, tmp_path):
    optimizer = optax.adamw(1e-3)
    original = None
    for number, name in enumerate(ORDER):
        run = Run.of(task, configuration(**PLANS[name]), optimizer)
        wanted = abstract(run.abstract, run.plan.state_layout(run.abstract))
        with Checkpointer(tmp_path, keep=1) as checkpoints:
            if number == 0:
                state = run.start()
                original = jax.device_get(state)
            else:
                restored = checkpoints.restore(wanted)
                assert restored is not None
                state = restored.state
            for leaf, target in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
                assert leaf.sharding == target.sharding
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), original)
            checkpoints.save(number, state, record={}, score=None)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["fsdp 8", "1f1b 2 x fsdp 2"])
def test_a_run_goes_on_under_another_plan_with_the_same_numbers(other, tmp_path):
    first, second = (Run.of("encoder", configuration(**PLANS[name])) for name in ("data 8", other))
    _, state = first.train(first.start(), 2)
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(2, state, record={}, score=None)
        checkpoints.close()
        restored = checkpoints.restore(abstract(second.abstract, second.plan.state_layout(second.abstract)))
    assert restored is not None
    losses, end = second.train(restored.state, 3)
    expected, reference = first.train(state, 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for left, right in zip(jax.tree.leaves(end.params), jax.tree.leaves(reference.params), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
