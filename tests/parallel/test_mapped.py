"""Copies of the step on each device."""

import jax
import numpy as np
import pytest

from jaxdl.config import ParallelConfig
from jaxdl.errors import ConfigError
from tests.parallel.plans import BATCH, Run, configuration


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shard_map", "pmap"])
def test_running_statistics_are_means_over_devices_whatever_their_order(backend):
    run = Run.of("resnet", configuration(backend=backend, batch_norm="local"))
    each = BATCH // jax.device_count()
    constant = np.repeat(np.arange(jax.device_count(), dtype=np.uint8) * 30, each)
    images = np.broadcast_to(constant[:, None, None, None], run.batch["image"].shape)
    ends = []
    compiled = run.compile()
    for order in (slice(None), slice(None, None, -1)):
        batch = {name: value[order] for name, value in {**run.batch, "image": images}.items()}
        state = run.start()
        for _ in range(3):
            state, _ = compiled(state, run.plan.put(batch))
        for leaf in jax.tree.leaves(state):
            assert leaf.is_fully_replicated
            copies = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
            assert len(copies) == 1
        ends.append(jax.device_get(state.model_state))
    for left, right in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "pmap", "fsdp": 2}, "pmap keeps a copy of everything .* parallel.fsdp: take jit"),
        ({"backend": "shard_map", "zero1": True}, "parallel.zero1: take jit"),
        ({"batch_norm": "local"}, "with jit say how many parts"),
        ({"batch_norm": "groups:0"}, "is not global, local or a number of groups"),
        ({"batch_norm": "globl"}, "is not global, local or a number of groups"),
    ],
)
def test_what_a_backend_cannot_do_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**settings)


@pytest.mark.parametrize(("backend", "groups"), [("shard_map", 3), ("jit", 3), ("shard_map", 32)])
def test_groups_that_do_not_divide_the_batch_are_refused(backend, groups):
    run = Run.of("resnet", configuration(backend=backend, batch_norm=f"groups:{groups}"))
    with pytest.raises(ConfigError, match=f"{groups} groups do not divide"):
        run.compile()
