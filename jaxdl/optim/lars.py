"""LARS's trust ratio (You et al. 2017, https://arxiv.org/abs/1708.03888)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdl.optim.lamb import layer_norms
from jaxdl.optim.masks import LayerAxes, path_name, unstacked


def scale_by_lars(
    trust_coefficient: float,
    weight_decay: float,
    mask: Callable[[Any], Any],
    layer_axes: LayerAxes = unstacked,
) -> optax.GradientTransformation:
    """Turns gradients g into eta ||w|| / (||g|| + d ||w||) (g + d w).

    This is the MLPerf reference: the ratio is 1 where either norm is zero, and
    the denominator is the sum of two norms, where `optax.lars` takes the norm
    of the sum, ||g + d w||.

    Args:
        trust_coefficient: eta.
        weight_decay: d.
        mask: marks the parameters that are decayed and adapted; the gradients of the others pass unchanged.
        layer_axes: tells which parameters are stacks of layers. A stack that
            it does not tell gets one ratio for all its layers.

    Returns:
        A transformation without state, of gradients in any float dtype.
    """

    def scale(path: tuple[Any, ...], gradient: jax.Array, param: jax.Array) -> jax.Array:
        stacked = layer_axes(path_name(path))
        weight, slope = layer_norms(param, stacked), layer_norms(gradient, stacked)
        nonzero = (weight > 0) & (slope > 0)
        denominator = jnp.where(nonzero, slope + weight_decay * weight, 1)
        ratio = jnp.where(nonzero, trust_coefficient * weight / denominator, 1)
        decayed = gradient.astype(jnp.float32) + weight_decay * param.astype(jnp.float32)
        return (ratio * decayed).astype(gradient.dtype)

    return optax.masked(
        optax.stateless(lambda gradients, params: jax.tree.map_with_path(scale, gradients, params)), mask
    )
