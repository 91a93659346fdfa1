"""Gradient clipping whose norm is computed in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def global_norm(tree: Any) -> jax.Array:
    """Returns the Euclidean norm of all values of a tree, as a float32 scalar, whatever their dtype.

    Squares of float16 values overflow from 256 on, and a bfloat16 sum has two
    to three digits.
    """
    norm: jax.Array = optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree))
    return norm


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
    """Scales the gradient down to a global norm, where it is larger (Pascanu et al. 2013).

    Unlike optax's transformation of that name, this one keeps 16-bit gradients
    exact in the norm.
    """

    def clip(updates: Any, params: Any = None) -> Any:
        factor = limit / jnp.maximum(global_norm(updates), limit)
        return jax.tree.map(lambda leaf: (leaf.astype(jnp.float32) * factor).astype(leaf.dtype), updates)

    return optax.stateless(clip)
