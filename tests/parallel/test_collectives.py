"""What compiled steps send between devices, by kind and bytes, is what the formulas say."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdl.config import ParallelConfig
from jaxdl.parallel.mesh import make_mesh
from jaxdl.planning.communication import collectives, payload
from tests.parallel.formulas import bytes_of, formula, ratios, sums, too_much
from tests.parallel.plans import BATCH, DEPTH, LENGTH, Run, configuration
from tests.parallel.test_plans import EITHER, ENCODER

WIDTH = 256
ACTIVATIONS = BATCH * LENGTH * WIDTH * 4
PLANS = EITHER | ENCODER | {"tensor 2, sequence": {"data": 1, "tensor": 2, "sequence": True}}
NORMS = 9
"""Batch normalisations of the small ResNet."""
REMATERIALIZATION = "Involuntary full rematerialization"
"""What XLA prints where it fetches an array whole only to divide it in another way."""


def compiled(task, width, **parallel):
    """The configuration, the run and the collectives of its step."""
    config = configuration(**parallel)
    run = Run.of(task, config, width=width)
    return config, run, collectives(run.compile().as_text())


def count(found, kind):
    return sum(one.count for one in found if one.kind == kind)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shard_map", "pmap"])
def test_local_batch_normalisation_leaves_one_sum_of_gradients_and_statistics(backend):
    _, run, found = compiled("resnet", 32, backend=backend, batch_norm="local")
    (total,) = found
    loss_and_weight = 2 * 4
    assert total.kind == "all-reduce"
    assert total.count == 1
    expected = bytes_of((run.abstract.params, run.abstract.model_state)) + loss_and_weight
    # The biases of two norms that are added have one gradient between them, which is summed once.
    assert 0.99 * expected < total.bytes <= expected


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shard_map", "jit"])
def test_normalisation_by_the_whole_batch_sums_at_each_norm_forward_and_backward(backend):
    _, run, found = compiled("resnet", 32, backend=backend)
    gradients = bytes_of(run.abstract.params)
    assert set(payload(found)) == {"all-reduce"}
    # Forward the mean, then the variance; backward both gradients at once, with the weights' or by
    # themselves.
    assert 2 * NORMS < count(found, "all-reduce") <= 4 * NORMS
    # Of the weights no more than once: the rest are vectors of one number a channel.
    assert gradients < payload(found)["all-reduce"] < 1.06 * gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "data 8", "node 2 x data 4", "fsdp 8", "zero1", "tensor 2", "tensor 4", "tensor 2, sequence",
        "data 2 x tensor 4, sequence", "data 4 x tensor 2", "data 2 x fsdp 2 x tensor 2", "circular 2",
        "circular 4 x data 2", "circular 2 x 2 x data 2", "circular 2 x data 2 x tensor 2",
        "circular 2 x fsdp 2 x tensor 2",
    ],
)  # fmt: skip
def test_no_plan_of_an_encoder_moves_more_than_its_formula(plan):
    config, run, found = compiled("encoder", WIDTH, **PLANS[plan])
    expected = sums(formula(run, config))
    moved = ratios(found, expected)
    assert all(one.exact for one in found)
    assert too_much(found, expected) == {}, moved
    # That it is less would tell of a wrong formula.
    assert all(moved[kind] > 0.9 for kind in expected), moved


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp 8", "zero1"])
def test_divided_parameters_of_a_resnet_are_gathered_and_its_gradients_summed(plan):
    config, run, found = compiled("resnet", 32, **PLANS[plan])
    moved = ratios(found, sums(formula(run, config)))
    assert set(moved) == {"all-gather", "all-reduce"}
    assert 0.9 < moved["all-gather"] < 1.1
    assert 0.9 < moved["all-reduce"] < 1.1


@pytest.mark.slow
def test_a_layer_divided_among_devices_sums_twice_forward_and_twice_backward():
    _, _, found = compiled("encoder", WIDTH, data=1, tensor=4)
    activations = [one for one in found if one.bytes == ACTIVATIONS]
    lookup = 1
    assert [(one.kind, one.count) for one in activations] == [("all-reduce", 4 * DEPTH + lookup)]
    # All else are metrics.
    assert sum(one.bytes for one in found if one.bytes != ACTIVATIONS) < 100


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "repeats", "data"), [(2, 1, 1), (4, 1, 2), (2, 2, 2)])
def test_a_circular_pipeline_passes_one_micro_batch_on_each_turn(stages, repeats, data):
    micro = 4
    _, _, found = compiled(
        "encoder", WIDTH, pipeline=stages, repeats=repeats, data=data, schedule="circular", microbatches=micro
    )
    (permute,) = [one for one in found if one.kind == "collective-permute"]
    assert permute.count == 2 * (repeats * micro + stages - 1)
    assert permute.bytes == ACTIVATIONS // micro // data


@pytest.mark.slow
@pytest.mark.parametrize("task", ["encoder", "resnet"])
def test_accumulation_sums_gradients_over_devices_once_an_update(task):
    run = Run.of(task, configuration(accumulate=2), width=64)
    found = collectives(run.compile().as_text())
    gradients = bytes_of(run.abstract.params)
    assert set(payload(found)) == {"all-reduce"}
    # What a ResNet sums besides are the statistics of its norms, of each micro-batch.
    assert gradients <= payload(found)["all-reduce"] < 1.1 * gradients


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_sum_gradients_over_devices_once_an_update(schedule):
    run = Run.of("encoder", configuration(data=4, pipeline=2, schedule=schedule, microbatches=2), width=64)
    stages = run.compile().stages
    gradients = bytes_of(run.abstract.params)
    by_part = [collectives(each.as_text()) for stage in stages for each in (stage.forward, stage.backward)]
    assert sum(one.bytes for found in by_part for one in found) < gradients / 1000
    moved = [payload(collectives(stage.finish.as_text())) for stage in stages]
    assert sum(each["all-reduce"] for each in moved) == pytest.approx(gradients, rel=0.01)


@pytest.fixture
def compiling_anew():
    """No compiled program is read from the cache, and those that are not run need not be fast."""
    settings = {"jax_enable_compilation_cache": False, "jax_disable_most_optimizations": True}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it asks once whether it is to be used
    yield
    for name, value in settings.items():
        jax.config.update(name, not value)
    compilation_cache.reset_cache()


def test_the_warning_of_a_bad_layout_would_be_seen(compiling_anew, capfd):
    mesh = make_mesh(ParallelConfig(fsdp=2, tensor=2), batch_size=BATCH, accumulate=1)

    def relaid(x):
        x = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P(None, None, "fsdp")))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(("data", "fsdp"))))

    jax.jit(relaid).lower(jax.ShapeDtypeStruct((16, 8, 128), jnp.float32)).compile()
    assert capfd.readouterr().err.count(REMATERIALIZATION) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "plan"),
    [*(("encoder", plan) for plan in EITHER | ENCODER), *(("resnet", plan) for plan in EITHER)],
    ids=lambda each: each,
)
def test_no_plan_lays_an_array_out_anew_by_way_of_the_whole(task, plan, compiling_anew, capfd):
    Run.of(task, configuration(**PLANS[plan])).compile()
    assert capfd.readouterr().err.count(REMATERIALIZATION) == 0
