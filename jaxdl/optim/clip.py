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


def clip_by_global_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Scales the gradient down to a global norm, where it is larger (Pascanu et al. 2013).

    Unlike optax's transformation of that name, this one keeps 16-bit gradients
    exact in the norm, and takes the norm as the extra argument `norm` where it
    is known: where the gradient is part of a larger one, it must be given.
    """

    def clip(
        updates: Any, state: Any, params: Any = None, *, norm: jax.Array | None = None, **_: Any
    ) -> tuple[Any, Any]:
        factor = limit / jnp.maximum(global_norm(updates) if norm is None else norm, limit)
        clipped = jax.tree.map(lambda leaf: (leaf.astype(jnp.float32) * factor).astype(leaf.dtype), updates)
        return clipped, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), clip)
