"""Where the plan puts a training state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdl.config import MemoryConfig, ParallelConfig
from jaxdl.errors import ConfigError
from jaxdl.models.remat import HOST_MEMORY
from jaxdl.parallel.jit import refuse_offload
from jaxdl.parallel.mesh import make_mesh
from jaxdl.train.state import init_state
from jaxdl.train.step import TrainStep
from jaxdl.train.task import Task
from tests.parallel.plans import jit_plan

RATE = 0.1


class Regression(Task):
    """The mean square of what a matrix makes of the batch."""

    def init(self, key):
        return {"kernel": jax.random.normal(key, (4, 3))}, {}

    def loss(self, params, model_state, batch, keys):
        return jnp.square(batch["x"] @ params["kernel"]).sum(), jnp.float32(len(batch["x"])), model_state


def plan_of(*, offload):
    mesh = make_mesh(ParallelConfig(), batch_size=16, accumulate=1)
    return jit_plan(mesh, offload_optimizer=offload)


def updates(plan, count=3):
    """The state after some updates with momentum."""
    optimizer = optax.sgd(RATE, momentum=0.9)
    step = TrainStep(Regression(), optimizer, lambda _: RATE, seed=0)
    state = plan.compile_init(lambda: init_state(Regression(), optimizer, seed=0, keep_average=False))()
    batch = {"x": np.arange(64, dtype=np.float32).reshape(16, 4) / 64}
    compiled = plan.compile_train(step, state, batch)
    for _ in range(count):
        state, _ = compiled(state, plan.put(batch))
    return state


def test_an_offloaded_optimizer_lives_in_the_hosts_memory_and_gives_the_same_state():
    state, expected = updates(plan_of(offload=True)), updates(plan_of(offload=False))
    arrays = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert {leaf.sharding.memory_kind for leaf in arrays} == {HOST_MEMORY}
    assert state.params["kernel"].sharding.memory_kind == expected.params["kernel"].sharding.memory_kind
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(expected))


def test_offloading_on_a_cpu_is_refused():
    mesh = make_mesh(ParallelConfig(), batch_size=16, accumulate=1)
    refuse_offload(MemoryConfig(), mesh)
    with pytest.raises(ConfigError, match=r"memory\.offload: optimizer saves nothing on a CPU"):
        refuse_offload(MemoryConfig(offload="optimizer"), mesh)
