"""Weights to start from: those of runs of ours and of Hugging Face's layout."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdl.config import BertModelConfig
from jaxdl.errors import CheckpointError, ConfigError
from jaxdl.models.bert import SIZES, Sizes
from jaxdl.models.huggingface import save_bert
from jaxdl.train.checkpoint import Checkpointer
from jaxdl.train.finetuning import SequenceClassification
from jaxdl.train.loop import put_over
from jaxdl.train.pretrained import (
    NETWORK,
    described,
    description,
    initial_values,
    newest_parameters,
    sizes_of,
)
from jaxdl.train.pretraining import Pretraining
from jaxdl.train.state import init_state
from tests.models.test_bert import SMALL, bert_of

HEADS = ("pooler", "classifier")


def pretraining(**settings):
    return Pretraining(bert_of(**settings), 8, 2, pairs=True)


def classification(sizes=SMALL, **settings):
    return SequenceClassification(bert_of(sizes, **settings), 8, classes=3)


def filled(tree, seed):
    """Random values of the shapes, so that nothing is 0 or 1 by chance."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), tree)


@functools.cache
def states(keep_average, pre_norm=False):
    """Two states of a pre-training with Adam's moments, all random."""
    task = pretraining(pre_norm=pre_norm)
    shapes = jax.eval_shape(lambda: init_state(task, optax.adamw(0.1), seed=0, keep_average=keep_average))
    return [filled(shapes, seed) for seed in (1, 2)]


def saved(directory, *, keep_average=False, pre_norm=False):
    """A directory like that of a run, with checkpoints 1 and 2."""
    with Checkpointer(directory / "checkpoints", keep=2) as checkpointer:
        for step, state in enumerate(states(keep_average, pre_norm), 1):
            checkpointer.save(step, state, record={}, score=None)
    (directory / NETWORK).write_text(description(bert_of(pre_norm=pre_norm)))
    return directory


def shapes_of(task):
    return jax.eval_shape(lambda: task.init(jax.random.key(0)))[0]


def assert_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_the_newest_parameters_are_read_without_the_optimizers_state_for_another_task(tmp_path):
    directory = saved(tmp_path) / "checkpoints"
    shapes = shapes_of(classification())
    found = newest_parameters(directory, shapes)
    newest = states(False)[1].params
    for name in ("embeddings", "encoder", "pooler"):
        assert_bits(found[name], newest[name])
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found[name]))
    assert found["classifier"] == shapes["classifier"]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(found["classifier"]))
    assert "masked_words" not in found


def test_moving_averages_are_preferred(tmp_path):
    found = newest_parameters(saved(tmp_path, keep_average=True) / "checkpoints", shapes_of(pretraining()))
    state = states(True)[1]
    assert_bits(found, state.ema[0])
    assert not np.array_equal(found["pooler"]["dense"]["kernel"], state.params["pooler"]["dense"]["kernel"])


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (replace(SMALL, words=40), r"embeddings/word/embedding has the shape \(32, 16\), .* \(40, 16\)"),
        (replace(SMALL, depth=3), r"encoder/layers/\S+ has the shape \(2, .* network \(3, "),
        (replace(SMALL, heads=4), r"encoder/layers/\S+ has the shape"),
    ],
)
def test_parameters_of_another_shape_are_refused(tmp_path, sizes, told):
    directory = saved(tmp_path) / "checkpoints"
    with pytest.raises(ConfigError, match=told):
        newest_parameters(directory, shapes_of(classification(sizes)))


def test_a_checkpoint_without_any_parameter_of_the_network_is_refused(tmp_path):
    directory = saved(tmp_path) / "checkpoints"
    with pytest.raises(ConfigError, match="no parameter of this network"):
        newest_parameters(directory, {"stem": {"kernel": jax.ShapeDtypeStruct((3,), jnp.float32)}})


def spoil(directory, step):
    """Flips a bit of the largest file of a checkpoint."""
    path = max((directory / str(step)).rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_and_none_that_is_sound_refused(tmp_path):
    directory = saved(tmp_path) / "checkpoints"
    spoil(directory, 2)
    assert_bits(newest_parameters(directory, shapes_of(pretraining())), states(False)[0].params)
    spoil(directory, 1)
    with pytest.raises(CheckpointError):
        newest_parameters(directory, shapes_of(pretraining()))


def test_a_directory_without_checkpoints_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="has no checkpoint to start from"):
        newest_parameters(tmp_path / "checkpoints", shapes_of(pretraining()))


def test_sizes_are_those_of_the_architecture_and_what_is_set_besides():
    assert sizes_of(BertModelConfig(name="bert_base"), 30_522) == (SIZES["bert_base"], 1e-12)
    model = BertModelConfig(name="bert_tiny", depth=3, width=48, heads=4, positions=64, words_multiple=8)
    sizes, _ = sizes_of(model, 1001)
    assert sizes == Sizes(depth=3, width=48, heads=4, mlp=512, words=1008, positions=64, unused=7)
    with pytest.raises(ConfigError, match=r"model\.width 129 is not a multiple of model\.heads 2"):
        sizes_of(BertModelConfig(name="bert_tiny", width=129), 100)


def test_sizes_of_a_runs_network_are_those_that_it_wrote(tmp_path):
    sizes = replace(SMALL, words=40, unused=3)
    (tmp_path / NETWORK).write_text(description(bert_of(sizes)))
    model = BertModelConfig(name="pretrained", weights=str(tmp_path))
    assert sizes_of(model, 37) == (sizes, 1e-12)
    with pytest.raises(ConfigError, match=r"knows 40 words, and the vocabulary has 41: set data\.vocabulary"):
        sizes_of(model, 41)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_network_that_normalises_elsewhere_is_refused(tmp_path, pre_norm):
    (tmp_path / NETWORK).write_text(description(bert_of(pre_norm=pre_norm)))
    model = BertModelConfig(name="pretrained", weights=str(tmp_path), pre_norm=not pre_norm)
    with pytest.raises(ConfigError, match=rf"model\.pre_norm is {str(pre_norm).lower()} in "):
        described(model)
    assert described(replace(model, pre_norm=pre_norm)) == (SMALL, 1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", '"x"', '{"sizes": {}, "epsilon": 1, "pre_norm": false}',
        '{"sizes": 3, "epsilon": 1e-12, "pre_norm": false}',
        '{"sizes": {"depth": 1, "width": 1, "heads": 1, "more": 1}, "epsilon": 1, "pre_norm": true}',
        "\xff",
    ],
)  # fmt: skip
def test_a_damaged_description_is_refused(tmp_path, text):
    (tmp_path / NETWORK).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"network\.json cannot be read"):
        described(BertModelConfig(name="pretrained", weights=str(tmp_path)))


def test_a_hugging_face_network_normalises_after_branches(tmp_path):
    save_bert(tmp_path, shapes_filled(), SMALL, epsilon=1e-3)
    model = BertModelConfig(name="pretrained", weights=str(tmp_path))
    assert described(model) == (SMALL, 1e-3)
    with pytest.raises(ConfigError, match=r"model\.pre_norm true: .* normalises after branches"):
        described(replace(model, pre_norm=True))


def shapes_filled():
    return filled(shapes_of(pretraining()), 7)


def started(task, model):
    """The state with which a run begins, as the loop makes it."""
    fresh = jax.jit(lambda: init_state(task, optax.sgd(0.1), seed=0, keep_average=True))()
    params, _ = put_over((fresh.params, fresh.model_state), initial_values(model, task))
    return fresh, params


@pytest.mark.parametrize("pre_norm", [False, True])
def test_fine_tuning_starts_from_a_runs_very_values_and_a_random_head(tmp_path, pre_norm):
    task = classification(pre_norm=pre_norm)
    model = BertModelConfig(name="pretrained", weights=str(saved(tmp_path, pre_norm=pre_norm)))
    fresh, params = started(task, model)
    newest = states(False, pre_norm)[1].params
    for name in params.keys() - {"classifier"}:
        assert_bits(params[name], newest[name])
    assert ("final_norm" in params) is pre_norm
    assert_bits(params["classifier"], fresh.params["classifier"])


def test_fine_tuning_starts_from_the_very_values_of_a_hugging_face_directory_and_a_random_head(tmp_path):
    given = shapes_filled()
    save_bert(tmp_path, given, SMALL, epsilon=1e-12)
    fresh, params = started(classification(), BertModelConfig(name="pretrained", weights=str(tmp_path)))
    for name in ("embeddings", "encoder", "pooler"):
        assert_bits(params[name], given[name])
    assert_bits(params["classifier"], fresh.params["classifier"])
    assert all(np.any(leaf) for leaf in jax.tree.leaves(params["classifier"]["kernel"]))


def test_without_weights_all_is_random():
    assert initial_values(BertModelConfig(name="bert_tiny"), classification()) is None


def test_a_head_for_other_classes_starts_at_random(tmp_path):
    shapes = shapes_of(classification())
    task = classification()
    state = filled(jax.eval_shape(lambda: init_state(task, optax.sgd(0.1), seed=0, keep_average=False)), 3)
    with Checkpointer(tmp_path / "checkpoints", keep=1) as checkpointer:
        checkpointer.save(1, state, record={}, score=None)
    other = SequenceClassification(bert_of(), 8, classes=7)
    found = newest_parameters(tmp_path / "checkpoints", shapes_of(other))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(found["classifier"]))
    assert_bits(found["pooler"], state.params["pooler"])
    assert_bits(newest_parameters(tmp_path / "checkpoints", shapes)["classifier"], state.params["classifier"])


def test_what_a_network_needs_and_the_weights_have_not_is_refused(tmp_path):
    directory = saved(tmp_path / "run") / "checkpoints"
    with pytest.raises(ConfigError, match=r"final_norm/\w+ is missing"):
        newest_parameters(directory, shapes_of(pretraining(pre_norm=True)))


@pytest.mark.parametrize("name", ["pretrained", "bert_tiny"])
def test_the_networks_own_epsilon_and_normalisation_count_however_it_is_named(tmp_path, name):
    epsilon = 0.25
    run = tmp_path / "run"
    run.mkdir()
    (run / NETWORK).write_text(description(replace(bert_of(), epsilon=epsilon)))
    assert sizes_of(BertModelConfig(name=name, weights=str(run)), 10)[1] == epsilon
    with pytest.raises(ConfigError, match=r"model\.pre_norm is false"):
        sizes_of(BertModelConfig(name=name, weights=str(run), pre_norm=True), 10)


def test_a_pretrained_table_of_words_can_be_rounded_up(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / NETWORK).write_text(description(bert_of()))
    multiple = SMALL.words + 5
    sizes, _ = sizes_of(BertModelConfig(name="pretrained", weights=str(run), words_multiple=multiple), 10)
    assert (sizes.words, sizes.unused) == (multiple, 5)


@pytest.mark.parametrize("weights", ["~nobody_of_this_name/x", "x" * 300])
def test_impossible_directories_of_weights_are_told_of(weights):
    with pytest.raises(CheckpointError):
        sizes_of(BertModelConfig(name="pretrained", weights=weights), 10)
