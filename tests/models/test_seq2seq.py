"""The encoder-decoder against plain formulas, and its decoding token by token against the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from jaxdl.models import seq2seq
from jaxdl.models.decoder import DecoderLayer
from jaxdl.models.remat import Remat
from jaxdl.models.seq2seq import SIZES, Seq2Seq, sinusoids
from tests.models.test_transformer import randomized

BATCH, LENGTH, CONTEXT, EMBED, HEADS, MLP, WORDS = 2, 7, 5, 12, 3, 20, 19
SOURCE = jnp.array([[5, 3, 9, 4, 7], [8, 2, 6, 0, 0]])
TARGET = jnp.array([[1, 4, 6, 3, 18, 2, 2], [1, 9, 9, 5, 0, 0, 0]])


def small(**settings) -> Seq2Seq:
    return Seq2Seq(**{"words": WORDS, "depth": 2, "embed": EMBED, "heads": HEADS, "mlp": MLP, **settings})


def started(model: Seq2Seq):
    return randomized(jax.jit(model.init)(jax.random.key(0), SOURCE, TARGET))


def applied(model: nn.Module, *inputs) -> jax.Array:
    return jax.jit(model.apply)(*inputs)


def keys(seed: int = 3) -> jax.Array:
    return jax.random.split(jax.random.key(seed), BATCH)


def written_out(params, x, context, mask, pre_norm):
    """One decoder layer in float64 NumPy, example by example and head by head."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(y, name):
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
        return y * p[name]["scale"] + p[name]["bias"]

    def attention(y, other, seen, prefix):
        out = np.zeros_like(y)
        for head in range(HEADS):
            query, key, value = (
                z @ p[f"{prefix}_{name}"]["kernel"][:, head]
                for z, name in ((y, "query"), (other, "key"), (other, "value"))
            )
            weights = np.exp(query @ key.T / np.sqrt(EMBED / HEADS)) * seen
            weights = weights / weights.sum(-1, keepdims=True)
            out += weights @ value @ p[f"{prefix}_attention_out"]["kernel"][head]
        return out

    def perceptron(y):
        hidden = np.maximum(y @ p["mlp_in"]["kernel"] + p["mlp_in"]["bias"], 0)
        return hidden @ p["mlp_out"]["kernel"] + p["mlp_out"]["bias"]

    results = []
    for y, other, seen in zip(*(np.asarray(each, np.float64) for each in (x, context, mask)), strict=True):
        branches = {
            "self_attention_norm": lambda y: attention(y, y, np.tri(len(y)), "self"),
            "cross_attention_norm": lambda y, other=other, seen=seen: attention(y, other, seen, "cross"),
            "mlp_norm": perceptron,
        }
        for name, branch in branches.items():
            y = y + branch(norm(y, name)) if pre_norm else norm(y + branch(y), name)
        results.append(y)
    return np.stack(results)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_decoder_layer_computes_the_formula(pre_norm):
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, EMBED))
    context, mask = jax.random.normal(jax.random.key(2), (BATCH, CONTEXT, EMBED)), SOURCE != 0
    layer = DecoderLayer(HEADS, MLP, pre_norm=pre_norm, activation="relu", attention_bias=False, epsilon=1e-6)
    variables = randomized(jax.jit(layer.init)(jax.random.key(0), x, context, mask))
    expected = written_out(variables["params"], x, context, mask, pre_norm)
    np.testing.assert_allclose(layer.apply(variables, x, context, mask), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "count"), [("base", 63_045_632), ("big", 214_171_648)])
def test_the_papers_models_have_as_many_parameters_as_the_papers(size, count):
    model = Seq2Seq(37_000, **SIZES[size])
    params = jax.eval_shape(model.init, jax.random.key(0), SOURCE, TARGET)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(nn.unbox(params))) == count


def test_every_parameter_carries_the_names_of_its_axes():
    boxed = jax.eval_shape(small(pre_norm=True).init, jax.random.key(0), SOURCE, TARGET)["params"]
    specs = nn.get_partition_spec(boxed)
    assert specs["embedding"] == P("vocab", "embed")
    layers = specs["decoder"]["layers"]
    assert layers["self_query"]["kernel"] == P("layers", "embed", "heads", "head_width")
    assert layers["cross_attention_out"]["kernel"] == P("layers", "heads", "head_width", "embed")
    leaves = jax.tree.leaves(nn.unbox(boxed))
    for leaf, spec in zip(leaves, jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)), strict=True):
        assert leaf.ndim == len(spec)


def test_positions_are_those_of_the_paper():
    expected = [
        [f(place / 10_000 ** (2 * i / EMBED)) for i in range(EMBED // 2) for f in (np.sin, np.cos)]
        for place in range(9)
    ]
    np.testing.assert_allclose(sinusoids(jnp.arange(9), EMBED), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_the_model_is_its_parts_one_after_another(pre_norm):
    model = small(pre_norm=pre_norm)
    variables = started(model)
    params = variables["params"]
    settings = {"pre_norm": pre_norm, "activation": "relu", "attention_bias": False, "epsilon": 1e-6}
    table, mask = params["embedding"], SOURCE != 0

    def embedded(words):
        return table[words] * EMBED**0.5 + sinusoids(jnp.arange(words.shape[1]), EMBED)[None]

    def normed(x, name):
        return nn.LayerNorm(epsilon=1e-6).apply({"params": params[name]}, x) if pre_norm else x

    encoder = seq2seq.Encoder(2, {"heads": HEADS, "mlp": MLP, **settings})
    context = applied(encoder, {"params": params["encoder"]}, embedded(SOURCE), mask)
    x, context = embedded(TARGET), normed(context, "encoder_norm")
    for i in range(2):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], params["decoder"]["layers"])
        x = applied(DecoderLayer(HEADS, MLP, **settings), {"params": own}, x, context, mask)
    expected = normed(x, "decoder_norm") @ table.T
    logits = applied(model, variables, SOURCE, TARGET)
    assert logits.dtype == jnp.float32
    assert logits.shape == (BATCH, LENGTH, WORDS)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("drawn", [False, True])
def test_later_tokens_change_nothing_before_them(drawn):
    model = small(attention_dropout=0.1 * drawn)
    variables = started(model)
    apply = jax.jit(lambda target: model.apply(variables, SOURCE, target, keys() if drawn else None))
    before, other = apply(TARGET), apply(TARGET.at[:, 4:].set(7))
    np.testing.assert_array_equal(before[:, :4], other[:, :4])
    assert np.all(np.any(before[:, 4:] != other[:, 4:], -1))


def test_padding_of_the_source_changes_nothing():
    model = small()
    variables = started(model)
    expected = applied(model, variables, SOURCE, TARGET)
    longer = jnp.pad(SOURCE, ((0, 0), (0, 3)))
    np.testing.assert_allclose(applied(model, variables, longer, TARGET), expected, rtol=1e-5, atol=1e-5)
    alone = applied(model, variables, SOURCE[1:, :3], TARGET[1:])
    np.testing.assert_allclose(alone, expected[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("beam", [1, 3])
def test_decoding_token_by_token_equals_the_whole(beam, pre_norm):
    model = small(pre_norm=pre_norm)
    variables = started(model)
    target = jax.random.randint(jax.random.key(8), (BATCH * beam, LENGTH), 1, WORDS)
    expected = applied(model, variables, jnp.repeat(SOURCE, beam, 0), target)
    memory = model.apply(variables, SOURCE, method="remember")
    step = jax.jit(lambda past, *now: model.apply(variables, memory, past, *now, method="step"))
    past = model.past(len(target), LENGTH)
    # What lies in places that no token has been to is not looked at.
    past = jax.tree.map(lambda leaf: leaf + 1e3, past)
    for position in range(LENGTH):
        logits, past = step(past, target[:, position], jnp.int32(position))
        np.testing.assert_allclose(logits, expected[:, position], rtol=1e-5, atol=1e-5)


def gradients(model: Seq2Seq, variables):
    def loss(variables):
        return jnp.square(model.apply(variables, SOURCE, TARGET, keys()) - 1).mean()

    return jax.jit(jax.value_and_grad(loss))(variables)


def assert_near(one, other):
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


def test_a_loop_over_layers_equals_one_after_another():
    one, other = small(attention_dropout=0.1), small(attention_dropout=0.1, scan=False)
    variables = started(one)
    assert_near(started(other), variables)
    assert_near(gradients(one, variables), gradients(other, variables))


@pytest.mark.parametrize("level", ["dots", "blocks", "full", "names:cross_attention,mlp_in,query"])
@pytest.mark.parametrize("scan", [True, False])
def test_remat_changes_no_gradient(level, scan):
    remat = Remat.parse(level, dots=seq2seq.DOTS, others=seq2seq.OTHERS)
    variables = started(small())
    expected = gradients(small(), variables)
    assert_near(gradients(small(remat=remat, scan=scan), variables), expected)


def test_dropout_depends_on_the_example_and_not_on_its_batch():
    model = small(attention_dropout=0.1)
    variables = started(model)
    whole = applied(model, variables, SOURCE, TARGET, keys())
    for i in range(BATCH):
        part = slice(i, i + 1)
        alone = applied(model, variables, SOURCE[part], TARGET[part], keys()[part])
        np.testing.assert_allclose(alone, whole[part], rtol=1e-5, atol=1e-5)
    assert not np.allclose(whole, applied(model, variables, SOURCE, TARGET, keys(4)))
    assert not np.allclose(whole, applied(model, variables, SOURCE, TARGET))


def test_no_two_parts_drop_the_same():
    """One table and equal words: only the random keys tell source and target, encoder and decoder apart."""
    seen = []

    def watched(x, rate, keys):
        if keys is not None:  # shapes are worked out without
            seen.extend(np.asarray(jax.random.key_data(keys)).tolist())
        return x

    model = small(scan=False, attention_dropout=0.1)
    variables = started(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxdl.models.attention.drop", watched)
        patch.setattr("jaxdl.models.seq2seq.drop", watched)
        model.apply(variables, SOURCE, TARGET, keys())
    # Two embeddings, two layers of three draws and two of five, of each example.
    assert len(seen) == (2 + 2 * 3 + 2 * 5) * BATCH
    assert len({tuple(key) for key in seen}) == len(seen)


@jax.numpy_dtype_promotion("standard")  # JAX's own attention mixes dtypes on its way to float32
def test_bfloat16_gives_float32_logits_near_those_of_float32():
    variables = started(small())
    model = small(dtype=jnp.bfloat16)
    logits = applied(model, variables, SOURCE, TARGET)
    assert logits.dtype == jnp.float32
    expected = applied(small(), variables, SOURCE, TARGET)
    np.testing.assert_allclose(logits, expected, atol=0.1 * float(jnp.abs(expected).max()))
    memory = model.apply(variables, SOURCE, method="remember")
    first, past = model.apply(
        variables, memory, model.past(BATCH, LENGTH), TARGET[:, 0], jnp.int32(0), method="step"
    )
    assert {leaf.dtype for leaf in past} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(first, logits[:, 0], atol=0.1 * float(jnp.abs(expected).max()))
