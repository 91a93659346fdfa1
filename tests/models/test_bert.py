"""BERT's parts against plain formulas, packed texts, and the count of operations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.extend.core import jaxprs_in_params

from jaxdl.models.attention import DOTS, OTHERS
from jaxdl.models.bert import (
    SIZES,
    Bert,
    Embeddings,
    MaskedWords,
    Pooler,
    Sizes,
    flops,
    with_words,
)
from jaxdl.models.losses import cross_entropy, is_first
from jaxdl.models.remat import Remat
from jaxdl.models.transformer import Encoder
from jaxdl.train.pretraining import Pretraining
from tests.models.test_transformer import randomized

SMALL = Sizes(depth=2, width=16, heads=2, mlp=24, words=32, positions=16)


def bert_of(sizes=SMALL, *, dropout=0.1, scan=True, remat="none", pipeline=None, **layer):
    """A small BERT; what is given of `layer` are settings of its layers."""
    settings = {"heads": sizes.heads, "mlp": sizes.mlp, "dropout": dropout, "attention_dropout": dropout}
    kept = Remat.parse(remat, dots=DOTS, others=OTHERS)
    return Bert(sizes, Encoder(sizes.depth, settings | layer, kept, scan, pipeline), dropout)


def text_of(examples, length, *, words=32, seed=0):
    """Two segments and padding in each example, with their places and both types."""
    rng = np.random.default_rng(seed)
    batch = {name: np.zeros((examples, length), np.int32) for name in ("word", "segment", "type", "position")}
    for row in range(examples):
        first, second = sorted(rng.integers(1, length + 1, 2))
        batch["word"][row, :second] = rng.integers(1, words, second)
        batch["segment"][row, :second] = [1] * first + [2] * (second - first)
        batch["position"][row, :second] = [*range(first), *range(second - first)]
        batch["type"][row, :second] = rng.integers(0, 2, second)
    return batch


def random_params(bert, seed=0):
    return randomized({"params": bert.init(jax.random.key(seed))})["params"]


def plain(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def normalised(x, params, epsilon=1e-12):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
    return x * params["scale"] + params["bias"]


def keys_of(examples, seed=3):
    return jax.random.split(jax.random.key(seed), examples)


def test_embeddings_are_the_normalised_sum_of_three_tables():
    batch = text_of(3, 9)
    part = Embeddings(SMALL)
    inputs = (batch["word"], batch["position"], batch["type"])
    variables = randomized(part.init(jax.random.key(0), *inputs))
    p = plain(variables["params"])
    summed = sum(
        p[name]["embedding"][index] for name, index in zip(("word", "position", "type"), inputs, strict=True)
    )
    np.testing.assert_allclose(
        part.apply(variables, *inputs), normalised(summed, p["norm"]), rtol=1e-5, atol=1e-5
    )


def test_embeddings_drop_what_each_examples_key_says():
    batch = text_of(2, 9)
    part = Embeddings(SMALL, dropout=0.5)
    inputs = (batch["word"], batch["position"], batch["type"])
    variables = randomized(part.init(jax.random.key(0), *inputs))
    whole, keys = part.apply(variables, *inputs), keys_of(2)
    dropped = part.apply(variables, *inputs, keys)
    kept = dropped != 0
    assert 0.3 < float(kept.mean()) < 0.7
    np.testing.assert_allclose(dropped[kept], 2 * whole[kept], rtol=1e-6)
    np.testing.assert_array_equal(part.apply(variables, *inputs, keys[::-1])[0] == 0, ~kept[1])


def test_the_pooler_is_a_layer_over_the_first_token():
    hidden = jax.random.normal(jax.random.key(1), (3, 5, 16))
    variables = randomized(Pooler().init(jax.random.key(0), hidden))
    p = plain(variables["params"])["dense"]
    expected = np.tanh(np.asarray(hidden, np.float64)[:, 0] @ p["kernel"] + p["bias"])
    np.testing.assert_allclose(Pooler().apply(variables, hidden), expected, rtol=1e-5, atol=1e-6)


def masked_words(unused=0, seed=0):
    part = MaskedWords(32, unused)
    keys = jax.random.split(jax.random.key(seed), 3)
    hidden, table = jax.random.normal(keys[0], (3, 7, 16)), jax.random.normal(keys[1], (32, 16))
    position = jnp.array([[0, 6, 2], [5, 5, 0], [1, 2, 3]])
    variables = randomized(part.init(keys[2], hidden, position, table))
    return part, variables, hidden, position, table


def test_hidden_words_are_told_with_the_table_of_words():
    part, variables, hidden, position, table = masked_words()
    p = plain(variables["params"])
    x = np.take_along_axis(np.asarray(hidden, np.float64), np.asarray(position)[..., None], 1)
    x = x @ p["dense"]["kernel"] + p["dense"]["bias"]
    x = normalised(x * 0.5 * (1 + np.vectorize(math.erf)(x / np.sqrt(2))), p["norm"])
    expected = x @ np.asarray(table, np.float64).T + p["bias"]
    logits = part.apply(variables, hidden, position, table)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_rows_that_stand_for_no_word_never_win_and_take_no_probability():
    part, variables, hidden, position, table = masked_words(unused=5)
    table = table.at[27:].set(100.0)
    params = variables["params"]
    params["bias"] = params["bias"].at[27:].set(1e6)
    label = jnp.array([[1, 26, 3], [0, 4, 9], [7, 7, 20]])

    def losses(params, table):
        return cross_entropy(part.apply({"params": params}, hidden, position, table), label)

    logits = part.apply(variables, hidden, position, table)
    assert int(logits.argmax(-1).max()) < 27
    np.testing.assert_array_equal(jax.nn.softmax(logits)[..., 27:], 0)
    np.testing.assert_array_equal(losses(params, table), cross_entropy(logits[..., :27], label))
    by_params, by_table = jax.grad(lambda *given: losses(*given).sum(), (0, 1))(params, table)
    assert not np.any(by_table[27:])
    assert not np.any(by_params["bias"][27:])
    assert np.all(np.any(by_table[:27], axis=-1))


@pytest.mark.parametrize(("words", "multiple", "rows"), [(30, 1, 30), (30, 8, 32), (32, 8, 32), (33, 8, 40)])
def test_a_table_of_words_is_rounded_up(words, multiple, rows):
    sizes = with_words(SMALL, words, multiple=multiple)
    assert (sizes.words, sizes.unused) == (rows, rows - words)
    assert (sizes.depth, sizes.positions) == (SMALL.depth, SMALL.positions)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_texts_that_are_packed_into_a_sequence_do_not_see_each_other(pre_norm):
    bert = bert_of(pre_norm=pre_norm)
    params = random_params(bert)
    rng = np.random.default_rng(0)
    words, types = rng.integers(1, 32, 9), rng.integers(0, 2, 9)

    def encoded(parts, padding):
        """Hidden states of one sequence of the given parts of the words."""
        index = np.concatenate([np.arange(*part) for part in parts])
        ends = (0, padding)
        row = {
            "word": np.pad(words[index], ends, constant_values=17),
            "type": np.pad(types[index], ends, constant_values=1),
            "segment": np.pad(np.repeat([*range(1, len(parts) + 1)], [b - a for a, b in parts]), ends),
            "position": np.pad(np.concatenate([np.arange(b - a) for a, b in parts]), ends),
        }
        batch = {name: jnp.asarray(value[None], jnp.int32) for name, value in row.items()}
        return jax.jit(bert.encode)(params, batch, None)[0]

    packed = encoded([(0, 4), (4, 9)], padding=3)
    np.testing.assert_allclose(packed[:4], encoded([(0, 4)], 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(packed[4:9], encoded([(4, 9)], 5)[:5], rtol=1e-5, atol=1e-5)
    together = encoded([(0, 9)], padding=3)
    assert float(jnp.abs(together[:4] - packed[:4]).max()) > 1e-2


def test_a_network_that_normalises_first_normalises_its_result_too():
    bert = bert_of(pre_norm=True)
    params, batch = random_params(bert), text_of(3, 9)
    x = bert.embed(params["embeddings"], batch, None)
    hidden = bert.encoder.apply({"params": params["encoder"]}, x, batch["segment"], None)
    expected = normalised(np.asarray(hidden, np.float64), plain(params["final_norm"]))
    np.testing.assert_allclose(bert.encode(params, batch, None), expected, rtol=1e-5, atol=1e-5)
    assert "final_norm" not in bert_of().init(jax.random.key(0))


@pytest.mark.parametrize("shape", [(6,), (3, 4)])
def test_cross_entropy_is_that_of_optax(shape):
    logits = 20 * jax.random.normal(jax.random.key(0), (*shape, 11))
    label = jax.random.randint(jax.random.key(1), shape, 0, 11)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    np.testing.assert_allclose(cross_entropy(logits, label), expected, rtol=1e-6, atol=1e-5)
    gradients = jax.grad(lambda x: cross_entropy(x, label).sum())(logits)
    expected = jax.nn.softmax(logits) - jax.nn.one_hot(label, 11)
    np.testing.assert_allclose(gradients, expected, rtol=1e-5, atol=1e-6)
    assert cross_entropy(logits.astype(jnp.bfloat16), label).dtype == jnp.float32


@pytest.mark.parametrize(
    ("logits", "label", "right"),
    [
        ([1.0, 3.0, 2.0], 1, True),
        ([1.0, 3.0, 2.0], 2, False),
        ([-5.0, -3.0, -4.0], 1, True),
        ([3.0, 3.0, 2.0], 0, False),
        ([0.0, 0.0, 0.0], 0, False),
        ([math.nan, 3.0, 2.0], 1, False),
        ([1.0, math.nan, 2.0], 1, False),
        ([math.nan] * 3, 1, False),
        ([-math.inf, 3.0, 2.0], 1, True),
        ([1.0, math.inf, 2.0], 1, True),
        ([math.inf, math.inf, 2.0], 1, False),
    ],
)
def test_only_a_logit_above_all_others_is_right(logits, label, right):
    assert bool(is_first(jnp.array([logits]), jnp.array([label]))[0]) is right


def multiplied(jaxpr):
    """Floating-point operations of all products of matrices in a program without loops."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(out) * math.prod(left[axis] for axis in summed)
        assert equation.primitive.name not in ("scan", "while")
        for inner in jaxprs_in_params(equation.params):
            total += multiplied(inner)
    return total


@pytest.mark.parametrize("pairs", [False, True])
def test_flops_are_those_of_all_products_forward_and_backward(pairs):
    sizes = Sizes(depth=3, width=16, heads=4, mlp=40, words=50, positions=12)
    task = Pretraining(bert_of(sizes, scan=False), length=12, predictions=5, pairs=pairs)
    examples = 4
    batch = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in task.example(examples).items()}
    batch["scale"] = jnp.ones(examples)
    params, _ = task.init(jax.random.key(0))

    def loss(params):
        return task.loss(params, {}, batch, keys_of(examples))[0]

    counted = multiplied(jax.make_jaxpr(jax.grad(loss))(params).jaxpr) / examples
    # The two logits of the next sentence are left out.
    counted -= 6 * 2 * sizes.width if pairs else 0
    assert flops(sizes, length=12, predictions=5, pooled=pairs) == counted
    assert task.work().flops == counted
    assert task.work().tokens == 12


def test_flops_of_bert_base_are_the_known_number():
    """Six operations a parameter of the layers (84.9 million) and token, and attention's own products."""
    counted = flops(SIZES["bert_base"], length=128, predictions=0, pooled=False)
    assert counted == 6 * 84_934_656 * 128 + 12 * 12 * 768 * 128**2


@pytest.mark.parametrize(
    ("remat", "scan"),
    [("none", False), ("dots", False), ("blocks", True), ("full", True)],
)
def test_how_layers_are_compiled_changes_neither_loss_nor_gradients(remat, scan):
    batch, keys = text_of(4, 9), keys_of(4)

    def differentiated(**settings):
        bert = bert_of(**settings)
        params = nn.unbox(bert.init(jax.random.key(0)))
        loss = jax.value_and_grad(lambda params: (bert.encode(params, batch, keys) ** 3).sum())
        return jax.jit(loss)(params)

    loss, gradients = differentiated(remat=remat, scan=scan)
    expected, expected_gradients = differentiated()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(jnp.abs(other).max()) + 1e-6)
