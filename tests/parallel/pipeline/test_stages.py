"""Stages of a pipeline: what they hold, what they send, what cannot be cut."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdl.config import ImageConfig, PrecisionConfig
from jaxdl.errors import ConfigError
from jaxdl.optim.build import build_optimizer
from jaxdl.parallel.pipeline.step import PLACE
from jaxdl.precision import init_loss_scale
from jaxdl.train.state import init_state
from tests.parallel.plans import BATCH, SGD, Run, configuration, sequential

STAGES, PARTS = 4, 8


def live_bytes(device):
    return sum(
        shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
        if shard.device == device
    )


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "most"), [("gpipe", PARTS), ("1f1b", STAGES)])
def test_a_stage_holds_the_activations_that_its_schedule_promises(schedule, most):
    run = Run.of("encoder", configuration(data=1, pipeline=STAGES, schedule=schedule, microbatches=PARTS))
    state, inputs = run.start(), run.plan.put(run.batch)
    first = run.plan.meshes[0].devices.flat[0]
    now = []

    def watch(action):
        if action.stage == 0:
            now.append(live_bytes(first))

    compiled = run.compile(watch=watch)
    jax.block_until_ready(compiled(state, inputs))
    # After its last backward pass the stage holds nothing; before it, one micro-batch.
    unit = now[-2] - now[-1]
    assert unit > 0
    assert (max(now) - now[-1]) / unit == pytest.approx(most, abs=0.05)


@pytest.mark.slow
def test_a_bad_micro_batch_skips_the_update_in_all_stages():
    precision = PrecisionConfig(loss_scale="dynamic", scale_start=4.0)
    run = Run.of("resnet", configuration(data=2, pipeline=2, microbatches=2))

    def init():
        scale = init_loss_scale(precision)
        return init_state(run.task, SGD, seed=0, keep_average=True, loss_scale=scale)

    step = replace(run.step, precision=precision, ema_decay=0.9)
    good = run.batch | {"image": run.batch["image"].astype(np.float32)}
    bad = good | {"image": good["image"].copy()}
    bad["image"][5, 2, 3] = np.inf
    state = run.plan.compile_init(init)()
    compiled = run.plan.compile_train(step, jax.eval_shape(init), good)
    state, metrics = compiled(state, run.plan.put(good))
    assert np.all(metrics["finite"])
    before = jax.device_get(state)
    state, metrics = compiled(state, run.plan.put(bad))
    after = jax.device_get(state)
    assert not np.all(metrics["finite"])
    assert int(metrics["skipped_updates"]) == 1
    assert float(after.loss_scale.scale) == 2
    for left, right in zip(
        jax.tree.leaves(replace(after, loss_scale=None)),
        jax.tree.leaves(replace(before, loss_scale=None)),
        strict=True,
    ):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
    state, metrics = compiled(state, run.plan.put(good))
    assert (int(state.step), np.all(metrics["finite"])) == (2, True)


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # optax's Adam mixes dtypes
@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_the_global_norm_and_the_optimizer_are_those_of_the_whole(name):
    settings = ImageConfig(
        optimizer=replace(ImageConfig.__dataclass_fields__["optimizer"].default, name=name, clip_norm=0.01),
        train=configuration().train,
    ).optimizer
    optimizer = build_optimizer(settings, optax.constant_schedule(0.01))
    config = configuration(data=1, pipeline=2, microbatches=2)
    ends = []
    for each in (config, sequential(config)):
        run = Run.of("resnet", each, optimizer)
        state, metrics = run.compile()(run.start(), run.plan.put(run.batch))
        ends.append((float(metrics["gradient_norm"]), jax.device_get(state.params)))
    (norm, params), (expected_norm, expected) = ends
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    for left, right in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["encoder", "resnet"])
def test_evaluation_through_stages_gives_each_example_its_metrics(task):
    from jaxdl.train.step import EvalStep

    config = configuration(data=2, pipeline=2, microbatches=4)
    results = []
    for each in (config, configuration(data=1)):
        run = Run.of(task, each)
        state = run.start()
        batch = run.batch | {"mask": (np.arange(BATCH) < 13).astype(np.float32)}
        weights = (state.params, state.model_state)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), weights)
        evaluate = run.plan.compile_eval(EvalStep(run.task), shapes, batch)
        results.append(jax.device_get(evaluate(weights, run.plan.put(batch))))
    staged, whole = results
    assert staged.keys() == whole.keys()
    for name, values in staged.items():
        np.testing.assert_allclose(values, whole[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert staged["mask"].sum() == 13


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("resnet", {"pipeline": 8}, "the model has 4 blocks, so at most that many stages"),
        ("encoder", {"pipeline": 3}, "does not divide the model's 4 layers: take one of 1, 2, 4"),
        ("resnet", {"pipeline": 2, "cut": "1,2"}, "4 blocks for parallel.pipeline 2 .* whose sum is 4"),
        ("encoder", {"pipeline": 2, "cut": "2,2"}, "divided evenly over the stages"),
    ],
)
def test_what_cannot_be_cut_is_refused(task, settings, message):
    # As many micro-batches as there are stages would not divide the batch in one of the cases.
    with pytest.raises(ConfigError, match=message):
        Run.of(task, configuration(data=1, microbatches=4, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["1,3", "measured"])
def test_where_the_cut_is_changes_nothing(cut):
    config = configuration(data=1, pipeline=2, microbatches=2, cut=cut)
    run, reference = Run.of("resnet", config), Run.of("resnet", sequential(config))
    losses, _ = run.train(run.start(), 2)
    expected, _ = reference.train(reference.start(), 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    if cut == "1,3":
        assert [len(pieces) for pieces in run.plan.stages] == [1, 3]


def test_only_what_a_stage_reads_is_sent_to_it():
    run = Run.of("resnet", configuration(data=1, pipeline=2, microbatches=2))
    sent = run.plan.put(run.batch)
    assert [sorted(parts[0]) for parts in sent] == [["image", PLACE], ["label", PLACE]]
    positions = np.concatenate([part[PLACE] for part in sent[0]])
    assert jnp.array_equal(np.sort(positions), np.arange(BATCH))
