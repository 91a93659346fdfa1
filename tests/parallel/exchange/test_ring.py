"""What a token ring promises, whatever order things happen in."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdl.parallel.exchange import ring

MOST = 40
"""Updates in a schedule. Update `k` adds one to entry `k`, so weights say what is in them and how often."""


def delta(number):
    return {"w": jnp.zeros(MOST).at[number].set(1)}


def contents(weights):
    return np.asarray(weights["w"]).astype(int)


# A member learns, or (None) the token makes a step.
schedules = st.integers(1, 5).flatmap(
    lambda members: st.tuples(
        st.just(members),
        st.lists(st.one_of(st.none(), st.integers(0, members - 1)), max_size=MOST),
    )
)


@settings(max_examples=60, deadline=None)
@given(schedules)
def test_every_update_is_applied_once_in_any_schedule(schedule):
    count, events = schedule
    token, member = ring.start({"w": jnp.zeros(MOST)})
    members = dict.fromkeys(range(count), member)
    made, visited = {number: [] for number in members}, []
    for place, event in enumerate(events):
        if event is None:
            holder = ring.holder(len(visited), count)
            lacking = contents(token.weights) - contents(members[holder].weights)
            assert int(ring.staleness(members[holder], token)) == lacking.clip(0).sum()
            members[holder], token = ring.visit(members[holder], token)
            visited.append(holder)
            # The token is the newest, and the member keeps it.
            np.testing.assert_array_equal(contents(members[holder].weights), contents(token.weights))
            assert all(contents(token.weights)[update] == 1 for update in made[holder])
        else:
            members[event] = ring.update(members[event], delta(place))
            made[event].append(place)
        applied = contents(token.weights)
        waiting = sum((contents(each.gathered) for each in members.values()), np.zeros(MOST, int))
        everything = np.zeros(MOST, int)
        everything[[update for updates in made.values() for update in updates]] = 1
        np.testing.assert_array_equal(applied + waiting, everything)
        assert int(token.version) == applied.sum()
    assert visited == [step % count for step in range(len(visited))]


@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_staleness_in_step_reaches_its_bound_and_no_more(members):
    token, member = ring.start({"w": jnp.zeros(MOST)})
    copies = dict.fromkeys(range(members), member)
    seen = []
    for tick in range(10 * members):
        for number in copies:
            copies[number] = ring.update(copies[number], {"w": jnp.ones(MOST)})
        holder = ring.holder(tick, members)
        seen.append(int(ring.staleness(copies[holder], token)))
        copies[holder], token = ring.visit(copies[holder], token)
    assert max(seen) == members * (members - 1)
    assert int(token.version) == int(token.weights["w"][0])


def test_a_ring_of_one_is_plain_training_bit_for_bit():
    """Also where the token comes after several updates, whose sum rounds otherwise than one after another."""
    rng = np.random.default_rng(0)
    weights = {"w": jnp.asarray(rng.normal(size=MOST), jnp.float32)}
    token, member = ring.start(weights)
    plain = weights["w"]
    for step in range(30):
        update = jnp.asarray(rng.normal(size=MOST) * 1e-3, jnp.float32)
        member, plain = ring.update(member, {"w": update}), plain + update
        if step % 3 == 2:
            member, token = ring.visit(member, token)
            np.testing.assert_array_equal(token.weights["w"], plain)


def test_pieces_are_with_different_members():
    for tick in range(6):
        assert {ring.holder(tick, 4, piece) for piece in range(4)} == {0, 1, 2, 3}
    assert [ring.holder(tick, 4) for tick in range(5)] == [0, 1, 2, 3, 0]


def test_a_ring_closes_over_a_lost_member():
    assert ring.without((0, 1, 2, 3), 2) == (0, 1, 3)
    with pytest.raises(ValueError, match="cannot lose"):
        ring.without((0, 1), 2)
    with pytest.raises(ValueError, match="cannot lose"):
        ring.without((0,), 0)


@settings(max_examples=40, deadline=None)
@given(schedules, st.integers(0, 4))
def test_a_token_that_was_lost_comes_back_without_anything_twice(schedule, lost):
    count, events = schedule
    token, member = ring.start({"w": jnp.zeros(MOST)})
    members = dict.fromkeys(range(count), member)
    ticks = 0
    for place, event in enumerate(events):
        if event is None:
            holder = ring.holder(ticks, count)
            members[holder], token = ring.visit(members[holder], token)
            ticks += 1
        else:
            members[event] = ring.update(members[event], delta(place))
    if lost >= count or count == 1:
        return
    del members[lost]
    last, token = ring.recovered(members)
    assert int(token.version) == int(members[last].version) == contents(token.weights).sum()
    for number in sorted(members):
        members[number], token = ring.visit(members[number], token)
    for each in members.values():
        assert contents(each.weights).max() <= 1
    assert contents(token.weights).max() <= 1
