"""Encoder layers of the Transformer, and their stack.

Vaswani et al. 2017, "Attention Is All You Need" (https://arxiv.org/abs/1706.03762), with the activation and
initial values of Devlin et al. 2018, "BERT" (https://arxiv.org/abs/1810.04805).

The layers of a stack are equal, so their parameters are one tree whose arrays have a leading `layers` axis,
and the stack is one `lax.scan` over it: compiling takes as long for 24 layers as for one.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators, disable-error-code="no-any-return"
from typing import Any

import jax
from flax import linen as nn

from jaxdl.models.attention import TransformerLayer, fold_in, same_segment
from jaxdl.models.circular import Circular, run_circular
from jaxdl.models.remat import Remat
from jaxdl.models.stack import init_stack, run_stack


class EncoderLayer(TransformerLayer):
    """Self-attention and a two-layer perceptron, each around a shortcut.

    Attributes:
        remat: With level `blocks`, the backward pass computes each branch again; the stack heeds the others.
    """

    remat: Remat = Remat()

    @nn.compact
    def __call__(self, x: jax.Array, segment: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Maps [batch, length, embed] to the same shape.

        Args:
            x: Hidden states.
            segment: [batch, length], a bool mask, True where there is a token, or the number of the segment
                that each token attends to and 0 on padding.
            keys: Random key of each example's dropout in this layer, [batch]; None switches it off.
        """
        attention, perceptron = EncoderLayer._attention, EncoderLayer._perceptron
        if self.remat.level == "blocks":
            attention, perceptron = nn.remat(attention), nn.remat(perceptron)
        x = attention(self, x.astype(self.dtype), segment, keys)
        y: jax.Array = perceptron(self, x, keys)
        return y

    def _attention(self, x: jax.Array, segment: jax.Array, keys: jax.Array | None) -> jax.Array:
        seen, drawn = same_segment(segment), fold_in(keys, 0)
        return self.branch("attention", x, fold_in(keys, 1), lambda x: self.attend(x, seen, drawn))

    def _perceptron(self, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        return self.branch("mlp", x, fold_in(keys, 2), self.perceptron)


class Encoder(nn.Module):
    """A stack of equal encoder layers.

    Dropout masks are a function of the example's random key and the layer's place, and initial values of the
    layer's place too, so neither depends on `remat`, `scan`, `pipeline` or how a batch is divided.

    Attributes:
        depth: Number of layers.
        layer: Settings of each layer, the keywords of `EncoderLayer`.
        remat: What is kept for the backward pass.
        scan: Compile one layer and loop over it, rather than all layers one after another: shorter
            compilation for somewhat more memory.
        pipeline: Run the layers as a pipeline of stages, each of which may lie on other devices.
    """

    depth: int
    layer: dict[str, Any]
    remat: Remat = Remat()
    scan: bool = True
    pipeline: Circular | None = None

    @nn.compact
    def __call__(self, x: jax.Array, segment: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Maps [batch, length, embed] to the same shape.

        Args:
            x: Hidden states.
            segment: [batch, length], a mask or numbers of segments, as of `EncoderLayer`.
            keys: Random key of each example's dropout, [batch]; None switches it off.
        """
        layer = EncoderLayer(**self.layer, parent=None)

        def init(key: jax.Array) -> Any:
            one = (x[:1], segment[:1])
            return init_stack(lambda key: layer.init(key, *one)["params"], self.depth, key)

        params = self.param("layers", init)
        if self.pipeline is None or self.is_initializing():
            y: jax.Array = self.run(params, x, segment, keys)
            return y
        inputs = (segment, keys)
        return run_circular(
            lambda params, x, inputs, first: self.run(params, x, *inputs, first=first),
            *(params, x.astype(layer.dtype), inputs),
            self.pipeline,
            nn.get_partition_spec(jax.eval_shape(init, jax.random.key(0))),
        )

    @nn.nowrap
    def run(
        self,
        params: Any,
        x: jax.Array,
        segment: jax.Array,
        keys: jax.Array | None = None,
        *,
        first: int | jax.Array = 0,
    ) -> jax.Array:
        """Applies layers that follow each other, of this stack or as many as `params` holds.

        Args:
            params: Parameters of each layer, stacked along a leading axis.
            x: Hidden states [batch, length, embed].
            segment: As in `__call__`.
            keys: As in `__call__`.
            first: Place in the whole stack of the first of these layers.
        """
        layer = EncoderLayer(**self.layer, remat=self.remat, parent=None)

        def one(params: Any, x: jax.Array, place: jax.Array) -> jax.Array:
            y: jax.Array = layer.apply({"params": params}, x, segment, fold_in(keys, place))
            return y

        x = x.astype(layer.dtype)
        return run_stack(one, params, x, remat=self.remat, scan=self.scan, first=first)
