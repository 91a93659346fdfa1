"""Layers that the models are made of: convolution, batch normalisation, classifier.

A layer takes `dtype` (what it computes and returns) and `param_dtype` (what its
parameters are stored in), and tags its result with its own name
(`jaxdl.models.remat`). Every array carries logical axis names
(`flax.linen.with_logical_partitioning`) that a plan may map to mesh axes;
`flax.linen.unbox` takes them off.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxdl.errors import ConfigError
from jaxdl.models.convolution import Formulation, convolve
from jaxdl.models.logical import AXIS
from jaxdl.models.normalization import Peers, affine, expand, normalize_by_batch
from jaxdl.models.remat import tag

# He et al. 2015 (https://arxiv.org/abs/1502.01852) for the backward pass, as the reference ResNets use it.
_he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class Conv(nn.Module):
    """Square convolution without bias.

    Attributes:
        features: Output channels.
        kernel_size: Height and width of the kernel.
        strides: Step of the output grid in both directions.
        padding: Zeros added on all four sides; half the kernel where it is None.
        dtype: Dtype of computation and result.
        param_dtype: Dtype of the kernel, [kernel_size, kernel_size, channel_in, features].
        formulation: How it is computed, see `jaxdl.models.convolution`.
    """

    features: int
    kernel_size: int
    strides: int = 1
    padding: int | None = None
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    formulation: Formulation = "auto"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, height, width, channel_in] to [batch, out_height, out_width, features]."""
        kernel = self.param(
            "kernel",
            nn.with_logical_partitioning(_he_normal, (None, None, "channel_in", "channel")),
            (self.kernel_size, self.kernel_size, x.shape[-1], self.features),
            self.param_dtype,
        )
        y = convolve(
            x.astype(self.dtype),
            kernel.astype(self.dtype),
            strides=self.strides,
            padding=self.kernel_size // 2 if self.padding is None else self.padding,
            formulation=self.formulation,
        )
        return tag(y, self.name)


@dataclass(frozen=True)
class BatchNormScope:
    """Which examples of a batch are normalised together in training.

    Running statistics are means over the groups. Small groups are cheap to normalise on devices of their own,
    and regularise (Hoffer et al. 2017, https://arxiv.org/abs/1705.08741).

    Attributes:
        groups: Equal parts of the whole batch, each of consecutive examples, that are normalised apart.
            None: the examples at hand are one group, whatever others there are.
    """

    groups: int | None = 1

    def resolve(self, examples: int) -> tuple[int, Peers | None]:
        """Tells into how many groups the examples at hand fall, and which copies share each.

        Args:
            examples: Number of examples at hand.

        Raises:
            ConfigError: Neither do the groups divide the copies evenly, nor the copies the groups; or the
                groups do not divide the examples.
        """
        copies = _copies()
        if self.groups is None:
            return 1, None
        if self.groups % copies == 0 and examples % (self.groups // copies) == 0:
            return self.groups // copies, None
        if copies > 1 and copies % self.groups == 0:
            return 1, (AXIS, None if self.groups == 1 else copies // self.groups)
        raise ConfigError(
            f"parallel.batch_norm: {self.groups} groups do not divide {examples} examples on each of "
            f"{copies} device(s) evenly: take a divisor or a multiple of the devices that divides the batch"
        )


def _copies() -> int:
    """Counts the copies of this computation that have other examples of the batch; 1 without a map."""
    try:
        return int(jax.lax.axis_size(AXIS))
    except NameError:
        return 1


WHOLE_BATCH = BatchNormScope()


class BatchNorm(nn.Module):
    """Batch normalisation over all axes but the last (Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167).

    The sum with a shortcut and the rectifier that follow it in residual networks are part of it, since each
    would otherwise be one more pass over memory, forward and backward.

    Statistics are computed and kept in float32 whatever `dtype` is. The variance
    is the mean squared distance from the mean, not E[x^2] - E[x]^2, which loses
    every digit once the mean is large against the deviation. As in flax, and
    unlike PyTorch, the running variance averages the biased batch variance that
    normalised the batch.

    Attributes:
        momentum: Share of the old running average that each training call keeps.
        epsilon: Added to the variance.
        zero_scale: Start the scale at 0 rather than 1.
        rectify: Apply max(., 0) to the result.
        batch: Which examples of the batch are normalised together.
        dtype: Dtype of the result.
        param_dtype: Dtype of scale and bias, [channel].
    """

    momentum: float = 0.9
    epsilon: float = 1e-5
    zero_scale: bool = False
    rectify: bool = False
    batch: BatchNormScope = WHOLE_BATCH
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, residual: jax.Array | None = None) -> jax.Array:
        """Normalises [..., channel] by the batch's statistics (train) or the running ones.

        Args:
            x: [..., channel].
            train: Use the batch's statistics and update `batch_stats`, which must then be mutable.
            residual: Like x; added before the rectifier.
        """
        shape = (x.shape[-1],)
        scale_init = nn.initializers.zeros if self.zero_scale else nn.initializers.ones
        scale = self.param("scale", _by_channel(scale_init), shape, self.param_dtype)
        bias = self.param("bias", _by_channel(nn.initializers.zeros), shape, self.param_dtype)
        zeros, ones = _by_channel(nn.initializers.zeros), _by_channel(nn.initializers.ones)
        running_mean = self.variable("batch_stats", "mean", zeros, None, shape, jnp.float32)
        running_var = self.variable("batch_stats", "var", ones, None, shape, jnp.float32)

        scale, bias = scale.astype(jnp.float32), bias.astype(jnp.float32)
        x = x.astype(self.dtype)
        if not train:
            factor = scale * jax.lax.rsqrt(running_var.value + self.epsilon)
            return tag(affine(x, running_mean.value, factor, bias, residual, self.rectify), self.name)
        groups, peers = self.batch.resolve(len(x))
        if groups == 1:
            y, mean, var = normalize_by_batch(x, scale, bias, residual, self.epsilon, self.rectify, peers)
        else:
            each = partial(normalize_by_batch, epsilon=self.epsilon, rectify=self.rectify, peers=peers)
            y, mean, var = _by_group(each, groups, x, scale, bias, residual)
        if not self.is_initializing():
            running_mean.value = self.momentum * running_mean.value + (1 - self.momentum) * mean
            running_var.value = self.momentum * running_var.value + (1 - self.momentum) * var
        return tag(y, self.name)


def _by_group(
    normalize: Callable[..., tuple[jax.Array, jax.Array, jax.Array]],
    groups: int,
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    residual: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalises consecutive groups of examples apart; gives the mean of their means and variances."""

    def split(array: jax.Array) -> jax.Array:
        return array.reshape(groups, -1, *array.shape[1:])

    in_axes = (0, None, None, None if residual is None else 0)
    mapped = jax.vmap(normalize, in_axes)
    y, mean, var = mapped(split(x), scale, bias, None if residual is None else split(residual))
    return y.reshape(x.shape), mean.mean(0), var.mean(0)


class Classifier(nn.Module):
    """Mean over the image, then one linear layer to float32 logits.

    Attributes:
        num_classes: Number of logits.
        dtype: Dtype of the product.
        param_dtype: Dtype of kernel [channel, num_classes] and bias [num_classes].
    """

    num_classes: int
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, height, width, channel] to float32 logits [batch, num_classes]."""
        x = x.mean((1, 2), dtype=jnp.float32).astype(self.dtype)
        # Normal with deviation 0.01 and zero bias: Goyal et al. 2017 (https://arxiv.org/abs/1706.02677), 5.1.
        kernel = self.param(
            "kernel",
            nn.with_logical_partitioning(nn.initializers.normal(0.01), ("channel", "classes")),
            (x.shape[-1], self.num_classes),
            self.param_dtype,
        )
        bias = self.param(
            "bias",
            nn.with_logical_partitioning(nn.initializers.zeros, ("classes",)),
            (self.num_classes,),
            self.param_dtype,
        )
        logits = jnp.matmul(x, kernel.astype(self.dtype), preferred_element_type=jnp.float32)
        return logits + expand(bias.astype(jnp.float32), logits)


def _by_channel(init: nn.initializers.Initializer) -> nn.initializers.Initializer:
    return nn.with_logical_partitioning(init, ("channel",))
