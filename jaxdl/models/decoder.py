"""Decoder layers of the Transformer, and their stack, over whole sequences and one token at a time.

Vaswani et al. 2017, "Attention Is All You Need" (https://arxiv.org/abs/1706.03762). As in
`jaxdl.models.transformer`, the parameters of equal layers are one tree with a leading `layers` axis.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxdl.models.attention import TransformerLayer, fold_in
from jaxdl.models.logical import constrain
from jaxdl.models.remat import Remat
from jaxdl.models.stack import init_stack, run_stack

DOTS = (
    *("self_query", "self_key", "self_value", "self_attention_out"),
    *("cross_query", "cross_key", "cross_value", "cross_attention_out"),
    *("mlp_in", "mlp_out"),
)
"""Names of the products with parameters, see `jaxdl.models.remat`."""
OTHERS = ("self_attention", "self_attention_norm", "cross_attention", "cross_attention_norm", "mlp_norm")
"""Names of a layer's other activations."""


class Memory(NamedTuple):
    """What the layers of a decoder see of the sources, computed once for each source.

    Attributes:
        key: [layers, batch, context, heads, width].
        value: Like `key`.
        mask: bool [batch, context], True where there is a token.
    """

    key: jax.Array
    value: jax.Array
    mask: jax.Array


class Past(NamedTuple):
    """What self-attention sees of the tokens so far. The leading axis is that of the hypotheses.

    Attributes:
        key: [rows, layers, length, heads, width].
        value: Like `key`.
    """

    key: jax.Array
    value: jax.Array


class DecoderLayer(TransformerLayer):
    """Causal self-attention, attention to the context and a perceptron, each around a shortcut.

    Attributes:
        remat: With level `blocks`, the backward pass computes each branch again; the stack heeds the
            others.
    """

    remat: Remat = Remat()

    @nn.compact
    def __call__(
        self, x: jax.Array, context: jax.Array, mask: jax.Array, keys: jax.Array | None = None
    ) -> jax.Array:
        """Maps [batch, length, embed] to the same shape.

        Args:
            x: Hidden states; each place sees itself and those before it.
            context: [batch, context, embed], which all places see.
            mask: bool [batch, context], True where the context has a token.
            keys: Random key of each example's dropout in this layer, [batch]; None switches it off.
        """
        before, across, perceptron = DecoderLayer._before, DecoderLayer._across, DecoderLayer._perceptron
        if self.remat.level == "blocks":
            before, across, perceptron = nn.remat(before), nn.remat(across), nn.remat(perceptron)
        x = before(self, x.astype(self.dtype), keys)
        x = across(self, x, context.astype(self.dtype), mask, keys)
        y: jax.Array = perceptron(self, x, keys)
        return y

    def _before(self, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        # Padding comes last, so that no token sees it anyway.
        seen, drawn = jnp.tri(x.shape[1], dtype=bool)[None, None], fold_in(keys, 0)
        y: jax.Array = self.branch(
            "self_attention", x, fold_in(keys, 1), lambda x: self.attend(x, seen, drawn, "self_")
        )
        return y

    def _across(self, x: jax.Array, context: jax.Array, mask: jax.Array, keys: jax.Array | None) -> jax.Array:
        drawn = fold_in(keys, 2)

        def attend(x: jax.Array) -> jax.Array:
            (query,) = self.projected(x, ("query",), "cross_")
            key, value = self.projected(context, ("key", "value"), "cross_")
            y: jax.Array = self.mixed(query, key, value, mask[:, None, None], drawn, "cross_")
            return y

        y: jax.Array = self.branch("cross_attention", x, fold_in(keys, 3), attend)
        return y

    def _perceptron(self, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        y: jax.Array = self.branch("mlp", x, fold_in(keys, 4), self.perceptron)
        return y


class DecoderMemory(TransformerLayer):
    """The part of a decoder layer, with its parameters, that depends on the context alone."""

    @nn.compact
    def __call__(self, context: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gives keys and values of [batch, context, embed], [batch, context, heads, width] each."""
        key, value = self.projected(context, ("key", "value"), "cross_")
        return key, value


class DecoderStep(TransformerLayer):
    """A decoder layer, with the parameters of `DecoderLayer`, for one token after others."""

    @nn.compact
    def __call__(
        self, x: jax.Array, memory: Memory, past: Past, position: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Maps [rows, 1, embed] to the same shape.

        Args:
            x: Hidden states of the tokens at `position`. As many rows follow each other for each source.
            memory: Of the sources, with the arrays of this layer alone.
            past: Of the tokens before, with the arrays of this layer alone, [rows, length, heads,
                width].
            position: int32 scalar, below the length of `past`.

        Returns:
            Hidden states, and these tokens' key and value, [rows, 1, heads, width].
        """
        made: list[jax.Array] = []

        def attend(x: jax.Array) -> jax.Array:
            query, *new = self.projected(x, ("query", "key", "value"), "self_")
            made.extend(new)
            key, value = (
                jax.lax.dynamic_update_slice_in_dim(old, each, position, 1)
                for old, each in zip(past, new, strict=True)
            )
            seen = jnp.arange(key.shape[1]) <= position
            y: jax.Array = self.mixed(query, key, value, seen[None, None, None], None, "self_")
            return y

        def ask(x: jax.Array) -> jax.Array:
            (query,) = self.projected(x, ("query",), "cross_")
            # The rows of one source are queries to one memory, of which there need not be copies.
            query = query.reshape(len(memory.key), -1, *query.shape[2:])
            mask = memory.mask[:, None, None]
            y: jax.Array = self.mixed(query, memory.key, memory.value, mask, None, "cross_")
            return y.reshape(x.shape)

        x = self.branch("self_attention", x.astype(self.dtype), None, attend)
        x = self.branch("cross_attention", x, None, ask)
        key, value = made
        return self.branch("mlp", x, None, self.perceptron), (key, value)


class Decoder(nn.Module):
    """A stack of equal decoder layers.

    Dropout masks and initial values are functions of what they are of in
    `jaxdl.models.transformer.Encoder`.

    Attributes:
        depth: Number of layers.
        embed: Width of the hidden states and of the context.
        layer: Settings of each layer, the keywords of `DecoderLayer`.
        remat: What is kept for the backward pass.
        scan: Compile one layer and loop over it, rather than all layers one after another.
    """

    depth: int
    embed: int
    layer: dict[str, Any]
    remat: Remat = Remat()
    scan: bool = True

    def setup(self) -> None:
        """Makes the parameters of all layers."""
        layer = DecoderLayer(**self.layer, parent=None)

        def init(key: jax.Array) -> Any:
            hidden = jnp.zeros((1, 1, self.embed), layer.dtype)
            one = (hidden, hidden, jnp.ones((1, 1), bool))
            return init_stack(lambda key: layer.init(key, *one)["params"], self.depth, key)

        self.layers = self.param("layers", init)

    def __call__(
        self, x: jax.Array, context: jax.Array, mask: jax.Array, keys: jax.Array | None = None
    ) -> jax.Array:
        """Maps [batch, length, embed] to the same shape.

        Args:
            x: Hidden states.
            context: [batch, context, embed].
            mask: bool [batch, context], True where the context has a token.
            keys: Random key of each example's dropout, [batch]; None switches it off.
        """
        layer = DecoderLayer(**self.layer, remat=self.remat, parent=None)
        # Where it is divided along the sequence, it is fetched once and not by each layer.
        context = constrain(context, "batch", None, None)

        def one(params: Any, x: jax.Array, place: jax.Array) -> jax.Array:
            y: jax.Array = layer.apply({"params": params}, x, context, mask, fold_in(keys, place))
            return y

        x = x.astype(layer.dtype)
        return run_stack(one, self.layers, x, remat=self.remat, scan=self.scan)

    def remember(self, context: jax.Array, mask: jax.Array) -> Memory:
        """Computes what the layers see of a context; see `__call__`."""
        layer = DecoderMemory(**self.layer, parent=None)
        key, value = jax.lax.map(lambda params: layer.apply({"params": params}, context), self.layers)
        return Memory(key, value, mask)

    def step(self, x: jax.Array, memory: Memory, past: Past, position: jax.Array) -> tuple[jax.Array, Past]:
        """Maps the hidden states of one token of each row, [rows, 1, embed], to the same shape.

        Args:
            x: Hidden states of the tokens at `position`.
            memory: Of the sources; as many rows follow each other for each.
            past: Of the tokens at the positions before.
            position: int32 scalar.

        Returns:
            Hidden states as `__call__` gives them there, and the past with these tokens.
        """
        layer = DecoderStep(**self.layer, parent=None)

        def one(carry: tuple[jax.Array, Past], inputs: Any) -> tuple[tuple[jax.Array, Past], None]:
            x, past = carry
            params, key, value, place = inputs
            own = Past(*(jax.lax.dynamic_index_in_dim(each, place, 1, keepdims=False) for each in past))
            x, new = layer.apply({"params": params}, x, Memory(key, value, memory.mask), own, position)
            written = (
                jax.lax.dynamic_update_slice(each, one[:, None], (0, place, position, 0, 0))
                for each, one in zip(past, new, strict=True)
            )
            return (x, Past(*written)), None

        inputs = (self.layers, memory.key, memory.value, jnp.arange(self.depth))
        (x, past), _ = jax.lax.scan(one, (x.astype(layer.dtype), past), inputs)
        return x, past
