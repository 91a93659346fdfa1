"""Batch normalisation with its sum, rectifier and gradient in as few passes over memory as they need."""

from functools import partial

import jax
import jax.numpy as jnp

Peers = tuple[str, int | None]
"""Copies of a computation whose examples are normalised together: name of the mapped axis, and how many
neighbours along it (None: all)."""

_Outputs = tuple[jax.Array, jax.Array, jax.Array]
_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def normalize_by_batch(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    epsilon: float,
    rectify: bool,
    peers: Peers | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalises over all axes but the last, adds the residual and rectifies.

    Autodiff of the plain expression keeps x - mean, its scaled form and the sum before the rectifier for
    the backward pass. This one keeps x alone (and the result, which the next layer keeps anyway), and the
    gradient is two sums and one linear expression of the result's gradient and x. The price is that
    forward-mode differentiation is not defined.

    Args:
        x: [..., channel].
        scale: [channel], float32.
        bias: [channel], float32.
        residual: Like x, or None.
        epsilon: Added to the variance.
        rectify: Apply max(., 0) last.
        peers: Where copies of this computation hold other parts of the batch, those that share statistics.

    Returns:
        The result in x's dtype; mean and biased variance of the batch, [channel], float32.
    """
    return _forward(x, scale, bias, residual, epsilon, rectify, peers)


def affine(
    x: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    rectify: bool,
) -> jax.Array:
    """(x - mean) * factor + bias by channel, plus the residual, rectified: in float32, given in x's dtype."""
    y = _scaled(x, mean, factor, bias)
    if residual is not None:
        y += residual.astype(jnp.float32)
    return (jnp.maximum(y, 0) if rectify else y).astype(x.dtype)


def _scaled(x: jax.Array, mean: jax.Array, factor: jax.Array, bias: jax.Array) -> jax.Array:
    # x * factor + (bias - mean * factor) would save a subtraction and lose the digits of a large mean again.
    return (x.astype(jnp.float32) - expand(mean, x)) * expand(factor, x) + expand(bias, x)


def _shared(mean: jax.Array, peers: Peers | None) -> jax.Array:
    """The mean over peers; their parts of the batch are equally large."""
    if peers is None:
        return mean
    axis, neighbours = peers
    if neighbours is None:
        shared: jax.Array = jax.lax.pmean(mean, axis)
        return shared
    places = range(jax.lax.axis_size(axis))
    groups = [list(places[i : i + neighbours]) for i in places[::neighbours]]
    try:
        shared = jax.lax.pmean(mean, axis, axis_index_groups=groups)
    except NotImplementedError:  # where the axis is that of `vmap`
        by_group = jax.lax.all_gather(mean, axis).reshape(-1, neighbours, *mean.shape).mean(1)
        shared = by_group[jax.lax.axis_index(axis) // neighbours]
    return shared


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
    peers: Peers | None,
) -> _Outputs:
    axes = tuple(range(x.ndim - 1))
    x32 = x.astype(jnp.float32)
    mean = _shared(x32.mean(axes), peers)
    # The mean squared distance: E[x^2] - E[x]^2 has no digit left once the mean is large for the deviation.
    var = _shared(jnp.square(x32 - expand(mean, x)).mean(axes), peers)
    factor = scale * jax.lax.rsqrt(var + epsilon)
    return affine(x, mean, factor, bias, residual, rectify), mean, var


def _forward_rule(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
    epsilon: float,
    rectify: bool,
    peers: Peers | None,
) -> tuple[_Outputs, _Saved]:
    out, mean, var = _forward(x, scale, bias, residual, epsilon, rectify, peers)
    return (out, mean, var), (x, scale, bias, mean, var, out if residual is not None else None)


def _backward_rule(
    epsilon: float, rectify: bool, peers: Peers | None, saved: _Saved, cotangents: _Outputs
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    x, scale, bias, mean, var, out = saved
    d_out, d_mean, d_var = cotangents
    axes = tuple(range(x.ndim - 1))
    count = x.size // x.shape[-1]
    rsqrt = jax.lax.rsqrt(var + epsilon)
    factor = scale * rsqrt
    x32 = x.astype(jnp.float32)
    d = d_out.astype(jnp.float32)
    if rectify:
        positive = (_scaled(x, mean, factor, bias) if out is None else out) > 0
        d = jnp.where(positive, d, 0)
    d_residual = None if out is None else d.astype(x.dtype)
    centred = x32 - expand(mean, x)
    d_bias = d.sum(axes)
    d_scale = (d * centred).sum(axes) * rsqrt
    # What is shared acts on the examples of all peers, and theirs on it. The gradients of scale and bias stay
    # this copy's own: whoever sums gradients over copies sums them too.
    slope = _shared(2 * d_var - factor * rsqrt * d_scale, peers) / count
    offset = _shared(d_mean - factor * d_bias, peers) / count
    dx = d * expand(factor, x) + centred * expand(slope, x) + expand(offset, x)
    return dx.astype(x.dtype), d_scale, d_bias, d_residual


normalize_by_batch.defvjp(_forward_rule, _backward_rule)
