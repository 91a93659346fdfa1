"""What the layers of a Transformer are made of: attention, perceptron, normalisation and dropout.

Vaswani et al. 2017, "Attention Is All You Need" (https://arxiv.org/abs/1706.03762).
"""

# mypy: allow-subclassing-any, allow-untyped-decorators, disable-error-code="no-any-return"
import math
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike

from jaxdl.models.logical import constrain
from jaxdl.models.projection import Projection, project_together
from jaxdl.models.remat import tag

DOTS = ("query", "key", "value", "attention_out", "mlp_in", "mlp_out")
"""Names of the products with parameters, see `jaxdl.models.remat`. Attention's own products are not among
them: their size grows with the square of the length."""
OTHERS = ("attention", "attention_norm", "mlp_norm")
"""Names of a layer's other activations."""

Implementation = Literal["xla", "cudnn"]
"""Who computes attention: the compiler from products and softmax, or cuDNN's fused kernel, which never
stores the attention weights. The latter is for GPUs and 16-bit dtypes, and knows no dropout."""

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
}
"""Of the perceptron: BERT's (Hendrycks and Gimpel 2016, with the error function), and the original."""

_LOWEST = float(np.finfo(np.float32).min)


class TransformerLayer(nn.Module):
    """What encoder and decoder layers share: their settings, and the parts that they put together.

    Attributes:
        heads: Attention heads; they share the embedding's width evenly.
        mlp: Width of the perceptron's hidden layer.
        dropout: Share of each branch's result that is dropped in training.
        attention_dropout: Share of the attention weights that is dropped in training.
        pre_norm: Normalise the input of each branch, rather than the sum after it.
        activation: Of the perceptron, a name in `ACTIVATIONS`.
        attention_bias: Whether attention's projections have biases.
        implementation: Who computes attention where no weights are dropped.
        epsilon: Of the layer normalisations.
        dtype: Dtype of computation; softmax and statistics are float32 all the same.
        param_dtype: Dtype of the parameters.
    """

    heads: int
    mlp: int
    dropout: float = 0.1
    attention_dropout: float = 0.1
    pre_norm: bool = False
    activation: str = "gelu"
    attention_bias: bool = True
    implementation: Implementation = "xla"
    epsilon: float = 1e-12
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.nowrap
    def branch(
        self, name: str, x: jax.Array, keys: jax.Array | None, compute: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """Puts a shortcut, dropout and normalisation around a computation.

        Args:
            name: Of the branch; its normalisation is `<name>_norm`.
            x: Hidden states [batch, length, embed].
            keys: Random key of each example's dropout, [batch]; None switches it off.
            compute: What the branch does.
        """
        norm = self.norm(f"{name}_norm")
        y = compute(norm(x) if self.pre_norm else x)
        x = between(x + drop(y, self.dropout, keys))
        return x if self.pre_norm else between(norm(x))

    @nn.nowrap
    def perceptron(self, x: jax.Array) -> jax.Array:
        """Maps [batch, length, embed] to the same shape, each place by itself."""
        widen = self._dense("mlp_in", (self.mlp,), ("embed",), ("mlp",))
        narrow = self._dense("mlp_out", (x.shape[-1],), ("mlp",), ("embed",))
        hidden = constrain(widen(x), "batch", None, "mlp")
        return narrow(ACTIVATIONS[self.activation](hidden))

    @nn.nowrap
    def attend(self, x: jax.Array, seen: jax.Array, keys: jax.Array | None, prefix: str = "") -> jax.Array:
        """Lets places of a sequence attend to each other.

        Args:
            x: [batch, length, embed].
            seen: bool, broadcast to [batch, heads, length, length]; who attends to whom.
            keys: Random key of each example's dropout of weights, [batch]; None switches it off.
            prefix: Of the parameters' names.
        """
        query, key, value = self.projected(x, ("query", "key", "value"), prefix)
        return self.mixed(query, key, value, seen, keys, prefix)

    @nn.nowrap
    def projected(self, x: jax.Array, names: tuple[str, ...], prefix: str = "") -> list[jax.Array]:
        """Gives queries, keys or values of [batch, length, embed], [batch, length, heads, width] each."""
        width = x.shape[-1] // self.heads
        weights = [
            self._projection(
                prefix + name, (self.heads, width), ("embed",), ("heads", "head_width"), self.attention_bias
            ).weights(x.shape[-1:])
            for name in names
        ]
        products = project_together(x, weights, self.dtype)
        return [
            constrain(tag(y, prefix + name), "batch", None, "heads", None)
            for name, y in zip(names, products, strict=True)
        ]

    @nn.nowrap
    def mixed(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        seen: jax.Array,
        keys: jax.Array | None,
        prefix: str = "",
    ) -> jax.Array:
        """Gives each query the mean of the values, weighted by how its key fits, [batch, length, embed].

        Args:
            query: [batch, length, heads, width].
            key: [batch, context, heads, width].
            value: Like `key`.
            seen: bool, broadcast to [batch, heads, length, context].
            keys: As in `attend`.
            prefix: As in `attend`.
        """
        width = query.shape[-1]
        # XLA has no product of float16 for CPUs that is summed as that function asks.
        plain = self.implementation == "xla" and self.dtype == jnp.float16
        if (keys is None or self.attention_dropout == 0) and not plain:
            y = jax.nn.dot_product_attention(query, key, value, mask=seen, implementation=self.implementation)
        else:
            # The fused attention of JAX's public interface knows no dropout.
            scores = jnp.einsum("bqhw,bkhw->bhqk", query, key, preferred_element_type=jnp.float32)
            scores = jnp.where(seen, scores / math.sqrt(width), _LOWEST)
            weights = drop(jax.nn.softmax(scores), self.attention_dropout, keys).astype(self.dtype)
            y = jnp.einsum("bhqk,bkhw->bqhw", weights, value)
        # So that the backward pass fetches the gradient of what follows, rather than kernel and `y`.
        y = constrain(y, "batch", None, "heads", None)
        out = self._dense(
            f"{prefix}attention_out",
            (self.heads * width,),
            ("heads", "head_width"),
            ("embed",),
            self.attention_bias,
        )
        return out(tag(y, f"{prefix}attention"))

    @nn.nowrap
    def norm(self, name: str) -> Callable[[jax.Array], jax.Array]:
        """Makes a layer normalisation."""
        norm = layer_norm(name, self.epsilon, self.dtype, self.param_dtype)
        return lambda x: tag(norm(x), name)

    @nn.nowrap
    def _dense(
        self,
        name: str,
        features: tuple[int, ...],
        axes_in: tuple[str, ...],
        axes_out: tuple[str, ...],
        bias: bool = True,
    ) -> Callable[[jax.Array], jax.Array]:
        """The product over the last axes, as many as there are names."""
        dense = self._projection(name, features, axes_in, axes_out, bias)
        return lambda x: tag(dense(x), name)

    @nn.nowrap
    def _projection(
        self,
        name: str,
        features: tuple[int, ...],
        axes_in: tuple[str, ...],
        axes_out: tuple[str, ...],
        bias: bool,
    ) -> Projection:
        return Projection(features, axes_in, axes_out, self.dtype, self.param_dtype, bias, name=name)


def layer_norm(name: str | None, epsilon: float, dtype: DTypeLike, param_dtype: DTypeLike) -> nn.LayerNorm:
    """Makes a layer normalisation (Ba et al. 2016) over `embed`; its statistics are float32."""
    return nn.LayerNorm(
        epsilon=epsilon,
        # The fast variance, E[x^2] - E[x]^2, has no digits left once the mean is large.
        use_fast_variance=False,
        dtype=dtype,
        param_dtype=param_dtype,
        scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed",)),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros, ("embed",)),
        name=name,
    )


def between(x: jax.Array) -> jax.Array:
    """Lays out what lies between two branches."""
    return constrain(x, "batch", "sequence", None)


def same_segment(segment: jax.Array) -> jax.Array:
    """Tells who attends to whom, bool [batch, 1, length, length]: who is in the same segment.

    Args:
        segment: [batch, length]: whole numbers, or a bool mask; 0 (False) is padding. Padding attends to
            padding, so that no row of weights is empty; what comes of it, nobody attends to.
    """
    return segment[:, None, :, None] == segment[:, None, None, :]


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
        rate: Share of the values to drop, heeded to 1 / 65,536.
        keys: Random key of each example, [batch]; None keeps all values.
    """
    if keys is None or rate == 0:
        return x
    # 16 random bits a value decide as well as 32, and are drawn in half the time.
    dropped = round(rate * 2**16)
    bits = jax.vmap(lambda key: jax.random.bits(key, x.shape[1:], jnp.uint16))(keys)
    scaled = x * jnp.asarray(2**16 / (2**16 - dropped), x.dtype)
    return jnp.where(bits >= dropped, scaled, jnp.zeros((), x.dtype))
