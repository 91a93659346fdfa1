"""Models: pure Flax modules that know no device, mesh or precision policy.

`build` makes one by name. A module is called (x, train) and returns float32
logits; `init` gives the collections `params` and, where the network normalises
by batch, `batch_stats`.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxdl.errors import ConfigError
from jaxdl.models.convolution import Formulation
from jaxdl.models.layers import WHOLE_BATCH, BatchNormScope
from jaxdl.models.remat import Remat
from jaxdl.models.resnet import DOTS, NORMS, ResNet, Stem

__all__ = ["MODELS", "BatchNormScope", "ResNet", "build", "resolve_stem"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": partial(ResNet, (2, 2, 2, 2), False),
    "resnet34": partial(ResNet, (3, 4, 6, 3), False),
    "resnet50": partial(ResNet, (3, 4, 6, 3), True),
    "resnet101": partial(ResNet, (3, 4, 23, 3), True),
    "resnet152": partial(ResNet, (3, 8, 36, 3), True),
}
"""Name -> constructor with the keywords of `build`. A new model is a new line."""


def build(
    name: str,
    *,
    num_classes: int,
    stem: Stem = "imagenet",
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    convolution: Formulation = "auto",
    remat: str = "none",
    offload: bool = False,
    batch_norm: BatchNormScope = WHOLE_BATCH,
) -> nn.Module:
    """Makes a model by name.

    Args:
        name: A key of `MODELS`.
        num_classes: Number of logits.
        stem: First layers, see `ResNet`; `resolve_stem` turns the configuration's `auto` into one.
        dtype: Dtype of computation.
        param_dtype: Dtype of the parameters.
        convolution: How convolutions are computed, see `jaxdl.models.convolution`.
        remat: What is kept for the backward pass: `none`, `dots`, `blocks`, `full` or `names:a,b`, see
            `jaxdl.models.remat`.
        offload: Keep what `remat` keeps by name in the host's memory.
        batch_norm: Which examples of a batch are normalised together.

    Raises:
        ConfigError: There is no such model, or it has no such activation.
    """
    if name not in MODELS:
        raise ConfigError(f"model.name: there is no model {name!r}; choose one of {', '.join(MODELS)}")
    return MODELS[name](
        num_classes=num_classes,
        stem=stem,
        dtype=dtype,
        param_dtype=param_dtype,
        convolution=convolution,
        remat=Remat.parse(remat, dots=DOTS, others=NORMS, offload=offload),
        batch_norm=batch_norm,
    )


def resolve_stem(stem: Literal["auto", "imagenet", "small"], image_size: int) -> Stem:
    """What `auto` means: the small stem for images of at most 64 pixels."""
    if stem == "auto":
        return "small" if image_size <= 64 else "imagenet"
    return stem
