"""Number formats of a run: which dtype holds what."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class Policy:
    """Dtypes of one training step.

    Normalisation statistics, softmax, losses, gradients' sums and the
    optimizer's arithmetic are float32 under every policy.

    Attributes:
        param_dtype: dtype in which parameters are stored and updated.
        compute_dtype: dtype of activations, and of parameters where they meet them.
    """

    param_dtype: Any
    compute_dtype: Any


POLICIES: dict[str, Policy] = {
    "fp32": Policy(param_dtype=jnp.float32, compute_dtype=jnp.float32),
    "bf16": Policy(param_dtype=jnp.float32, compute_dtype=jnp.bfloat16),
}
"""Policies by their name in `precision.policy` (mixed precision: Micikevicius et al. 2017)."""
