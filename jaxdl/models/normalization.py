"""Batch normalisation with its sum, rectifier and gradient in as few passes over memory as they need."""

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def normalize_by_batch(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    epsilon: float,
    rectify: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalises over all axes but the last, adds the residual and rectifies.

    Autodiff of the plain expression keeps x - mean, its scaled form and the sum before the rectifier for the
    backward pass. This one keeps x alone (and the result, which the next layer keeps anyway), and the gradient
    is two sums and one linear expression of the result's gradient and x. The price is that forward-mode
    differentiation is not defined.

    Args:
        x: [..., channel].
        scale: [channel], float32.
        bias: [channel], float32.
        residual: Like x, or None.
        epsilon: Added to the variance.
        rectify: Apply max(., 0) last.

    Returns:
        The result in x's dtype; mean and biased variance of the batch, [channel], float32.
    """
    out, mean, var, _ = _forward(x, scale, bias, residual, epsilon, rectify)
    return out, mean, var


def affine(
    x: jax.Array, factor: jax.Array, shift: jax.Array, residual: jax.Array | None, rectify: bool
) -> jax.Array:
    """x * factor + shift by channel, plus the residual, rectified, computed in float32 and returned as x's dtype."""
    y = x.astype(jnp.float32) * expand(factor, x) + expand(shift, x)
    if residual is not None:
        y += residual.astype(jnp.float32)
    return (jnp.maximum(y, 0) if rectify else y).astype(x.dtype)


def expand(vector: jax.Array, x: jax.Array) -> jax.Array:
    """[channel] -> [1, ..., 1, channel]: ranks are promoted in the open only."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def _forward(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    epsilon: float,
    rectify: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    axes = tuple(range(x.ndim - 1))
    x32 = x.astype(jnp.float32)
    mean = x32.mean(axes)
    # The mean squared distance; E[x^2] - E[x]^2 has no digit left once the mean is large against the deviation.
    var = jnp.square(x32 - expand(mean, x)).mean(axes)
    factor = scale * jax.lax.rsqrt(var + epsilon)
    return affine(x, factor, bias - mean * factor, residual, rectify), mean, var, factor


def _forward_rule(x, scale, bias, residual, epsilon, rectify):
    out, mean, var, factor = _forward(x, scale, bias, residual, epsilon, rectify)
    return (out, mean, var), (x, scale, bias, mean, var, out if residual is not None else None)


def _backward_rule(epsilon, rectify, saved, cotangents):
    x, scale, bias, mean, var, out = saved
    d_out, d_mean, d_var = cotangents
    axes = tuple(range(x.ndim - 1))
    count = x.size // x.shape[-1]
    rsqrt = jax.lax.rsqrt(var + epsilon)
    factor = scale * rsqrt
    x32 = x.astype(jnp.float32)
    d = d_out.astype(jnp.float32)
    if rectify:
        if out is None:
            positive = x32 * expand(factor, x) + expand(bias - mean * factor, x) > 0
        else:
            positive = out > 0
        d = jnp.where(positive, d, 0)
    d_residual = None if out is None else d.astype(x.dtype)
    centred = x32 - expand(mean, x)
    d_bias = d.sum(axes)
    d_scale = (d * centred).sum(axes) * rsqrt
    slope = (2 * d_var - factor * rsqrt * d_scale) / count
    offset = (d_mean - factor * d_bias) / count
    dx = d * expand(factor, x) + centred * expand(slope, x) + expand(offset, x)
    return dx.astype(x.dtype), d_scale, d_bias, d_residual


normalize_by_batch.defvjp(_forward_rule, _backward_rule)
