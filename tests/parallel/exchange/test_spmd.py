"""Exchange within one program, on simulated devices, against the same promises between plain objects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxdl.parallel.exchange import master, ring, spmd
from jaxdl.planning.communication import collectives

AXIS = "worker"
SIZES = {"kernel": (5, 7), "bias": (9,)}
FLOATS = 5 * 7 + 9


def weights(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape) * scale, jnp.float32) for name, shape in SIZES.items()}


def deltas(workers, ticks):
    """[ticks][workers]."""
    return [[weights(100 * tick + worker + 1, 0.1) for worker in range(workers)] for tick in range(ticks)]


def mesh(workers):
    return Mesh(np.array(jax.devices()[:workers]), (AXIS,), axis_types=(AxisType.Auto,))


def mapped(function, workers, *, alike=()):
    """One call by all workers: arguments and results have an axis of workers in front, but for `alike`."""

    def inner(*arguments):
        mine = [a if i in alike else jax.tree.map(lambda leaf: leaf[0], a) for i, a in enumerate(arguments)]
        return jax.tree.map(lambda leaf: leaf[None], function(*mine))

    def run(*arguments):
        specs = tuple(P() if i in alike else P(AXIS) for i in range(len(arguments)))
        return jax.shard_map(inner, mesh=mesh(workers), in_specs=specs, out_specs=P(AXIS), check_vma=False)(
            *arguments
        )

    return jax.jit(run)


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def each(tree, number):
    return jax.tree.map(lambda leaf: leaf[number], tree)


def assert_equal(left, right):
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_ring_in_one_program_is_the_ring_of_objects(workers):
    token, member = ring.start(weights())
    members, tokens = stack([member] * workers), stack([token] * workers)
    plain, newest = [member] * workers, token
    tick_of = mapped(lambda *a: spmd.ring_tick(*a, AXIS), workers, alike=(3,))
    for tick, made in enumerate(deltas(workers, 9)):
        members, tokens = tick_of(members, tokens, stack(made), jnp.int32(tick))
        plain = [ring.update(one, delta) for one, delta in zip(plain, made, strict=True)]
        holder = ring.holder(tick, workers)
        plain[holder], newest = ring.visit(plain[holder], newest)
        assert_equal(each(tokens, (tick + 1) % workers), newest)
        assert_equal(members, stack(plain))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_ring_of_shards_is_a_ring_for_each_piece(workers):
    member, tokens = spmd.start_pieces(weights(), workers)
    members = stack([member] * workers)
    held = mapped(lambda t: spmd.own_token(t, AXIS), workers)(stack([tokens] * workers))
    plain = [[each(member, piece) for piece in range(workers)] for _ in range(workers)]
    newest = [each(tokens, piece) for piece in range(workers)]
    tick_of = mapped(lambda *a: spmd.pieces_tick(*a, AXIS), workers, alike=(3,))
    for tick, made in enumerate(deltas(workers, 9)):
        members, held = tick_of(members, held, stack(made), jnp.int32(tick))
        for worker, delta in enumerate(made):
            pieces = spmd.start_pieces(delta, workers)[0].weights
            plain[worker] = [ring.update(one, pieces[p]) for p, one in enumerate(plain[worker])]
        for piece in range(workers):
            holder = ring.holder(tick, workers, piece)
            plain[holder][piece], newest[piece] = ring.visit(plain[holder][piece], newest[piece])
            assert_equal(each(held, (holder + 1) % workers), newest[piece])
        assert_equal(members, stack([stack(pieces) for pieces in plain]))
    assert_equal(spmd.weights_of(stack(newest).weights, weights()).keys(), weights().keys())


def test_one_worker_is_plain_training_bit_for_bit():
    token, member = ring.start(weights())
    center, plain = master.start(weights()), weights()
    ticks = mapped(lambda *a: spmd.ring_tick(*a, AXIS), 1, alike=(3,))
    serve = mapped(lambda *a: spmd.master_tick(*a, AXIS), 1)
    members, tokens, centers = stack([member]), stack([token]), stack([center])
    for tick, (delta,) in enumerate(deltas(1, 7)):
        members, tokens = ticks(members, tokens, stack([delta]), jnp.int32(tick))
        centers = serve(centers, stack([delta]), jnp.ones(1))
        plain = jax.tree.map(jnp.add, plain, delta)
        assert_equal(each(tokens, 0).weights, plain)
        assert_equal(each(members, 0).weights, plain)
        assert_equal(each(centers, 0).weights, plain)


@pytest.mark.parametrize("workers", [2, 4])
def test_the_master_adds_the_mean_and_all_have_the_same(workers):
    examples = jnp.arange(1.0, workers + 1)
    centers = stack([master.start(weights())] * workers)
    made = deltas(workers, 1)[0]
    centers = mapped(lambda *a: spmd.master_tick(*a, AXIS), workers)(centers, stack(made), examples)
    mean = master.mean(dict(enumerate(made)), dict(enumerate(map(float, examples))))
    for worker in range(workers):
        assert_equal(each(centers, worker), each(centers, 0))
        for name, array in each(centers, worker).weights.items():
            np.testing.assert_allclose(array, weights()[name] + mean[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("workers", [2, 4])
def test_links_carry_what_the_formulas_say(workers):
    """M a hop for a token, M / N for a piece; (N - 1) M in and out at a master that is a worker too."""

    def sent(function, *arguments, alike=()):
        text = mapped(function, workers, alike=alike).lower(*arguments).compile().as_text()
        found = collectives(text)
        assert {one.kind for one in found} == {"collective-permute"}
        return sum(one.count * one.bytes for one in found)

    token, member = ring.start(weights())
    members, tokens, made = stack([member] * workers), stack([token] * workers), stack(deltas(workers, 1)[0])
    whole, number = FLOATS * 4, 4
    tick = jnp.int32(0)
    assert (
        sent(lambda *a: spmd.ring_tick(*a, AXIS), members, tokens, made, tick, alike=(3,)) == whole + number
    )

    member, tokens = spmd.start_pieces(weights(), workers)
    held = stack([each(tokens, 0)] * workers)
    pieces = -(-FLOATS // workers) * 4
    members = stack([member] * workers)
    hop = sent(lambda *a: spmd.pieces_tick(*a, AXIS), members, held, made, tick, alike=(3,))
    assert hop == pieces + number

    centers = stack([master.start(weights())] * workers)
    examples = jnp.ones(workers)
    assert sent(lambda *a: spmd.master_tick(*a, AXIS), centers, made, examples) == (workers - 1) * (
        whole + number + whole
    )
