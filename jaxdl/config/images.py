"""Runs that train a network on images."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from jaxdl.config.fields import STRICT, Positive, refuse
from jaxdl.config.run import Config, DataConfig, ModelConfig


@dataclass(frozen=True, config=STRICT)
class ImageModelConfig(ModelConfig):
    """The network."""

    name: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet50"
    """Architecture (He et al. 2015, the v1.5 variant: stride in the 3x3 convolution)."""

    stem: Literal["auto", "imagenet", "small"] = "auto"
    """First layers: `imagenet` is 7x7 stride 2 and max-pooling, `small` a 3x3 convolution that keeps
    the resolution; `auto` takes `small` for images of at most 64 pixels."""

    weights: str | None = None
    """File with weights in torchvision's layout (.safetensors or .npz) to start from."""

    convolution: Literal["auto", "lax", "product"] = "auto"
    """How convolutions are computed: `lax` is XLA's operator, `product` writes them as matrix products
    (same parameters and results, faster on CPUs); `auto` picks by platform and shape."""


@dataclass(frozen=True, config=STRICT)
class ImageDataConfig(DataConfig):
    """Where examples come from and how they are batched."""

    name: Literal["digits", "fashion_mnist", "image_folder", "tfds", "synthetic"] = "digits"
    """Source: `digits` (1,797 images, in scikit-learn), `fashion_mnist` (idx files in `dir`),
    `image_folder` (`dir`/train/<class>/*.jpg and `dir`/val/<class>/*.jpg), `tfds` (a data set prepared
    as array_record files in `dir`), `synthetic` (generated)."""

    dataset: str | None = None
    """TFDS only: the data set's name, as `imagenet2012` or `cifar10:3.0.2`."""

    train_split: str = "train"
    """TFDS only: split to train on."""

    eval_split: str = "validation"
    """TFDS only: split to evaluate on."""

    image_size: Positive = 224
    """Height and width of the images that the network sees, in pixels."""

    augment: Literal["auto", "none", "shift", "shift_flip", "crop_flip"] = "auto"
    """Training augmentation: `shift` moves the image by up to an eighth of its size, `shift_flip` also
    mirrors it, `crop_flip` is the random resized crop and mirror of the ImageNet recipe; `auto` takes the
    source's own."""

    synthetic_examples: Positive = 1024
    """Synthetic only: training examples; a quarter as many are for evaluation."""

    synthetic_classes: Annotated[int, Field(ge=2)] = 1000
    """Synthetic only: number of classes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.name in ("fashion_mnist", "image_folder", "tfds") and not self.dir:
            problems.append(f"data.name {self.name} is read from a directory: set data.dir")
        if self.name == "tfds" and not self.dataset:
            problems.append(
                "data.name tfds needs a data set: set data.dataset, as imagenet2012 or cifar10:3.0.2"
            )
        refuse(problems)
        return self


@dataclass(frozen=True, config=STRICT)
class ImageConfig(Config):
    """A whole run that trains a network on images."""

    model: ImageModelConfig = ImageModelConfig()
    data: ImageDataConfig = ImageDataConfig()
