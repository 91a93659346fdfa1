"""Fine-tuning: losses and answers against plain formulas, and stages of a pipeline."""

import functools
import itertools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdl.config import BertConfig, ParallelConfig, TextDataConfig, TrainConfig
from jaxdl.data.text.squad import open_squad
from jaxdl.parallel.mesh import make_mesh
from jaxdl.train.finetuning import QuestionAnswering, SequenceClassification
from jaxdl.train.program import make_plan
from jaxdl.train.state import init_state
from jaxdl.train.step import EvalStep
from tests.data.text.corpora import vocabulary
from tests.models.test_bert import SMALL, bert_of, keys_of, text_of
from tests.train.test_pretraining import BATCH, assert_updated_alike, updated

LENGTH = 16


def classification(*, depth=2, pre_norm=False, **settings):
    bert = bert_of(replace(SMALL, depth=depth), pre_norm=pre_norm)
    return SequenceClassification(bert, LENGTH, classes=3, **settings)


def answering(*, depth=2, pre_norm=False, length=LENGTH, **settings):
    return QuestionAnswering(bert_of(replace(SMALL, depth=depth), pre_norm=pre_norm), length, **settings)


def labelled(examples=BATCH, seed=0):
    label = np.random.default_rng(seed + 1).integers(0, 3, examples).astype(np.int32)
    return text_of(examples, LENGTH, seed=seed) | {"label": label}


def questions(examples=BATCH, length=LENGTH, seed=0):
    """The second segment is the passage, with an answer in it, or none."""
    rng = np.random.default_rng(seed)
    batch = text_of(examples, length, seed=seed)
    batch["answerable"] = (batch["segment"] == 2).astype(np.float32)
    spans = np.zeros((examples, 2), np.int32)
    for row, inside in enumerate(batch["answerable"]):
        places = np.flatnonzero(inside)
        if len(places) and row % 3:
            spans[row] = sorted(rng.choice(places, 2))
    return batch | {"start": spans[:, 0], "end": spans[:, 1]}


def on_device(batch):
    return jax.tree.map(jnp.asarray, batch)


TASKS = {"classification": (classification, labelled), "answering": (answering, questions)}


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_loss_of_classes_is_cross_entropy_with_smoothed_labels(share):
    logits = 3 * jax.random.normal(jax.random.key(0), (6, 3))
    label = jnp.array([0, 1, 2, 2, 1, 0])
    task = classification(label_smoothing=share)
    targets = optax.smooth_labels(jax.nn.one_hot(label, 3), share)
    expected = optax.softmax_cross_entropy(logits, targets)
    np.testing.assert_allclose(task.losses(logits, {"label": label}), expected, rtol=1e-6, atol=1e-6)
    columns = task.columns(logits, {"label": label})
    plain = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    np.testing.assert_allclose(columns["loss"], plain, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(columns["accuracy"], logits.argmax(-1) == label)


def test_logits_of_classes_are_those_of_the_pooled_first_token():
    task, batch = classification(dropout=0.5), labelled(4)
    params, _ = jax.jit(task.init)(jax.random.key(0))
    hidden = np.asarray(jax.jit(lambda params, batch: task.bert.encode(params, batch, None))(params, batch))
    dense, head = (jax.tree.map(np.asarray, p) for p in (params["pooler"]["dense"], params["classifier"]))
    logits = np.tanh(hidden[:, 0] @ dense["kernel"] + dense["bias"]) @ head["kernel"] + head["bias"]
    expected = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), batch["label"])
    found = jax.jit(task.evaluate)(params, {}, batch)
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)
    summed, weight, _ = jax.jit(task.loss)(params, {}, batch, keys_of(4))
    assert float(weight) == 4
    assert abs(float(summed) - float(expected.sum())) > 1e-4  # dropout


def test_the_logits_are_rounded_as_the_policy_says():
    task = classification(output_dtype=jnp.bfloat16)
    logits, label = jnp.array([[1.0, 1.0 + 2**-9, 0.0]]), jnp.array([1])
    assert float(task.columns(logits, {"label": label})["accuracy"][0]) == 0
    assert float(classification().columns(logits, {"label": label})["accuracy"][0]) == 1


def span_logits(examples, length, seed=0):
    return 5 * jax.random.normal(jax.random.key(seed), (examples, length, 2))


def test_the_loss_of_answers_is_over_the_passage_and_no_answer():
    batch, logits = questions(), span_logits(BATCH, LENGTH)
    found = answering().losses(logits, on_device(batch))
    for row in range(BATCH):
        places = [0, *np.flatnonzero(batch["answerable"][row])]
        expected = 0
        for name, each in zip(("start", "end"), np.asarray(logits[row], np.float64).T, strict=True):
            possible = each[places]
            expected += np.log(np.exp(possible).sum()) - each[batch[name][row]]
        assert float(found[row]) == pytest.approx(expected / 2, rel=1e-5, abs=1e-5)
    gradients = jax.grad(lambda x: answering().losses(x, on_device(batch)).sum())(logits)
    impossible = (batch["answerable"] == 0) & (np.arange(LENGTH) > 0)
    assert not np.any(np.asarray(gradients)[impossible])


@pytest.mark.parametrize("length", [16, 48])
def test_the_best_span_is_that_of_trying_all(length):
    batch, logits = questions(length=length, seed=4), np.array(span_logits(BATCH, length, seed=1))
    # What is not of the passage would be best by far.
    logits[batch["answerable"] == 0] += 50
    found = answering(length=length).columns(jnp.asarray(logits), on_device(batch))
    tried = 0
    for row in range(BATCH):
        places = np.flatnonzero(batch["answerable"][row])
        spans = [(a, b) for a, b in itertools.product(places, places) if 0 <= b - a < 30]
        assert float(found["null_score"][row]) == pytest.approx(float(logits[row, 0].sum()), rel=1e-6)
        if not spans:
            assert float(found["span_score"][row]) < float(found["null_score"][row])
            continue
        tried += 1
        best = max(spans, key=lambda span: logits[row, span[0], 0] + logits[row, span[1], 1])
        assert (int(found["start"][row]), int(found["end"][row])) == best
        score = logits[row, best[0], 0] + logits[row, best[1], 1]
        assert float(found["span_score"][row]) == pytest.approx(float(score), rel=1e-6)
    assert tried > BATCH / 2


def test_no_answer_is_longer_than_30_tokens():
    task = answering(length=48)
    answerable = np.ones((1, 48), np.float32)
    answerable[0, 0] = 0
    batch = {"answerable": answerable, "start": np.zeros(1, np.int32), "end": np.zeros(1, np.int32)}
    for last, allowed in ((30, True), (31, False)):
        logits = np.zeros((1, 48, 2), np.float32)
        logits[0, 1, 0], logits[0, last, 1] = 9, 8
        found = task.columns(jnp.asarray(logits), on_device(batch))
        assert (int(found["start"][0]) == 1 and int(found["end"][0]) == last) is allowed
        assert float(found["span_score"][0]) == (17 if allowed else 9)


PASSAGE = " ".join(f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh")
"""64 tokens, so several windows."""


@pytest.mark.parametrize("impossible", [False, True], ids=["1.1", "2.0"])
def test_a_network_that_knows_all_answers_scores_100(tmp_path, impossible):
    answers = ["aa ab", "dd", "gh ha hb", "hh"]
    qas = [
        {"id": text, "question": "xy", "answers": [{"text": text, "answer_start": PASSAGE.index(text)}]}
        for text in answers
    ]
    if impossible:
        qas.append({"id": "none", "question": "zz", "answers": [], "is_impossible": True})
    file = tmp_path / "squad.json"
    file.write_text(json.dumps({"data": [{"paragraphs": [{"context": PASSAGE, "qas": qas}]}]}))
    source = open_squad(file, vocabulary(), length=24, stride=8, question_length=4)
    assert len(source) > 2 * len(qas)
    assert source.unanswerable is impossible
    examples = [source.example(i, 0, 0) for i in range(len(source))]
    batch = {name: np.stack([each[name] for each in examples]) for name in examples[0]}
    task = answering(length=24, score=source.score)

    def scored(start, end):
        logits = 9 * jnp.stack([jax.nn.one_hot(start, 24), jax.nn.one_hot(end, 24)], -1)
        columns = task.columns(logits, on_device(batch))
        return task.scores({name: np.asarray(column, np.float64) for name, column in columns.items()})

    scores = scored(batch["start"], batch["end"])
    assert (scores["exact_match"], scores["f1"]) == (100, 100)
    assert 0 <= scores["loss"] < 0.05
    wrong = scored(np.where(batch["start"] > 0, 0, 5), np.where(batch["end"] > 0, 0, 5))
    assert wrong["f1"] < 50
    assert wrong["loss"] > 5


@functools.cache
def on_one_device(name, pre_norm):
    task, batch = TASKS[name]
    return updated(task(pre_norm=pre_norm), batch(), data=1)


PLANS = {
    "gpipe 2 x data 2": {"data": 2, "pipeline": 2, "schedule": "gpipe", "microbatches": 2},
    "1f1b 2 x data 2": {"data": 2, "pipeline": 2, "schedule": "1f1b", "microbatches": 4},
    "data 4 x tensor 2": {"tensor": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("name", "pre_norm"), [("classification", False), ("answering", False), ("answering", True)]
)
def test_an_update_under_a_plan_is_that_of_one_device(name, pre_norm, plan):
    task, batch = TASKS[name]
    found = updated(task(pre_norm=pre_norm), batch(), **PLANS[plan])
    assert_updated_alike(found, on_one_device(name, pre_norm), 1e-5)


@pytest.mark.parametrize("name", TASKS)
def test_the_parts_of_the_chain_evaluate_as_the_whole(name):
    make, batch = TASKS[name][0], TASKS[name][1]()
    task = make(pre_norm=True)
    params, _ = jax.jit(task.init)(jax.random.key(0))
    expected = jax.jit(EvalStep(task))((params, {}), batch)

    def chained(params, batch):
        x, keys = None, keys_of(BATCH)
        for link in task.chain():
            own = params
            for key in link.path:
                own = own[key]
            x, _ = link.apply(own, {}, x, {key: batch[key] for key in link.reads}, keys, False, 0)
        return x

    found = jax.jit(chained)(params, batch)
    assert found.keys() == expected.keys()
    for column in found:
        np.testing.assert_allclose(found[column], expected[column], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_stages_evaluate_as_one_device_does(name):
    task, batch = TASKS[name][0](), TASKS[name][1]() | {"mask": np.ones(BATCH, np.float32)}
    results = []
    for parallel in ({"data": 1}, PLANS["gpipe 2 x data 2"]):
        config = BertConfig(
            data=TextDataConfig(batch_size=BATCH),
            parallel=ParallelConfig(**parallel),
            train=TrainConfig(steps=1),
        )
        mesh = make_mesh(config.parallel, batch_size=BATCH, accumulate=1)
        plan, _ = make_plan(config, mesh, task)
        init = functools.partial(init_state, task, optax.sgd(0.1), seed=0, keep_average=False)
        weights = plan.compile_init(init)().evaluated
        step = plan.compile_eval(EvalStep(task), weights, batch)
        results.append(jax.device_get(step(weights, plan.put(batch))))
    found, expected = results
    assert found.keys() == expected.keys()
    for column in found:
        np.testing.assert_allclose(found[column], expected[column], rtol=1e-5, atol=1e-5)
