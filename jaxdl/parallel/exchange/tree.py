"""Sums and multiples of trees of arrays."""

from typing import Any

import jax
import jax.numpy as jnp


def add(left: Any, right: Any) -> Any:
    """Adds two trees of one structure, each pair of arrays in the dtype of the left one."""
    return jax.tree.map(lambda one, other: one + other.astype(one.dtype), left, right)


def subtract(left: Any, right: Any) -> Any:
    """Subtracts a tree from another of the same structure and dtypes."""
    return jax.tree.map(lambda one, other: one - other, left, right)


def scale(tree: Any, factor: float | jax.Array) -> Any:
    """Multiplies all arrays of a tree with a scalar, in their own dtypes."""
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), tree)


def zeros(tree: Any) -> Any:
    """Zeros like the arrays of a tree."""
    return jax.tree.map(jnp.zeros_like, tree)


def choose(condition: bool | jax.Array, left: Any, right: Any) -> Any:
    """The left tree where a condition holds, else the right one."""
    return jax.tree.map(lambda one, other: jnp.where(condition, one, other), left, right)
