"""LAMB's trust ratio (You et al. 2019, https://arxiv.org/abs/1904.00962)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdl.optim.masks import LayerAxes, path_name, unstacked


def scale_by_trust_ratio(
    mask: Callable[[Any], Any], layer_axes: LayerAxes = unstacked
) -> optax.GradientTransformation:
    """Scales each layer's update to the norm of its parameters.

    The ratio is ||w|| / ||u||, and 1 where either norm is zero, so parameters
    that start at zero do move. `optax.scale_by_trust_ratio` has no mask, takes
    the norms in the parameters' dtype, and one ratio for a whole stack of
    layers; the definition says one for each layer.

    Args:
        mask: marks the parameters that are adapted; the updates of the others pass unchanged.
        layer_axes: tells which parameters are stacks of layers. A stack that
            it does not tell gets one ratio for all its layers.

    Returns:
        A transformation without state, of updates in any float dtype.
    """

    def scale(path: tuple[Any, ...], update: jax.Array, param: jax.Array) -> jax.Array:
        stacked = layer_axes(path_name(path))
        weight, step = layer_norms(param, stacked), layer_norms(update, stacked)
        nonzero = (weight > 0) & (step > 0)
        ratio = jnp.where(nonzero, weight / jnp.where(nonzero, step, 1), 1)
        return (ratio * update.astype(jnp.float32)).astype(update.dtype)

    return optax.masked(
        optax.stateless(lambda updates, params: jax.tree.map_with_path(scale, updates, params)), mask
    )


def layer_norms(array: jax.Array, layer_axes: int) -> jax.Array:
    """Takes the Euclidean norm of each layer.

    Args:
        array: [layer, ..., remaining axes].
        layer_axes: number of leading axes that count layers.

    Returns:
        float32 [layer, ..., 1, ...], of the array's rank.

    Raises:
        ValueError: the array has fewer axes.
    """
    if not 0 <= layer_axes <= array.ndim:
        raise ValueError(f"{layer_axes} axes cannot count the layers of an array of shape {array.shape}")
    squares = jnp.square(array.astype(jnp.float32))
    return jnp.sqrt(jnp.sum(squares, axis=tuple(range(layer_axes, array.ndim)), keepdims=True))
