"""Number formats of a run: which dtype holds what, and the scale that keeps float16 gradients alive.

Under every policy, batch statistics and normalisation, softmax, losses, the sums over a batch and the running
averages are computed and kept in float32. What a policy decides:

| policy             | parameters | compute  | products of float32 on a GPU   | loss scale |
|--------------------|------------|----------|--------------------------------|------------|
| `fp32`, `O0`       | float32    | float32  | in float32                     | none       |
| `tf32`             | float32    | float32  | with 10 bits of mantissa       | none       |
| `bf16`             | float32    | bfloat16 |                                | none       |
| `fp16`, `O1`, `O2` | float32    | float16  |                                | dynamic    |
| `bf16_full`        | bfloat16   | bfloat16 |                                | none       |
| `O3`               | float16    | float16  |                                | dynamic    |

Parameters in float32 are the master weights of mixed precision (Micikevicius et al. 2017,
https://arxiv.org/abs/1710.03740): the optimizer updates them, and the network sees them rounded. Where the
parameters themselves are 16 bits wide, so are the gradients and the optimizer's moments, and updates smaller
than half a unit in the last place are lost.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.config import PrecisionConfig


@dataclass(frozen=True)
class Policy:
    """Dtypes of one training step.

    Attributes:
        params: dtype in which parameters are stored and updated.
        compute: dtype of activations, and of parameters where they meet them.
        output: dtype of the network's output; losses are computed from it in float32.
        matmul: precision of products of float32 values, a name of `jax.default_matmul_precision`.
    """

    params: Any = jnp.float32
    compute: Any = jnp.float32
    output: Any = jnp.float32
    matmul: str = "float32"

    @property
    def loses_small_updates(self) -> bool:
        """Whether the parameters are too coarse to sum up small updates."""
        return bool(jnp.dtype(self.params).itemsize < 4)

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients may fall below the smallest number of the compute dtype."""
        return bool(jnp.dtype(self.compute) == jnp.float16)


POLICIES: dict[str, Policy] = {
    "fp32": Policy(),
    "tf32": Policy(matmul="tensorfloat32"),
    "bf16": Policy(compute=jnp.bfloat16),
    "fp16": Policy(compute=jnp.float16),
    "bf16_full": Policy(params=jnp.bfloat16, compute=jnp.bfloat16),
    "O0": Policy(),
    "O1": Policy(compute=jnp.float16),
    "O2": Policy(compute=jnp.float16),
    "O3": Policy(params=jnp.float16, compute=jnp.float16),
}
"""Policies by name; `O0` to `O3` are those of NVIDIA Apex."""


def parse_policy(text: str) -> Policy:
    """Returns the policy of a name, or of `params=float32,compute=bfloat16,output=float32`.

    The configuration has checked the text already.
    """
    if text in POLICIES:
        return POLICIES[text]
    dtypes: dict[str, Any] = dict(part.split("=") for part in text.split(","))
    return Policy(**{key: jnp.dtype(name) for key, name in dtypes.items()})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The factor by which the loss is multiplied before, and gradients divided after, differentiation.

    Attributes:
        scale: float32 scalar.
        clean: int32, finite updates since the scale last changed or an update was skipped.
        patience: int32, updates that may still be skipped before the scale falls.
        skipped: int32, updates skipped in the whole run.
        skipped_in_a_row: int32, updates skipped since the last finite one.
    """

    scale: jax.Array
    clean: jax.Array
    patience: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array


def scaling(config: PrecisionConfig) -> str:
    """Resolves `loss_scale`: `none`, `dynamic`, or the text of a number."""
    if config.loss_scale == "auto":
        return "dynamic" if parse_policy(config.policy).needs_loss_scale else "none"
    return config.loss_scale


def init_loss_scale(config: PrecisionConfig) -> LossScale | None:
    """Makes the scale before the first update; None where the loss is not scaled."""
    mode = scaling(config)
    if mode == "none":
        return None
    zero = jnp.zeros((), jnp.int32)
    return LossScale(
        scale=jnp.asarray(config.scale_start if mode == "dynamic" else float(mode), jnp.float32),
        clean=zero,
        patience=jnp.asarray(config.scale_hysteresis, jnp.int32),
        skipped=zero,
        skipped_in_a_row=zero,
    )


def next_loss_scale(state: LossScale, finite: jax.Array, config: PrecisionConfig) -> LossScale:
    """Takes in whether an update was finite: one decision an update, whatever the number of micro-batches.

    The rule is Megatron-LM's: the scale falls by `scale_backoff` at the
    `scale_hysteresis`-th update that is not finite, and at every one after
    it; it grows by `scale_growth` after `scale_window` finite updates in a row,
    which also restores the patience. A fixed scale only counts.

    Args:
        state: scale and counters before the update.
        finite: bool scalar.
        config: the rule's constants.
    """
    one = jnp.ones((), jnp.int32)
    counted = LossScale(
        scale=state.scale,
        clean=jnp.where(finite, state.clean + one, 0),
        patience=jnp.where(finite, state.patience, jnp.maximum(state.patience - one, 0)),
        skipped=jnp.where(finite, state.skipped, state.skipped + one),
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + one),
    )
    if scaling(config) != "dynamic":
        return counted
    grows = counted.clean >= config.scale_window
    falls = ~finite & (counted.patience == 0)
    lower = jnp.maximum(state.scale * config.scale_backoff, config.scale_minimum)
    higher = jnp.minimum(state.scale * config.scale_growth, config.scale_maximum)
    return LossScale(
        scale=jnp.where(falls, lower, jnp.where(grows, higher, state.scale)),
        clean=jnp.where(grows, 0, counted.clean),
        patience=jnp.where(grows, config.scale_hysteresis, counted.patience),
        skipped=counted.skipped,
        skipped_in_a_row=counted.skipped_in_a_row,
    )
