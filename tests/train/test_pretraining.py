"""Pre-training: means over all hidden words wherever they lie, under every plan, and LAMB by layers."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdl.config import (
    BertConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
    TextDataConfig,
    TrainConfig,
)
from jaxdl.errors import ConfigError
from jaxdl.models.circular import Circular
from jaxdl.optim.build import build_optimizer
from jaxdl.parallel.mesh import make_mesh
from jaxdl.train.evaluate import evaluate
from jaxdl.train.pretraining import Pretraining
from jaxdl.train.program import make_plan, stacked_layers
from jaxdl.train.state import init_state
from jaxdl.train.step import EvalStep, TrainStep
from tests.models.test_bert import SMALL, bert_of, keys_of, text_of
from tests.parallel.plans import Run, fetch

BATCH, LENGTH, PREDICTIONS = 32, 8, 4
COUNTS = (0, 4, 0, 1, 4, 4, 0, 0, 3, 0, 0, 0, 0, 1, 0, 0, 4, 4, 4, 4, *[0] * 11, 2)
"""Hidden words of each example: any half or quarter of the batch has another number, some none."""
RATE = 0.5


def task_of(parallel=None, *, pairs=False, depth=2, **settings):
    pipeline = None
    if parallel is not None and parallel.circular:
        pipeline = Circular(parallel.pipeline, parallel.parts, parallel.repeats)
    bert = bert_of(replace(SMALL, depth=depth), pipeline=pipeline)
    return Pretraining(bert, LENGTH, PREDICTIONS, pairs, **settings)


def batch_of(counts=COUNTS, *, pairs=False, seed=0):
    rng = np.random.default_rng(seed)
    batch = text_of(len(counts), LENGTH, seed=seed)
    shape = (len(counts), PREDICTIONS)
    batch["masked_position"] = rng.integers(0, LENGTH, shape).astype(np.int32)
    batch["masked_word"] = rng.integers(1, 32, shape).astype(np.int32)
    batch["masked_weight"] = (np.arange(PREDICTIONS) < np.array(counts)[:, None]).astype(np.float32)
    return batch | ({"next": rng.integers(0, 2, len(counts)).astype(np.int32)} if pairs else {})


def updated(task, batch, *, accumulate=1, **parallel):
    """The loss of a batch, and the parameters before and after an update along its gradient."""
    config = BertConfig(
        data=TextDataConfig(batch_size=BATCH),
        parallel=ParallelConfig(**parallel),
        memory=MemoryConfig(accumulate=accumulate),
        train=TrainConfig(steps=1),
    )
    task = task(config.parallel) if callable(task) else task
    mesh = make_mesh(config.parallel, batch_size=BATCH, accumulate=accumulate)
    plan, replicas = make_plan(config, mesh, task)
    optimizer = optax.sgd(RATE)
    step = TrainStep(task, optimizer, lambda _: RATE, seed=0, accumulate=accumulate, replicas=replicas)
    abstract = jax.eval_shape(lambda: init_state(task, optimizer, seed=0, keep_average=False))
    run = Run(task, plan, step, abstract, batch)
    state = run.start()
    before = fetch(state.params)
    (loss,), state = run.train(state, updates=1)
    return loss, before, fetch(state.params)


@functools.cache
def on_one_device(*, pairs, depth=2):
    return updated(task_of(pairs=pairs, depth=depth), batch_of(pairs=pairs), data=1)


def assert_updated_alike(found, expected, tolerance):
    """Equal initial values, losses, and gradients."""
    (loss, before, after), (expected_loss, expected_before, expected_after) = found, expected
    jax.tree.map(np.testing.assert_array_equal, before, expected_before)
    np.testing.assert_allclose(loss, expected_loss, rtol=tolerance)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(expected_after), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=RATE * tolerance)
    moved = [np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    assert all(moved)


DIVIDED = {"data 1": {"data": 1}, "data 8": {"data": 8}, "shard_map 8": {"backend": "shard_map"}}


@pytest.mark.parametrize(
    ("plan", "accumulate", "pairs"),
    [
        *((plan, accumulate, True) for plan in DIVIDED for accumulate in (1, 2, 4) if plan != "data 1"),
        *(("data 1", accumulate, True) for accumulate in (2, 4)),
        *((plan, 4, False) for plan in DIVIDED),
    ],
)
def test_words_weigh_alike_however_the_batch_is_divided(plan, accumulate, pairs):
    """Shards and micro-batches have other numbers of hidden words, or none."""
    plan = DIVIDED[plan]
    found = updated(task_of(pairs=pairs), batch_of(pairs=pairs), accumulate=accumulate, **plan)
    assert_updated_alike(found, on_one_device(pairs=pairs), 1e-6)


@pytest.mark.parametrize("pairs", [False, True])
def test_the_loss_is_the_mean_over_all_hidden_words_and_the_mean_over_pairs(pairs):
    task, batch, keys = task_of(pairs=pairs), batch_of(pairs=pairs), keys_of(BATCH)
    optimizer = optax.sgd(RATE)
    state = jax.jit(lambda: init_state(task, optimizer, seed=0, keep_average=False))()

    def written_out(params):
        hidden = task.bert.encode(params, batch, keys)
        table = params["embeddings"]["word"]["embedding"]
        position = batch["masked_position"]
        logits = task._masked_words.apply({"params": params["masked_words"]}, hidden, position, table)
        counts = batch["masked_weight"] == 1
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["masked_word"])
        loss = jnp.where(counts, losses, 0).sum() / sum(COUNTS)
        if pairs:
            dense, head = params["pooler"]["dense"], params["next_sentence"]
            pooled = jnp.tanh(hidden[:, 0] @ dense["kernel"] + dense["bias"][None])
            logits = pooled @ head["kernel"] + head["bias"][None]
            loss += optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()
        return loss

    step = TrainStep(task, optimizer, lambda _: RATE, seed=0)
    weighed = task.weigh(batch, step.replicas.total)
    gradients, loss, _ = jax.jit(step.mean_gradients)(state, weighed, keys)
    expected, expected_gradients = jax.jit(jax.value_and_grad(written_out))(state.params)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_without_hidden_words_teaches_nothing_of_them(accumulate):
    batch = batch_of([0] * BATCH)
    loss, before, after = updated(task_of(), batch, data=1, accumulate=accumulate)
    assert loss == 0
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_without_hidden_words_pairs_are_learnt_all_the_same():
    loss, before, after = updated(task_of(pairs=True), batch_of([0] * BATCH, pairs=True), data=1)
    assert loss == pytest.approx(math.log(2), rel=0.05)
    jax.tree.map(np.testing.assert_array_equal, after["masked_words"], before["masked_words"])
    for name in ("embeddings", "encoder", "pooler", "next_sentence"):
        assert any(
            np.any(one != other)
            for one, other in zip(jax.tree.leaves(after[name]), jax.tree.leaves(before[name]), strict=True)
        )


PLANS = {
    "circular 2 x data 2 x tensor 2, 2 micro-batches": {
        "data": 2, "tensor": 2, "pipeline": 2, "schedule": "circular", "microbatches": 2
    },
    "circular 2 x data 2 x tensor 2, 4 micro-batches": {
        "data": 2, "tensor": 2, "pipeline": 2, "schedule": "circular", "microbatches": 4
    },
    "circular 2 x 2 x data 2": {
        "data": 2, "pipeline": 2, "schedule": "circular", "repeats": 2, "microbatches": 4
    },
    "data 2 x fsdp 2 x tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "data 4 x tensor 2, sequence": {"data": 4, "tensor": 2, "sequence": True},
    "data 8, zero1": {"zero1": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [False, True], ids=["words", "pairs"])
@pytest.mark.parametrize("plan", PLANS)
def test_an_update_under_a_plan_is_that_of_one_device(plan, pairs):
    found = updated(
        lambda parallel: task_of(parallel, pairs=pairs, depth=4), batch_of(pairs=pairs), **PLANS[plan]
    )
    assert_updated_alike(found, on_one_device(pairs=pairs, depth=4), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["circular 2 x data 2 x tensor 2, 2 micro-batches", "data 8, zero1"])
def test_accumulation_under_a_plan_changes_nothing(plan):
    found = updated(
        lambda parallel: task_of(parallel, pairs=True, depth=4),
        batch_of(pairs=True),
        accumulate=2,
        **PLANS[plan],
    )
    assert_updated_alike(found, on_one_device(pairs=True, depth=4), 1e-5)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_of_their_own_are_refused(schedule):
    plan = {"data": 1, "pipeline": 2, "schedule": schedule, "microbatches": 2}
    with pytest.raises(ConfigError, match=r"^parallel\.schedule: .* take circular"):
        updated(task_of(), batch_of(), **plan)


def test_an_evaluation_is_weighted_by_words_not_by_batches_or_examples():
    baseline = {"unigram_accuracy": 0.25, "unigram_perplexity": 40.0}
    task = task_of(pairs=True, baseline=baseline)
    params, _ = jax.jit(task.init)(jax.random.key(0))
    batch = batch_of(pairs=True)
    step = jax.jit(EvalStep(task))
    parts = [slice(0, 12), slice(12, 24), slice(24, BATCH)]
    batches = [{name: value[part] for name, value in batch.items()} for part in parts]
    batches = [
        {name: np.concatenate([value, np.zeros_like(value)])[:12] for name, value in each.items()}
        | {"mask": (np.arange(12) < len(each["word"])).astype(np.float32)}
        for each in batches
    ]
    found = evaluate(step, task.scores, (params, {}), batches, lambda batch: batch)

    @jax.jit
    def logits_of(params, batch):
        hidden = task.bert.encode(params, batch, None)
        own, table = {"params": params["masked_words"]}, params["embeddings"]["word"]["embedding"]
        logits = task._masked_words.apply(own, hidden, batch["masked_position"], table)
        pooled = task._pooler.apply({"params": params["pooler"]}, hidden)
        return logits, task._next_sentence.apply({"params": params["next_sentence"]}, pooled)

    logits, pair = logits_of(params, batch)
    counts = batch["masked_weight"] == 1
    logits, label = np.asarray(logits)[counts], batch["masked_word"][counts]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    next_loss = optax.softmax_cross_entropy_with_integer_labels(pair, batch["next"]).mean()
    expected = {
        "loss": float(losses.mean() + next_loss),
        "accuracy": float((logits.argmax(-1) == label).mean()),
        "perplexity": math.exp(float(losses.mean())),
        "next_accuracy": float((np.asarray(pair).argmax(-1) == batch["next"]).mean()),
        **baseline,
        "count": BATCH,
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_scores_are_no_means_of_means():
    columns = {
        "loss": np.array([8.0, 1.0, 0.0]), "accuracy": np.array([1.0, 1.0, 0.0]),
        "words": np.array([8.0, 1.0, 0.0]),
    }  # fmt: skip
    scores = task_of().scores(columns | {"loss": np.array([16.0, 11.0, 0.0])})
    assert scores == pytest.approx({"loss": 3.0, "accuracy": 2 / 9, "perplexity": math.exp(3)})
    none = task_of().scores(dict.fromkeys(columns, np.zeros(2)))
    assert none == {"loss": 0.0, "accuracy": 0.0, "perplexity": 1.0}
    assert task_of().scores(columns | {"loss": np.full(3, 1e6)})["perplexity"] == math.inf


def test_the_stacks_of_layers_are_the_encoders():
    task = task_of(pairs=True)
    axes = stacked_layers(task)
    names = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.eval_shape(task.init, jax.random.key(0))[0])
    }
    stacked = {name for name in names if axes(name)}
    assert stacked == {name for name in names if name.startswith("encoder/layers/")}
    assert all(names[name].shape[0] == SMALL.depth for name in stacked)


@jax.numpy_dtype_promotion("standard")  # optax's Adam
def test_lamb_gives_each_layer_of_the_stack_its_own_ratio():
    """One step of a real gradient against plain formulas, layer by layer."""
    config = OptimizerConfig(name="lamb", weight_decay=0.01, clip_norm=0.1, learning_rate=0.1)
    task, batch = task_of(pairs=True, depth=3), batch_of(pairs=True)
    optimizer = build_optimizer(config, optax.constant_schedule(0.1), layer_axes=stacked_layers(task))
    step = TrainStep(task, optimizer, lambda _: 0.1, seed=0)
    state = jax.jit(lambda: init_state(task, optimizer, seed=0, keep_average=False))()
    weighed = task.weigh(batch, lambda x: x)
    gradients, _, _ = jax.jit(step.mean_gradients)(state, weighed, keys_of(BATCH))
    updates, _ = jax.jit(optimizer.update)(gradients, state.opt_state, state.params)
    found = dict(_by_name(optax.apply_updates(state.params, updates)))

    params, gradients = (
        {n: np.asarray(x, np.float64) for n, x in _by_name(t)} for t in (state.params, gradients)
    )
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    assert norm > 0.1

    def moved(name, w, g):
        u = g / (np.abs(g) + 1e-6)  # Adam's first step
        if name.split("/")[-1] not in ("kernel", "embedding"):
            return w - 0.1 * u
        u = u + 0.01 * w
        return w - 0.1 * np.linalg.norm(w) / np.linalg.norm(u) * u

    for name, w in params.items():
        g = gradients[name] * 0.1 / norm
        layers = name.startswith("encoder/layers/")
        expected = [moved(name, *each) for each in zip(w, g, strict=True)] if layers else moved(name, w, g)
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def _by_name(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf
