"""Updates made smaller for the wire, with what is left out kept for the next one (error feedback).

What a worker sends and what it keeps are together what it had, so nothing is lost for good: Seide et al.
2014 for few bits, Stich et al. 2018 (https://arxiv.org/abs/1809.07599) for few entries.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxdl.parallel.exchange import tree

Kind = Literal["none", "bfloat16", "int8", "top_k"]


def compress(delta: Any, residual: Any, kind: Kind, *, share: float = 0.01) -> tuple[Any, Any]:
    """Makes an update smaller.

    Args:
        delta: a tree of float arrays.
        residual: what earlier calls have left out; zeros at the start.
        kind: `none`; `bfloat16`, two bytes an entry; `int8`, one byte and a scale for each array; `top_k`,
            the entries of the largest size with their places.
        share: of the entries that `top_k` sends, of each array, rounded up.

    Returns:
        What is to be sent, for `expand`, and what is left out now.
    """
    if kind == "none":
        return delta, residual
    whole = tree.add(delta, residual)
    sent = jax.tree.map(lambda leaf: _SHRINK[kind](leaf, share), whole)
    return sent, tree.subtract(whole, expand(sent, whole))


def expand(sent: Any, like: Any) -> Any:
    """Gives back an update, in the shapes and dtypes of a tree.

    Args:
        sent: what `compress` made.
        like: a tree of the update's structure, of arrays or shapes.
    """
    return jax.tree.map(_expanded, like, sent)


def wire_bytes(sent: Any) -> int:
    """Counts the bytes of what is sent."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sent))


def _to_int8(leaf: jax.Array, share: float) -> dict[str, jax.Array]:
    del share
    largest = jnp.max(jnp.abs(leaf)).astype(jnp.float32)
    # An array of zeros has no scale of its own; any will do.
    scale = jnp.where(largest > 0, largest / 127, 1.0)
    return {"values": jnp.round(leaf.astype(jnp.float32) / scale).astype(jnp.int8), "scale": scale}


def _to_top_k(leaf: jax.Array, share: float) -> dict[str, jax.Array]:
    flat = leaf.reshape(-1)
    _, places = jax.lax.top_k(jnp.abs(flat), max(1, math.ceil(share * flat.size)))
    return {"values": flat[places], "places": places.astype(jnp.int32)}


_SHRINK: dict[str, Any] = {
    "bfloat16": lambda leaf, share: leaf.astype(jnp.bfloat16),
    "int8": _to_int8,
    "top_k": _to_top_k,
}


def _expanded(like: Any, sent: Any) -> Any:
    if not isinstance(sent, dict):
        return jnp.asarray(sent, like.dtype)
    if "scale" in sent:
        return (sent["values"].astype(jnp.float32) * sent["scale"]).astype(like.dtype)
    flat = jnp.zeros(math.prod(like.shape), like.dtype)
    return flat.at[sent["places"]].set(sent["values"].astype(like.dtype)).reshape(like.shape)
