"""Products with kernels and look-ups in tables, written so that devices that share them send little."""

# mypy: allow-subclassing-any, allow-untyped-decorators
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxdl.models.logical import constrain, mesh_axes

_normal = nn.initializers.truncated_normal(0.02)


class Projection(nn.Module):
    """The product over the last axes of its input with a kernel, plus a bias.

    Like `flax.linen.DenseGeneral`, which flattens its kernel to initialise it and then, under a mesh,
    lays the flat one out by the names of the whole one.

    Attributes:
        features: Shape of what takes the place of those axes.
        axes_in: Names of the axes that the product sums over.
        axes_out: Names of the axes of the result, one for each of `features`.
        dtype: Dtype of computation and result.
        param_dtype: Dtype of kernel [*axes_in, *axes_out] and bias [*axes_out].
        use_bias: Whether there is a bias.
    """

    features: tuple[int, ...]
    axes_in: tuple[str, ...]
    axes_out: tuple[str, ...]
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    use_bias: bool = True

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., *axes_in] to [..., *axes_out]."""
        summed = len(self.axes_in)
        kernel, bias = self.weights(x.shape[-summed:])
        y: jax.Array = jnp.tensordot(x.astype(self.dtype), kernel.astype(self.dtype), summed)
        return _plus(y, bias)

    @nn.compact
    def weights(self, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array | None]:
        """Gives kernel and bias, if there is one, for inputs [..., *shape]."""
        kernel = self.param(
            "kernel",
            nn.with_logical_partitioning(_normal, self.axes_in + self.axes_out),
            shape + self.features,
            self.param_dtype,
        )
        if not self.use_bias:
            return kernel, None
        bias = self.param(
            "bias",
            nn.with_logical_partitioning(nn.initializers.zeros, self.axes_out),
            self.features,
            self.param_dtype,
        )
        return kernel, bias


def project_together(
    x: jax.Array, weights: Sequence[tuple[jax.Array, jax.Array | None]], dtype: DTypeLike
) -> list[jax.Array]:
    """Multiplies one input [batch, length, embed] with several kernels [embed, ...] of one shape.

    Where devices divide the kernels' results among them, each has a part of the gradient of the input. It is
    one product over all kernels, and so one sum over the devices rather than one for each kernel.

    Args:
        x: The input.
        weights: Kernel and bias, or None, of each.
        dtype: Dtype of computation and results.
    """
    kernels = tuple(kernel.astype(dtype) for kernel, _ in weights)
    products = _products(tuple(nn.get_logical_axis_rules()), x.astype(dtype), kernels)
    return [_plus(y, bias) for y, (_, bias) in zip(products, weights, strict=True)]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(rules: Any, x: jax.Array, kernels: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    x = _fetched(rules, x)
    return tuple(jnp.tensordot(x, kernel, 1) for kernel in kernels)


def _products_forward(rules: Any, x: jax.Array, kernels: tuple[jax.Array, ...]) -> tuple[Any, Any]:
    # What is kept for the backward pass is the input as it comes.
    return _products(rules, x, kernels), (x, kernels)


def _products_backward(rules: Any, saved: Any, gradients: tuple[jax.Array, ...]) -> tuple[Any, Any]:
    x, kernels = saved
    x = _fetched(rules, x)
    dy, kernel = jnp.stack(gradients, 2), jnp.stack(kernels, 1)
    dx = jnp.tensordot(dy, kernel, (tuple(range(2, dy.ndim)), tuple(range(1, kernel.ndim))))
    # One by one, so that each can be scattered.
    return dx, tuple(jnp.tensordot(x, each, ((0, 1), (0, 1))) for each in gradients)


_products.defvjp(_products_forward, _products_backward)


def _fetched(rules: Any, x: jax.Array) -> jax.Array:
    """Fetches an input that is divided along the sequence once, rather than for each product.

    By the rules at hand in the forward pass: the backward one is traced later, where they may be others.
    """
    with nn.logical_axis_rules(rules):
        return constrain(x, "batch", None, None)


def _plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    if bias is None:
        return y
    return y + bias.astype(y.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


def look_up(table: jax.Array, words: jax.Array) -> jax.Array:
    """Gives the vectors [batch, length, embed] of words [batch, length] in a table [vocab, embed].

    Where the words of the table are divided over devices, each looks in its part, and the sum over them is
    what one of them has found: written out, since compilers may move the table rather than the vectors.
    """
    # As whole vectors: devices that have parts of them fetch the parts, as of any other parameter.
    table = constrain(table, "vocab", None)
    parts = math.prod(mesh_axes("vocab").values())
    if parts == 1 or len(table) % parts:
        vectors = jnp.take(table, words, axis=0)
    else:
        tables = constrain(table.reshape(parts, -1, table.shape[1]), "vocab", None, None)
        size = tables.shape[1]
        starts = size * jnp.arange(parts, dtype=words.dtype)
        place = words[None] - starts[:, None, None]
        found = jax.vmap(lambda part, place: jnp.take(part, place, axis=0, mode="clip"))(tables, place)
        here = ((place >= 0) & (place < size))[..., None]
        found = jnp.where(here, found, jnp.zeros((), found.dtype))
        vectors = constrain(found, "vocab", "batch", None, None).sum(0)
    # Dividing the sequence comes after the sum.
    return constrain(constrain(vectors, "batch", None, None), "batch", "sequence", None)
