"""Residual networks, version 1.5: the stride of a bottleneck lies in its 3x3 convolution.

He et al. 2015, "Deep Residual Learning for Image Recognition"
(https://arxiv.org/abs/1512.03385). Same layers and parameter counts as
torchvision's, so its weights fit (`jaxdl.models.torch_weights`).
"""

# mypy: allow-subclassing-any, allow-untyped-decorators
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxdl.models.convolution import Formulation
from jaxdl.models.layers import WHOLE_BATCH, BatchNorm, BatchNormScope, Classifier, Conv
from jaxdl.models.pooling import max_pool
from jaxdl.models.remat import Remat

Stem = Literal["imagenet", "small"]

DOTS = ("conv", "conv1", "conv2", "conv3", "conv_shortcut")
"""Names of the convolutions' results, see `jaxdl.models.remat`."""
NORMS = ("norm", "norm1", "norm2", "norm3", "norm_shortcut")
"""Names of the normalisations' results."""


class ResNet(nn.Module):
    """Stem, four (or any number of) stages of residual blocks, classifier.

    Usage:
        model = ResNet((2, 2, 2, 2), bottleneck=False, num_classes=10)
        variables = nn.unbox(model.init(key, images, train=False))
        logits, updates = model.apply(variables, images, train=True, mutable=["batch_stats"])

    Attributes:
        stage_sizes: Blocks in each stage; each stage but the first halves the resolution.
        bottleneck: Blocks of 1x1, 3x3, 1x1 convolutions that widen by 4, rather than of two 3x3.
        num_classes: Number of logits.
        width: Channels of the first stage's 3x3 convolutions; each stage doubles them.
        stem: `imagenet`, 7x7 stride 2 and 3x3 max-pooling stride 2; or `small`, 3x3 at full resolution.
        dtype: Dtype of computation; statistics, means and logits are float32 all the same.
        param_dtype: Dtype of the parameters.
        convolution: How convolutions are computed, see `jaxdl.models.convolution`.
        remat: What is kept for the backward pass; the stem counts as a block and as a stage.
        batch_norm: Which examples of a batch are normalised together.
    """

    stage_sizes: tuple[int, ...]
    bottleneck: bool
    num_classes: int
    width: int = 64
    stem: Stem = "imagenet"
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    convolution: Formulation = "auto"
    remat: Remat = Remat()
    batch_norm: BatchNormScope = WHOLE_BATCH

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps images [batch, height, width, channel] to float32 logits [batch, num_classes].

        Args:
            x: Images of any float dtype.
            train: Normalise by the batch's statistics and update `batch_stats`.
        """

        def run(parent: nn.Module, x: jax.Array, stage: int, train: bool) -> jax.Array:
            for block in self._stages()[stage]:
                x = block(parent=parent)(x, train)
            return x

        if self.remat.level == "full":
            run = nn.remat(run, policy=self.remat.policy, static_argnums=(2, 3))
        x = x.astype(self.dtype)
        for stage in range(len(self.stage_sizes) + 1):
            x = run(self, x, stage, train)
        logits: jax.Array = self._head()(x)
        return logits

    @nn.nowrap
    def layers(self) -> list[nn.Module]:
        """The network as a chain: stem and blocks, called (x, train), then the classifier, called (x).

        Outside of `apply` these are free modules, and `variables[collection][layer.name]` is what each takes:
        all that it needs to cut the chain into pipeline stages.
        """
        return [block() for stage in self._stages() for block in stage] + [self._head()]

    @nn.nowrap
    def _stages(self) -> list[list[Callable[..., nn.Module]]]:
        """What makes each block: the stem's, then each stage's."""
        settings: dict[str, Any] = {
            "convolution": self.convolution,
            "batch_norm": self.batch_norm,
            **self._types(),
        }
        block, stem = BottleneckBlock if self.bottleneck else BasicBlock, _Stem
        if self.remat.level != "none":
            block, stem = (
                nn.remat(kind, policy=self.remat.policy, static_argnums=(2,)) for kind in (block, stem)
            )
        stages: list[list[Callable[..., nn.Module]]] = [
            [partial(stem, self.width, self.stem, name="stem", **settings)]
        ]
        for stage, size in enumerate(self.stage_sizes):
            strides = [2 if stage > 0 and i == 0 else 1 for i in range(size)]
            features = self.width * 2**stage
            stages.append(
                [
                    partial(block, features, stride, name=f"layer{stage + 1}_{i}", **settings)
                    for i, stride in enumerate(strides)
                ]
            )
        return stages

    @nn.nowrap
    def _head(self) -> nn.Module:
        return Classifier(self.num_classes, name="head", **self._types())

    @nn.nowrap
    def _types(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


class _Stem(nn.Module):
    """First convolution, with or without max-pooling."""

    features: int
    kind: Stem
    dtype: DTypeLike
    param_dtype: DTypeLike
    convolution: Formulation
    batch_norm: BatchNormScope

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv, norm = _parts(self)
        large = self.kind == "imagenet"
        x = conv(self.features, 7 if large else 3, 2 if large else 1, name="conv")(x)
        x = norm(rectify=True, name="norm")(x, train)
        return max_pool(x, 3, 2, 1) if large else x


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut (ResNet-18 and 34).

    Attributes:
        features: Channels within and after the block.
        strides: Of the first convolution.
        dtype: Dtype of computation.
        param_dtype: Dtype of the parameters.
        convolution: How convolutions are computed.
        batch_norm: Which examples are normalised together.
    """

    features: int
    strides: int
    dtype: DTypeLike
    param_dtype: DTypeLike
    convolution: Formulation
    batch_norm: BatchNormScope

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps [batch, height, width, channel] to [batch, height / strides, width / strides, features]."""
        conv, norm = _parts(self)
        y = conv(self.features, 3, self.strides, name="conv1")(x)
        y = norm(rectify=True, name="norm1")(y, train)
        y = conv(self.features, 3, name="conv2")(y)
        shortcut = _shortcut(conv, norm, x, self.features, self.strides, train)
        out: jax.Array = norm(zero_scale=True, rectify=True, name="norm2")(y, train, shortcut)
        return out


class BottleneckBlock(nn.Module):
    """1x1, 3x3 and widening 1x1 convolution around a shortcut (ResNet-50, 101 and 152).

    Attributes:
        features: Channels of the first two convolutions; the block gives four times as many.
        strides: Of the 3x3 convolution.
        dtype: Dtype of computation.
        param_dtype: Dtype of the parameters.
        convolution: How convolutions are computed.
        batch_norm: Which examples are normalised together.
    """

    features: int
    strides: int
    dtype: DTypeLike
    param_dtype: DTypeLike
    convolution: Formulation
    batch_norm: BatchNormScope

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps [batch, height, width, channel] to [batch, height / strides, width / strides, 4 features]."""
        conv, norm = _parts(self)
        y = conv(self.features, 1, name="conv1")(x)
        y = norm(rectify=True, name="norm1")(y, train)
        y = conv(self.features, 3, self.strides, name="conv2")(y)
        y = norm(rectify=True, name="norm2")(y, train)
        y = conv(4 * self.features, 1, name="conv3")(y)
        shortcut = _shortcut(conv, norm, x, 4 * self.features, self.strides, train)
        out: jax.Array = norm(zero_scale=True, rectify=True, name="norm3")(y, train, shortcut)
        return out


def _parts(module: Any) -> tuple[Any, Any]:
    """The convolution and the normalisation of a module's settings."""
    types = {"dtype": module.dtype, "param_dtype": module.param_dtype}
    norm = partial(BatchNorm, batch=module.batch_norm, **types)
    return partial(Conv, formulation=module.convolution, **types), norm


def _shortcut(conv: Any, norm: Any, x: jax.Array, features: int, strides: int, train: bool) -> jax.Array:
    """x itself, or its projection where the block changes the shape."""
    if strides == 1 and x.shape[-1] == features:
        return x
    projected = conv(features, 1, strides, name="conv_shortcut")(x)
    y: jax.Array = norm(name="norm_shortcut")(projected, train)
    return y
