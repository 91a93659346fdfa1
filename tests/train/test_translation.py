"""The task of sequences to sequences: its sums, its metrics, its plans, and that it learns."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdl.config import Config, DataConfig, MemoryConfig, ParallelConfig, TrainConfig
from jaxdl.errors import ConfigError
from jaxdl.models.seq2seq import Seq2Seq, translate
from jaxdl.parallel.mesh import make_mesh
from jaxdl.train.program import make_plan
from jaxdl.train.seq2seq import Translation
from jaxdl.train.state import init_state
from jaxdl.train.step import TrainStep

START, END, COPY, REVERSE, FIRST, SYMBOLS, LONGEST = 1, 2, 3, 4, 5, 16, 8
WORDS, LENGTH, BATCH = FIRST + SYMBOLS + 3, LONGEST + 2, 16
SGD = optax.sgd(0.1, momentum=0.9)


def translation(*, smoothing: float = 0.1, **settings) -> Translation:
    sizes = {"words": WORDS, "depth": 2, "embed": 16, "heads": 4, "mlp": 32}
    return Translation(Seq2Seq(**(sizes | settings)), LENGTH, LENGTH, START, smoothing)


def examples(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Sequences of 4 to 8 symbols behind a marker that says whether to copy or to reverse them."""
    rng = np.random.default_rng(seed)
    batch = {name: np.zeros((count, LENGTH), np.int32) for name in ("source", "target")}
    for source, target in zip(batch["source"], batch["target"], strict=True):
        symbols = rng.integers(FIRST, FIRST + SYMBOLS, rng.integers(4, LONGEST + 1))
        marker = rng.choice([COPY, REVERSE])
        source[: len(symbols) + 1] = [marker, *symbols]
        target[: len(symbols) + 1] = [*(symbols if marker == COPY else symbols[::-1]), END]
    return batch


def test_the_loss_is_the_smoothed_cross_entropy_of_each_token_given_those_before():
    task, batch = translation(), examples(3)
    params, _ = jax.jit(task.init)(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 3)
    loss, weight, state = jax.jit(task.loss)(params, {}, batch, keys)
    expected = 0.0
    read = np.concatenate([np.full((3, 1), START), batch["target"][:, :-1]], 1).astype(np.int32)
    logits = jax.jit(task.model.apply)({"params": params}, batch["source"], read, keys)
    logits = np.asarray(logits, np.float64)
    chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row, words in zip(chances, batch["target"], strict=True):
        for told, word in zip(row[words != 0], words[words != 0], strict=True):
            expected -= 0.9 * told[word] + 0.1 * told.mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert float(weight) == np.sum(batch["target"] != 0)
    assert (loss.dtype, weight.dtype, state) == (jnp.float32, jnp.float32, {})


def test_evaluation_counts_tokens_of_each_example_without_padding():
    task, batch = translation(), examples(4)
    params, _ = jax.jit(task.init)(jax.random.key(0))
    batch["target"][3] = 0
    evaluate = jax.jit(task.evaluate)
    metrics = evaluate(params, {}, batch)
    assert sorted(metrics) == ["accuracy", "exact", "loss"]
    for metric in metrics.values():
        assert (metric.dtype, metric.shape, float(metric[3])) == (jnp.float32, (4,), 0)
    summed = jax.jit(translation(smoothing=0.0, dropout=0.0).loss)
    keys = jax.random.split(jax.random.key(1), 1)
    for i in range(3):
        one = {name: array[i : i + 1] for name, array in batch.items()}
        loss, weight, _ = summed(params, {}, one, keys)
        np.testing.assert_allclose(metrics["loss"][i], loss / weight, rtol=1e-5)
    # Targets that are what the model would say, and one that is so but for one token.
    apply, said = jax.jit(task.model.apply), np.full((4, LENGTH), START, np.int32)
    for place in range(LENGTH):
        read = np.concatenate([np.full((4, 1), START, np.int32), said[:, :-1]], 1)
        said[:, place] = apply({"params": params}, batch["source"], read)[:, place].argmax(-1)
    assert np.all(said)
    said[1, -1] = said[1, -1] % (WORDS - 1) + 1
    metrics = evaluate(params, {}, {"source": batch["source"], "target": said})
    np.testing.assert_allclose(metrics["accuracy"], [1, 1 - 1 / LENGTH, 1, 1], rtol=1e-6)
    assert metrics["exact"].tolist() == [1, 0, 1, 1]


def test_a_model_that_says_the_same_of_all_words_or_nan_is_not_right():
    task, batch = translation(), examples(2)
    params, _ = jax.jit(task.init)(jax.random.key(0))
    for value in (0.0, np.nan):
        same = params | {"embedding": jnp.full_like(params["embedding"], value)}
        assert task.evaluate(same, {}, batch)["accuracy"].tolist() == [0, 0]


def test_stages_are_refused():
    with pytest.raises(ConfigError, match=r"parallel\.pipeline does not work with an encoder-decoder"):
        translation().chain()


def trained(*, accumulate: int = 1, updates: int = 2, **parallel):
    """The losses of some updates and the parameters after them."""
    config = Config(
        data=DataConfig(batch_size=BATCH),
        parallel=ParallelConfig(**parallel),
        memory=MemoryConfig(accumulate=accumulate),
        train=TrainConfig(steps=updates),
    )
    task, batch = translation(attention_dropout=0.1), examples(BATCH)
    mesh = make_mesh(config.parallel, batch_size=BATCH, accumulate=accumulate)
    plan, replicas = make_plan(config, mesh, task)
    step = TrainStep(task, SGD, lambda _: 0.1, seed=0, accumulate=accumulate, replicas=replicas)
    init = partial(init_state, task, SGD, seed=0, keep_average=False)
    state = plan.compile_init(init)()
    compiled, losses = plan.compile_train(step, jax.eval_shape(init), batch), []
    for _ in range(updates):
        state, metrics = compiled(state, plan.put(batch))
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.params)


@pytest.fixture(scope="module")
def on_one_device():
    return trained(data=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"data": 2, "tensor": 2},
        {"data": 2, "tensor": 2, "sequence": True},
        {"data": 1, "tensor": 2, "accumulate": 4},
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"backend": "shard_map"},
    ],
    ids=lambda settings: " ".join(f"{name} {value}" for name, value in settings.items()),
)
def test_a_plan_gives_the_numbers_of_one_device(settings, on_one_device):
    """Targets are of unequal lengths, so the parts of a batch weigh differently."""
    losses, params = trained(**settings)
    np.testing.assert_allclose(losses, on_one_device[0], rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5),
        params,
        on_one_device[1],
    )


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # optax's Adam mixes its counter with floats
def test_a_small_model_learns_to_copy_and_to_reverse():
    updates = 800
    task = translation(embed=64, mlp=128, dropout=0.0)
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 100, updates)
    optimizer = optax.adam(schedule, b2=0.98)
    step = jax.jit(TrainStep(task, optimizer, schedule, seed=0), donate_argnums=0)
    state = jax.jit(partial(init_state, task, optimizer, seed=0, keep_average=False))()
    for update in range(updates):
        state, _ = step(state, examples(128, seed=update))
    batch = examples(512, seed=updates)
    search = partial(translate, task.model, beam=4, length=LENGTH + 3, start=START, end=END)
    tokens, scores = jax.jit(search)(state.params, batch["source"])
    best = np.asarray(tokens[:, 0])
    expected = np.pad(batch["target"], ((0, 0), (0, 3)))
    assert np.mean(np.all(best == expected, -1)) >= 0.99
    assert np.all(np.diff(scores, axis=1) <= 0)
    exact = jax.jit(task.evaluate)(state.params, {}, batch)["exact"]
    assert float(exact.mean()) >= 0.99
