import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdl.parallel.exchange import master

WEIGHTS = {"w": jnp.zeros(3)}


def delta(value):
    return {"w": jnp.full(3, float(value))}


def test_the_mean_is_of_those_that_answered():
    answered = {0: delta(1), 2: delta(4)}
    examples = {0: 10, 1: 20, 2: 30}  # worker 1 was lost
    np.testing.assert_allclose(master.mean(answered, examples)["w"], (1 * 10 + 4 * 30) / 40)
    with pytest.raises(ValueError, match="nobody answered"):
        master.mean({}, examples)
    with pytest.raises(ValueError, match="nobody answered"):
        master.mean({0: delta(1)}, {0: 0})


def test_the_mean_of_one_is_its_update_bit_for_bit():
    update = {"w": jnp.asarray(np.random.default_rng(0).normal(size=50), jnp.float32)}
    np.testing.assert_array_equal(master.mean({3: update}, {3: 7})["w"], update["w"])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_an_update_beyond_the_bound_is_refused_and_counted(bound, events):
    """Workers fetch the weights, or send an update that they computed with those they fetched last."""
    center, versions = master.start(WEIGHTS), dict.fromkeys(range(4), jnp.zeros((), jnp.int32))
    taken = refused = 0
    for worker, sends in events:
        if not sends:
            versions[worker] = center.version
            continue
        lacking = taken - int(versions[worker])
        center, accepted = master.receive(center, delta(1), versions[worker], bound)
        assert bool(accepted) == (lacking <= bound)
        taken, refused = taken + bool(accepted), refused + (not accepted)
        assert (int(center.version), int(center.refused)) == (taken, refused)
        assert center.weights["w"].tolist() == [taken] * 3
