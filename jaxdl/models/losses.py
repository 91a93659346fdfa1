"""Losses and hits over classes, written so that devices that share the classes send little.

A label's logit is found by a comparison with each class: to fetch one number of an axis that is divided is to
gather all of it.
"""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, label: jax.Array, *, smoothing: float = 0.0) -> jax.Array:
    """Gives minus the log-probability of labels, float32 [...].

    Args:
        logits: [..., classes].
        label: int32 [...].
        smoothing: Probability mass spread evenly over the classes (Szegedy et al. 2015).
    """
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    plain = total - jnp.where(_is(label, logits), logits, 0).sum(-1)
    if not smoothing:
        return plain
    # Smoothed labels are a mixture: of the label, and of every class alike.
    return (1 - smoothing) * plain + smoothing * (total - logits.mean(-1))


def is_first(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Tells whether a label's logit is above all others: a network that gives all the same, or NaN, is wrong.

    Args:
        logits: float32 [..., classes].
        label: int32 [...].

    Returns:
        bool [...].
    """
    own = _is(label, logits)
    value = jnp.where(own, logits, 0).sum(-1, keepdims=True)
    ahead: jax.Array = (~(logits < value) & ~own).sum(-1)
    return ahead == 0


def _is(label: jax.Array, logits: jax.Array) -> jax.Array:
    """Which of the classes is the label, bool [..., classes]."""
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return classes == label[..., None]
