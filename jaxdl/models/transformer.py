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

from jaxdl.models.circular import Circular, run_circular
from jaxdl.models.logical import constrain
from jaxdl.models.projection import Projection, project_together
from jaxdl.models.remat import Remat, tag

DOTS = ("query", "key", "value", "attention_out", "mlp_in", "mlp_out")
"""Names of the products with parameters, see `jaxdl.models.remat`. Attention's own products are not among
them: their size grows with the square of the length."""
OTHERS = ("attention", "attention_norm", "mlp_norm")
"""Names of a layer's other activations."""

_LOWEST = float(np.finfo(np.float32).min)


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
    def __call__(self, x: jax.Array, mask: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Maps [batch, length, embed] to the same shape.

        Args:
            x: Hidden states.
            mask: bool [batch, length], True where there is a token; padding is never attended to.
            keys: Random key of each example's dropout in this layer, [batch]; None switches it off.
        """
        attend, perceptron = EncoderLayer._attend, EncoderLayer._perceptron
        if self.remat.level == "blocks":
            attend, perceptron = nn.remat(attend), nn.remat(perceptron)
        x = attend(self, x.astype(self.dtype), mask, keys)
        y: jax.Array = perceptron(self, x, keys)
        return y

    def _attend(self, x: jax.Array, mask: jax.Array, keys: jax.Array | None) -> jax.Array:
        norm = self._norm("attention_norm")
        y = self._attention(norm(x) if self.pre_norm else x, mask, fold_in(keys, 0))
        x = self._between(x + drop(y, self.dropout, fold_in(keys, 1)))
        return x if self.pre_norm else self._between(norm(x))

    def _perceptron(self, x: jax.Array, keys: jax.Array | None) -> jax.Array:
        norm = self._norm("mlp_norm")
        widen = self._dense("mlp_in", (self.mlp,), ("embed",), ("mlp",))
        narrow = self._dense("mlp_out", (x.shape[-1],), ("mlp",), ("embed",))
        hidden = constrain(widen(norm(x) if self.pre_norm else x), "batch", None, "mlp")
        y = narrow(jax.nn.gelu(hidden, approximate=False))
        x = self._between(x + drop(y, self.dropout, fold_in(keys, 2)))
        return x if self.pre_norm else self._between(norm(x))

    def _attention(self, x: jax.Array, mask: jax.Array, keys: jax.Array | None) -> jax.Array:
        width = x.shape[-1] // self.heads
        inputs = {
            name: self._projection(name, (self.heads, width), ("embed",), ("heads", "head_width"))
            for name in ("query", "key", "value")
        }
        products = project_together(x, [each.weights(x.shape[-1:]) for each in inputs.values()], self.dtype)
        query, key, value = (
            constrain(tag(y, name), "batch", None, "heads", None)
            for name, y in zip(inputs, products, strict=True)
        )
        seen = mask[:, None, None, :]
        if keys is None or self.attention_dropout == 0:
            y = jax.nn.dot_product_attention(query, key, value, mask=seen)
        else:
            # The fused attention of JAX's public interface knows no dropout.
            scores = jnp.einsum("bqhw,bkhw->bhqk", query, key, preferred_element_type=jnp.float32)
            scores = jnp.where(seen, scores / math.sqrt(width), _LOWEST)
            weights = drop(jax.nn.softmax(scores), self.attention_dropout, keys).astype(self.dtype)
            y = jnp.einsum("bhqk,bkhw->bqhw", weights, value)
        # So that the backward pass fetches the gradient of what follows, rather than kernel and `y`.
        y = constrain(y, "batch", None, "heads", None)
        out = self._dense("attention_out", (x.shape[-1],), ("heads", "head_width"), ("embed",))
        return out(tag(y, "attention"))

    @staticmethod
    def _between(x: jax.Array) -> jax.Array:
        return constrain(x, "batch", "sequence", None)

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
        dense = self._projection(name, features, axes_in, axes_out)
        return lambda x: tag(dense(x), name)

    def _projection(
        self, name: str, features: tuple[int, ...], axes_in: tuple[str, ...], axes_out: tuple[str, ...]
    ) -> "Projection":
        return Projection(features, axes_in, axes_out, self.dtype, self.param_dtype, name=name)


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
    def __call__(self, x: jax.Array, mask: jax.Array, keys: jax.Array | None = None) -> jax.Array:
        """Maps [batch, length, embed] to the same shape.

        Args:
            x: Hidden states.
            mask: bool [batch, length], True where there is a token.
            keys: Random key of each example's dropout, [batch]; None switches it off.
        """
        layer = EncoderLayer(**self.layer, parent=None)

        def init(key: jax.Array) -> Any:
            one = (x[:1], mask[:1])
            stacked = jax.vmap(lambda key: layer.init(key, *one)["params"])(jax.random.split(key, self.depth))
            # The leading axis gets its name, so that it can be laid out like any other.
            return nn.meta.add_axis(stacked, 0, {nn.meta.PARTITION_NAME: "layers"})

        params = self.param("layers", init)
        if self.pipeline is None or self.is_initializing():
            y: jax.Array = self.run(params, x, mask, keys)
            return y
        inputs = (mask, keys)
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
        mask: jax.Array,
        keys: jax.Array | None = None,
        *,
        first: int | jax.Array = 0,
    ) -> jax.Array:
        """Applies layers that follow each other, of this stack or as many as `params` holds.

        Args:
            params: Parameters of each layer, stacked along a leading axis.
            x: Hidden states [batch, length, embed].
            mask: As in `__call__`.
            keys: As in `__call__`.
            first: Place in the whole stack of the first of these layers.
        """
        layer = EncoderLayer(**self.layer, remat=self.remat, parent=None)

        def one(x: jax.Array, inputs: tuple[Any, Any]) -> tuple[jax.Array, None]:
            params, place = inputs
            y: jax.Array = layer.apply({"params": params}, x, mask, fold_in(keys, place))
            return y, None

        if self.remat.level not in ("none", "blocks"):
            # A loop keeps the recomputation apart from the first computation by itself.
            one = jax.checkpoint(one, policy=self.remat.policy, prevent_cse=not self.scan)
        depth = jax.tree.leaves(params)[0].shape[0]
        places = first + jnp.arange(depth)
        x = x.astype(layer.dtype)
        if self.scan:
            return jax.lax.scan(one, x, (params, places))[0]
        for i in range(depth):
            x, _ = one(x, jax.tree.map(lambda array, i=i: array[i], (params, places)))
        return x


def fold_in(keys: jax.Array | None, place: int | jax.Array) -> jax.Array | None:
    """Derives from each example's random key that of a place in the network; None stays None."""
    if keys is None:
        return None
    folded: jax.Array = jax.vmap(jax.random.fold_in, (0, None))(keys, place)
    return folded


def drop(x: jax.Array, rate: float, keys: jax.Array | None) -> jax.Array:
    """Sets a share of the values to 0 and scales the others up (Srivastava et al. 2014).

    Args:
        x: [batch, ...].
        rate: Share of the values to drop.
        keys: Random key of each example, [batch]; None keeps all values.
    """
    if keys is None or rate == 0:
        return x
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(kept, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros((), x.dtype))
