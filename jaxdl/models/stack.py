"""Stacks of equal layers: their parameters are one tree whose arrays have a leading axis `layers`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxdl.models.remat import Remat


def init_stack(init: Callable[[jax.Array], Any], depth: int, key: jax.Array) -> Any:
    """Draws the parameters of each layer and stacks them.

    Args:
        init: gives one layer's parameters, maybe with names of axes, for a random key.
        depth: number of layers.
        key: random key.
    """
    stacked = jax.vmap(init)(jax.random.split(key, depth))
    # The leading axis gets its name, so that it can be laid out like any other.
    return nn.meta.add_axis(stacked, 0, {nn.meta.PARTITION_NAME: "layers"})


def run_stack(
    layer: Callable[[Any, jax.Array, jax.Array], jax.Array],
    params: Any,
    x: jax.Array,
    *,
    remat: Remat,
    scan: bool,
    first: int | jax.Array = 0,
) -> jax.Array:
    """Applies layers one after the other.

    Args:
        layer: `(params of one layer, x, place in the whole stack) -> x`.
        params: stacked along a leading axis.
        x: hidden states, in the dtype that the layers give.
        remat: what is kept for the backward pass; `blocks` is the layers' own affair.
        scan: compile one layer and loop over it, rather than all layers one after another.
        first: place in the whole stack of the first of these layers.
    """

    def one(x: jax.Array, inputs: tuple[Any, jax.Array]) -> tuple[jax.Array, None]:
        params, place = inputs
        return layer(params, x, place), None

    if remat.level not in ("none", "blocks"):
        # A loop keeps the recomputation apart from the first computation by itself.
        one = jax.checkpoint(one, policy=remat.policy, prevent_cse=not scan)
    depth = jax.tree.leaves(params)[0].shape[0]
    inputs = (params, first + jnp.arange(depth))
    if scan:
        return jax.lax.scan(one, x, inputs)[0]
    for i in range(depth):
        x, _ = one(x, jax.tree.map(lambda array, i=i: array[i], inputs))
    return x
