"""The Transformer as it was published: an encoder, a decoder and one table of words for both.

Vaswani et al. 2017, "Attention Is All You Need" (https://arxiv.org/abs/1706.03762). Kernels start from
the truncated normal distribution of `jaxdl.models.projection`, and not from that of the authors'
programs.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxdl.models import attention, decoder
from jaxdl.models.attention import Implementation, drop, fold_in, layer_norm
from jaxdl.models.beam import beam_search
from jaxdl.models.decoder import Decoder, Memory, Past
from jaxdl.models.logical import constrain
from jaxdl.models.projection import look_up
from jaxdl.models.remat import Remat
from jaxdl.models.transformer import Encoder

PADDING = 0
"""The word that fills sequences up; it only comes after all others."""

SIZES: Mapping[str, Mapping[str, Any]] = {
    "base": {"depth": 6, "embed": 512, "heads": 8, "mlp": 2048, "dropout": 0.1},
    "big": {"depth": 6, "embed": 1024, "heads": 16, "mlp": 4096, "dropout": 0.3},
}
"""Keywords of `Seq2Seq`: the paper's models from English to German."""

DOTS = tuple(dict.fromkeys((*attention.DOTS, *decoder.DOTS)))
"""Names of the products with parameters in encoder or decoder, see `jaxdl.models.remat`."""
OTHERS = tuple(dict.fromkeys((*attention.OTHERS, *decoder.OTHERS)))
"""Names of the other activations."""


class Seq2Seq(nn.Module):
    """Encoder and decoder; words are looked up, and told by their logits, in one table.

    Attributes:
        words: Size of the vocabulary.
        depth: Layers of the encoder, and of the decoder.
        embed: Width of the hidden states, an even number.
        heads: As in `jaxdl.models.attention.TransformerLayer`.
        mlp: Likewise.
        dropout: Likewise; also of the sums of vectors and positions.
        attention_dropout: Likewise.
        pre_norm: Likewise; there is a normalisation after each stack then.
        remat: What is kept for the backward pass.
        scan: As in `jaxdl.models.transformer.Encoder`.
        implementation: As in `TransformerLayer`.
        dtype: Likewise.
        param_dtype: Likewise.
    """

    words: int
    depth: int
    embed: int
    heads: int
    mlp: int
    dropout: float = 0.1
    attention_dropout: float = 0.0
    pre_norm: bool = False
    remat: Remat = Remat()
    scan: bool = True
    implementation: Implementation = "xla"
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        """Makes the parts."""
        # Multiplied by the square root of the width, they are as large as the positions.
        initial = nn.with_logical_partitioning(nn.initializers.normal(self.embed**-0.5), ("vocab", "embed"))
        self.embedding = self.param("embedding", initial, (self.words, self.embed), self.param_dtype)
        epsilon, types = 1e-6, {"dtype": self.dtype, "param_dtype": self.param_dtype}
        layer = {
            "heads": self.heads,
            "mlp": self.mlp,
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "pre_norm": self.pre_norm,
            "activation": "relu",
            "attention_bias": False,
            "implementation": self.implementation,
            "epsilon": epsilon,
            **types,
        }
        self.encoder = Encoder(self.depth, layer, self.remat, self.scan)
        self.decoder = Decoder(self.depth, self.embed, layer, self.remat, self.scan)
        if self.pre_norm:
            self.encoder_norm = layer_norm("encoder_norm", epsilon, **types)
            self.decoder_norm = layer_norm("decoder_norm", epsilon, **types)

    def __call__(self, source: jax.Array, target: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Gives the logits of the word that follows each word of the target.

        Args:
            source: int32 [batch, source length], `PADDING` at the end.
            target: int32 [batch, target length]; what the decoder reads, beginning with a start token.
                Nothing that comes after a place, padding or not, has to do with its logits.
            keys: Random key of each example's dropout, [batch]; None switches it off.

        Returns:
            float32 [batch, target length, words].
        """
        context = self.encode(source, keys)
        x = self._embedded(target, fold_in(keys, 2))
        return self._told(self.decoder(x, context, source != PADDING, fold_in(keys, 3)))

    def encode(self, source: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Gives the encoder's hidden states, [batch, source length, embed]; see `__call__`."""
        x = self._embedded(source, fold_in(keys, 0))
        context: jax.Array = self.encoder(x, source != PADDING, fold_in(keys, 1))
        return self.encoder_norm(context) if self.pre_norm else context

    def remember(self, source: jax.Array) -> Memory:
        """Computes once what `step` needs of sources, int32 [batch, source length]."""
        return self.decoder.remember(self.encode(source), source != PADDING)

    @nn.nowrap
    def past(self, rows: int, length: int) -> Past:
        """Makes room for some hypotheses of at most `length` tokens; there are none yet."""
        empty = jnp.zeros((rows, self.depth, length, self.heads, self.embed // self.heads), self.dtype)
        return Past(empty, empty)

    def step(
        self, memory: Memory, past: Past, token: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, Past]:
        """Decodes one token of each hypothesis.

        Args:
            memory: Of the sources, from `remember`.
            past: Of the tokens before; at the start, from `past`.
            token: int32 [rows], the tokens at `position`; as many rows follow each other for each
                source.
            position: int32 scalar, below the length that `past` has room for.

        Returns:
            Logits float32 [rows, words], those of `__call__` at that place, and the past with these
            tokens.
        """
        x = self._embedded(token[:, None], None, position)
        x, past = self.decoder.step(x, memory, past, position)
        return self._told(x)[:, 0], past

    def _embedded(self, words: jax.Array, keys: jax.Array | None, first: int | jax.Array = 0) -> jax.Array:
        """Vectors of words, [batch, length, embed], with the positions from `first` on."""
        vectors = look_up(self.embedding.astype(self.dtype), words)
        positions = sinusoids(first + jnp.arange(words.shape[1]), self.embed).astype(self.dtype)
        return drop(vectors * math.sqrt(self.embed) + positions[None], self.dropout, keys)

    def _told(self, x: jax.Array) -> jax.Array:
        """Logits of hidden states [batch, length, embed]."""
        x = self.decoder_norm(x) if self.pre_norm else x
        table = constrain(self.embedding.astype(self.dtype), "vocab", None)
        logits = jnp.tensordot(constrain(x, "batch", None, None), table, ((2,), (1,)))
        return constrain(logits, "batch", None, "vocab").astype(jnp.float32)


def sinusoids(places: jax.Array, embed: int) -> jax.Array:
    """Gives the vectors of places [length], float32 [length, embed]: sine and cosine take turns.

    Their wavelengths grow from 2 pi to 10,000 times that.
    """
    rates = 10_000.0 ** (-jnp.arange(0, embed, 2, dtype=jnp.float32) / embed)
    angles = places.astype(jnp.float32)[:, None] * rates[None]
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(-1, embed)


def translate(
    model: Seq2Seq,
    params: Any,
    source: jax.Array,
    *,
    beam: int,
    length: int,
    start: int,
    end: int,
    alpha: float = 0.6,
) -> tuple[jax.Array, jax.Array]:
    """Searches for the best targets of sources; to be compiled with all but `params` and `source` fixed.

    Args:
        model: The model.
        params: Its parameters.
        source: int32 [batch, source length].
        beam: See `jaxdl.models.beam.beam_search`, as for the others and what is returned.
        length: The largest number of tokens of a target.
        start: The token that targets begin with.
        end: The token that ends them.
        alpha: How much longer targets are preferred.
    """
    apply = partial(model.apply, {"params": params})
    memory = apply(source, method="remember")

    def step(past: Past, token: jax.Array, position: jax.Array) -> tuple[jax.Array, Past]:
        logits, past = apply(memory, past, token, position, method="step")
        # No target has padding before its end.
        return logits.at[:, PADDING].set(-jnp.inf), past

    past = model.past(len(source) * beam, length)
    return beam_search(
        step, past, batch=len(source), beam=beam, length=length, start=start, end=end, alpha=alpha
    )
