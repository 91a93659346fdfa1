"""BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805) in parts: embeddings, encoder, heads.

The parts are modules of their own, so that a task takes those it needs and a pipeline can cut between them:

    words -> Embeddings -> Encoder -> MaskedWords               which word was hidden
                                   -> Pooler -> Projection      a class of the whole sequence
                                   -> Projection                where an answer starts and ends
"""

# mypy: allow-subclassing-any, allow-untyped-decorators, disable-error-code="no-any-return"
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxdl.models.attention import between, drop, fold_in, layer_norm
from jaxdl.models.logical import constrain
from jaxdl.models.projection import Projection, look_up
from jaxdl.models.transformer import Encoder

_NEVER = -1e9
"""Logit of what cannot be."""

_OUTSIDE = 2**20
"""Place for the dropout of what is not in a layer, which has its number."""

_normal = nn.initializers.truncated_normal(0.02)


@dataclass(frozen=True)
class Sizes:
    """How large a BERT is.

    Attributes:
        depth: Encoder layers.
        width: Of the hidden states.
        heads: Attention heads of each layer.
        mlp: Width of the hidden layer of each perceptron.
        words: Rows of the word table.
        positions: The longest sequence.
        types: Rows of the table of types (first or second text).
        unused: Rows at the end of the word table that stand for no word, and never are the answer.
    """

    depth: int
    width: int
    heads: int
    mlp: int
    words: int = 30_522
    positions: int = 512
    types: int = 2
    unused: int = 0


SIZES: Mapping[str, Sizes] = {
    "bert_tiny": Sizes(depth=2, width=128, heads=2, mlp=512),
    "bert_mini": Sizes(depth=4, width=256, heads=4, mlp=1024),
    "bert_small": Sizes(depth=4, width=512, heads=8, mlp=2048),
    "bert_medium": Sizes(depth=8, width=512, heads=8, mlp=2048),
    "bert_base": Sizes(depth=12, width=768, heads=12, mlp=3072),
    "bert_large": Sizes(depth=24, width=1024, heads=16, mlp=4096),
}
"""Those of Devlin et al. 2018, and the smaller ones of Turc et al. 2019 (https://arxiv.org/abs/1908.08962)."""


class Embeddings(nn.Module):
    """The sum of the vectors of word, position and type, normalised.

    Attributes:
        sizes: Of the tables.
        dropout: Share of the result that is dropped in training.
        epsilon: Of the layer normalisation.
        dtype: Dtype of computation and result.
        param_dtype: Dtype of the parameters.
    """

    sizes: Sizes
    dropout: float = 0.1
    epsilon: float = 1e-12
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, word: jax.Array, position: jax.Array, kind: jax.Array, keys: jax.Array | None = None
    ) -> jax.Array:
        """Gives the vectors [batch, length, width] of a sequence.

        Args:
            word: Numbers of words, int32 [batch, length].
            position: Places in the text, int32 [batch, length].
            kind: Types, int32 [batch, length].
            keys: Random key of each example's dropout, [batch]; None switches it off.
        """
        sizes = self.sizes
        # Only the table of words is large: the others stay whole, as one product with rows that are few.
        words = self._table("word", sizes.words, "vocab")
        positions = self._table("position", sizes.positions, None)
        kinds = self._table("type", sizes.types, None)
        x = look_up(words, word) + between(jnp.take(positions, position, axis=0))
        x = x + between(jnp.take(kinds, kind, axis=0))
        x = layer_norm("norm", self.epsilon, self.dtype, self.param_dtype)(x)
        return drop(between(x), self.dropout, keys)

    @nn.nowrap
    def _table(self, name: str, rows: int, axis: str | None) -> jax.Array:
        return _Table(rows, self.sizes.width, axis, self.param_dtype, name=name)().astype(self.dtype)


class _Table(nn.Module):
    """A table of vectors, whose parameter has the name that weight decay looks for."""

    rows: int
    width: int
    axis: str | None
    param_dtype: DTypeLike

    @nn.compact
    def __call__(self) -> jax.Array:
        init = nn.with_logical_partitioning(_normal, (self.axis, "embed"))
        table: jax.Array = self.param("embedding", init, (self.rows, self.width), self.param_dtype)
        return table


class Pooler(nn.Module):
    """A layer over the first token, which stands for the whole sequence.

    Attributes:
        dtype: Dtype of computation and result.
        param_dtype: Dtype of the parameters.
    """

    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Maps hidden states [batch, length, width] to [batch, width]."""
        width = hidden.shape[-1]
        dense = Projection((width,), ("embed",), ("pooled",), self.dtype, self.param_dtype, name="dense")
        first = constrain(hidden, "batch", None, None)[:, 0]
        pooled: jax.Array = jnp.tanh(dense(first))
        return pooled


class MaskedWords(nn.Module):
    """Tells which words were hidden, with the table of words as the last layer's kernel.

    Attributes:
        words: Rows of the table.
        unused: How many at its end stand for no word.
        epsilon: Of the layer normalisation.
        dtype: Dtype of computation; logits are float32.
        param_dtype: Dtype of the parameters.
    """

    words: int
    unused: int = 0
    epsilon: float = 1e-12
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, hidden: jax.Array, position: jax.Array, table: jax.Array) -> jax.Array:
        """Gives the logits at some places, float32 [batch, places, words].

        Args:
            hidden: Hidden states [batch, length, width].
            position: Places to look at, int32 [batch, places].
            table: Of words, [words, width].
        """
        hidden = constrain(hidden, "batch", None, None)
        x = jnp.take_along_axis(hidden, position[..., None], axis=1)
        width = x.shape[-1]
        dense = Projection((width,), ("embed",), ("pooled",), self.dtype, self.param_dtype, name="dense")
        x = jax.nn.gelu(dense(x), approximate=False)
        x = layer_norm("norm", self.epsilon, self.dtype, self.param_dtype)(x)
        bias = self.param(
            "bias", nn.with_logical_partitioning(nn.initializers.zeros, ("vocab",)), (self.words,),
            self.param_dtype,
        )  # fmt: skip
        table = constrain(table.astype(self.dtype), "vocab", None)
        logits = jnp.einsum("bpe,ve->bpv", x, table, preferred_element_type=jnp.float32)
        logits = logits + bias.astype(jnp.float32)[None, None]
        if self.unused:
            logits = jnp.where(jnp.arange(self.words) < self.words - self.unused, logits, _NEVER)
        return constrain(logits, "batch", None, "vocab")


def flops(sizes: Sizes, *, length: int, predictions: int, pooled: bool) -> float:
    """Counts the floating-point operations of a training step for each sequence.

    Products with parameters and attention's own two, forward and, twice as much, backward; neither what
    rematerialisation computes again nor normalisations, softmax and activations count, and no part of
    attention is taken off: every token attends to every other.

    Args:
        sizes: Of the network.
        length: Tokens in a sequence.
        predictions: Hidden words to tell in each; 0: the network has no such head.
        pooled: Whether there is a pooler.

    Returns:
        6 (P L + H) + 12 d w L^2, with P the parameters of the d layers' kernels, w their width, L the
        length and H those of the heads, as often as they are used.
    """
    width = sizes.width
    layer = 4 * width**2 + 2 * width * sizes.mlp
    heads = predictions * (width**2 + width * sizes.words) + pooled * width**2
    return 6.0 * (sizes.depth * layer * length + heads) + 12.0 * sizes.depth * width * length**2


def with_words(sizes: Sizes, words: int, *, multiple: int = 1) -> Sizes:
    """Gives a table of at least so many words, rounded up to a multiple, so that devices can share it."""
    return replace(sizes, words=words + -words % multiple, unused=-words % multiple)


@dataclass(frozen=True, eq=False)
class Bert:
    """Embeddings and encoder, with parameters `embeddings` and `encoder` (and `final_norm`) in one tree.

    Attributes:
        sizes: Of the network.
        encoder: The layers, `sizes.depth` of them.
        dropout: Share of the embeddings that is dropped in training.
        epsilon: Of the layer normalisations outside the encoder.
        dtype: Dtype of computation.
        param_dtype: Dtype of the parameters.
    """

    sizes: Sizes
    encoder: Encoder
    dropout: float = 0.1
    epsilon: float = 1e-12
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @property
    def types(self) -> dict[str, DTypeLike]:
        """Dtypes of the parts, as keywords."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    @property
    def embeddings(self) -> Embeddings:
        """The first part."""
        return Embeddings(self.sizes, self.dropout, self.epsilon, **self.types)

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Draws the parameters, with the names of their axes."""
        keys, one = jax.random.split(key), jnp.zeros((1, 1), jnp.int32)
        hidden = jnp.zeros((1, 1, self.sizes.width), self.dtype)
        params = {
            "embeddings": self.embeddings.init(keys[0], one, one, one)["params"],
            "encoder": self.encoder.init(keys[1], hidden, one)["params"],
        }
        if self.pre_norm:
            params["final_norm"] = self._final_norm.init(keys[0], hidden)["params"]
        return params

    def embed(self, params: Any, batch: Mapping[str, jax.Array], keys: jax.Array | None) -> jax.Array:
        """Gives the vectors [batch, length, width] of sequences.

        Args:
            params: Those of the embeddings.
            batch: `word`, `position` and `type`, int32 [batch, length].
            keys: Random key of each example's dropout, [batch]; None switches it off.
        """
        inputs = (batch["word"], batch["position"], batch["type"])
        x: jax.Array = self.embeddings.apply({"params": params}, *inputs, fold_in(keys, _OUTSIDE))
        return x

    def encode(self, params: Any, batch: Mapping[str, jax.Array], keys: jax.Array | None) -> jax.Array:
        """Gives the last hidden states [batch, length, width].

        Args:
            params: Those of embeddings and encoder, among others.
            batch: As for `embed`, and `segment`, int32 [batch, length]: a token attends to those of its own
                segment; 0 is padding.
            keys: As for `embed`.
        """
        x = self.embed(params["embeddings"], batch, keys)
        hidden: jax.Array = self.encoder.apply({"params": params["encoder"]}, x, batch["segment"], keys)
        return self.finish(params["final_norm"], hidden) if self.pre_norm else hidden

    @property
    def pre_norm(self) -> bool:
        """Whether layers normalise what comes in, so that what comes out has yet to be."""
        return bool(self.encoder.layer.get("pre_norm", False))

    def finish(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Normalises what the last layer gives, with the parameters `final_norm`; for `pre_norm` only."""
        finished: jax.Array = self._final_norm.apply({"params": params}, hidden)
        return finished

    @property
    def _final_norm(self) -> nn.LayerNorm:
        return layer_norm(None, self.epsilon, self.dtype, self.param_dtype)
