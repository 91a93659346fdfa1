"""Encoder layers of the Transformer, and their stack.

Vaswani et al. 2017, "Attention Is All You Need" (https://arxiv.org/abs/1706.03762), with the activation and
initial values of Devlin et al. 2018, "BERT" (https://arxiv.org/abs/1810.04805).

The layers of a stack are equal, so their parameters are one tree whose arrays have a leading `layers` axis,
and the stack is one `lax.scan` over it: compiling takes as long for 24 layers as for one.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike

from jaxdl.models.remat import Remat, tag

DOTS = ("query", "key", "value", "attention_out", "mlp_in", "mlp_out")
"""Names of the products with parameters, see `jaxdl.models.remat`. Attention's own products are not among
them: their size grows with the square of the length."""
OTHERS = ("attention", "attention_norm", "mlp_norm")
"""Names of a layer's other activations."""

_LOWEST = float(np.finfo(np.float32).min)
_normal = nn.initializers.truncated_normal(0.02)


class EncoderLayer(nn.Module):
    """Self-attention and a two-layer perceptron, each around a shortcut.

    Attributes:
        heads: Attention heads; they share the embedding's width evenly.
        mlp: Width of the perceptron's hidden layer.
        dropout: Share of each branch's result that is dropped in training.
        attention_dropout: Share of the attention weights that is dropped in training.
        pre_norm: Normalise the input of each branch, rather than the sum after it.
        epsilon: Of the layer normalisations.
        dtype: Dtype of computation; softmax and statistics are float32 all the same.
        param_dtype: Dtype of the parameters.
        remat: With level `blocks`, the backward pass computes each branch again; the stack heeds the others.
    """

    heads: int
    mlp: int
    dropout: float = 0.1
    attention_dropout: float = 0.1
    pre_norm: bool = False
    epsilon: float = 1e-12
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: Remat = Remat()

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Maps [batch, length, embed] to the same shape.

        Args:
            x: Hidden states.
            mask: bool [batch, length], True where there is a token; padding is never attended to.
            key: Random key of this layer's dropout; None switches it off.
        """
        attend, perceptron = EncoderLayer._attend, EncoderLayer._perceptron
        if self.remat.level == "blocks":
            attend, perceptron = nn.remat(attend), nn.remat(perceptron)
        keys: tuple[Any, Any] = (None, None) if key is None else tuple(jax.random.split(key))
        x = attend(self, x.astype(self.dtype), mask, keys[0])
        y: jax.Array = perceptron(self, x, keys[1])
        return y

    def _attend(self, x: jax.Array, mask: jax.Array, key: jax.Array | None) -> jax.Array:
        keys: tuple[Any, Any] = (None, None) if key is None else tuple(jax.random.split(key))
        norm = self._norm("attention_norm")
        y = self._attention(norm(x) if self.pre_norm else x, mask, keys[0])
        x = x + drop(y, self.dropout, keys[1])
        return x if self.pre_norm else norm(x)

    def _perceptron(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        norm = self._norm("mlp_norm")
        widen = self._dense("mlp_in", (self.mlp,), ("embed",), ("mlp",))
        narrow = self._dense("mlp_out", (x.shape[-1],), ("mlp",), ("embed",))
        y = narrow(jax.nn.gelu(widen(norm(x) if self.pre_norm else x), approximate=False))
        x = x + drop(y, self.dropout, key)
        return x if self.pre_norm else norm(x)

    def _attention(self, x: jax.Array, mask: jax.Array, key: jax.Array | None) -> jax.Array:
        width = x.shape[-1] // self.heads
        query, keys, values = (
            self._dense(name, (self.heads, width), ("embed",), ("heads", "head_width"))(x)
            for name in ("query", "key", "value")
        )
        seen = mask[:, None, None, :]
        if key is None or self.attention_dropout == 0:
            y = jax.nn.dot_product_attention(query, keys, values, mask=seen)
        else:
            # The fused attention of JAX's public interface knows no dropout.
            scores = jnp.einsum("bqhw,bkhw->bhqk", query, keys, preferred_element_type=jnp.float32)
            scores = jnp.where(seen, scores / math.sqrt(width), _LOWEST)
            weights = drop(jax.nn.softmax(scores), self.attention_dropout, key).astype(self.dtype)
            y = jnp.einsum("bhqk,bkhw->bqhw", weights, values)
        out = self._dense("attention_out", (x.shape[-1],), ("heads", "head_width"), ("embed",))
        return out(tag(y, "attention"))

    def _norm(self, name: str) -> Callable[[jax.Array], jax.Array]:
        norm = nn.LayerNorm(
            epsilon=self.epsilon,
            # The fast variance, E[x^2] - E[x]^2, has no digits left once the mean is large.
            use_fast_variance=False,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed",)),
            bias_init=nn.with_logical_partitioning(nn.initializers.zeros, ("embed",)),
            name=name,
        )
        return lambda x: tag(norm(x), name)

    def _dense(
        self, name: str, features: tuple[int, ...], axes_in: tuple[str, ...], axes_out: tuple[str, ...]
    ) -> Callable[[jax.Array], jax.Array]:
        """The product over the last axes, as many as there are names."""
        dense = nn.DenseGeneral(
            features,
            axis=tuple(range(-len(axes_in), 0)),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=nn.with_logical_partitioning(_normal, axes_in + axes_out),
            bias_init=nn.with_logical_partitioning(nn.initializers.zeros, axes_out),
            name=name,
        )
        return lambda x: tag(dense(x), name)


class Encoder(nn.Module):
    """A stack of equal encoder layers.

    Dropout masks are a function of the random key and the layer's place, and initial values of the layer's
    place too, so neither depends on `remat` or `scan`.

    Attributes:
        depth: Number of layers.
        layer: Settings of each layer, the keywords of `EncoderLayer`.
        remat: What is kept for the backward pass.
        scan: Compile one layer and loop over it, rather than all layers one after another: shorter
            compilation for somewhat more memory.
    """

    depth: int
    layer: dict[str, Any]
    remat: Remat = Remat()
    scan: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        """Maps [batch, length, embed] to the same shape.

        Args:
            x: Hidden states.
            mask: bool [batch, length], True where there is a token.
            train: Apply dropout, for which a random stream `dropout` is needed.
        """
        layer = EncoderLayer(**self.layer, remat=self.remat, parent=None)

        def init(key: jax.Array) -> Any:
            keys = jax.random.split(key, self.depth)
            stacked = jax.vmap(lambda key: layer.init(key, x, mask)["params"])(keys)
            # The leading axis gets its name, so that it can be laid out like any other.
            return nn.meta.add_axis(stacked, 0, {nn.meta.PARTITION_NAME: "layers"})

        params = self.param("layers", init)
        drops = train and (layer.dropout > 0 or layer.attention_dropout > 0)
        keys = jax.random.split(self.make_rng("dropout"), self.depth) if drops else None

        def one(x: jax.Array, inputs: tuple[Any, Any]) -> tuple[jax.Array, None]:
            params, key = inputs
            y: jax.Array = layer.apply({"params": params}, x, mask, key)
            return y, None

        if self.remat.level not in ("none", "blocks"):
            # A loop keeps the recomputation apart from the first computation by itself.
            one = jax.checkpoint(one, policy=self.remat.policy, prevent_cse=not self.scan)
        x = x.astype(layer.dtype)
        if self.scan:
            return jax.lax.scan(one, x, (params, keys))[0]
        for i in range(self.depth):
            x, _ = one(x, jax.tree.map(lambda array, i=i: array[i], (params, keys)))
        return x


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Sets a share of the values to 0 and scales the others up (Srivastava et al. 2014); None keeps all."""
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros((), x.dtype))
