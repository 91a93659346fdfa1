"""Runs that train a network on images."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from jaxdl.config.fields import STRICT, Fraction, Positive, refuse
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

    name: Literal["digits", "fashion_mnist", "arrays", "image_folder", "imagenet", "tfds", "synthetic"] = (
        "digits"
    )
    """Source: `digits` (1,797 images, in scikit-learn), `fashion_mnist` (idx files in `dir`), `arrays` (`dir`
    is an .npz file of x_train, y_train, x_test and y_test), `image_folder` (`dir`/train/<class>/*.jpg and
    `dir`/val/<class>/*.jpg), `imagenet` (the archives of ILSVRC 2012 in `dir`, as they are distributed),
    `tfds` (a data set in array_record files in `dir`, of TensorFlow Datasets or of experiments.prepare),
    `synthetic` (generated). `tfds:NAME` is `tfds` with `dataset` NAME."""

    dataset: str | None = None
    """TFDS only: the data set's name, as `imagenet2012` or `cifar10:3.0.2`."""

    train_split: str = "train"
    """TFDS only: split to train on."""

    eval_split: str = "validation"
    """TFDS only: split to evaluate on."""

    image_size: Positive = 224
    """Height and width of the images that the network sees, in pixels."""

    augment: Literal["auto", "none", "shift", "shift_flip", "crop_flip"] = "auto"
    """What training does to an image first: `shift` moves it by up to an eighth of its size, `shift_flip`
    also mirrors it, `crop_flip` is the random resized crop and mirror of the ImageNet recipe; `auto` takes
    the source's own."""

    policy: Literal["none", "randaugment", "trivialaugment"] = "none"
    """What it does then: `randaugment` (Cubuk et al. 2019) or `trivialaugment` (Müller and Hutter 2021)."""

    randaugment_layers: Positive = 2
    """RandAugment only: operations on each image."""

    randaugment_magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """RandAugment only: their strength, of 30."""

    color_jitter: Fraction = 0.0
    """How much brightness, contrast and saturation change at random, each by a factor of 1 +- this."""

    erasing: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability that a rectangle of an image is replaced with noise (Zhong et al. 2017)."""

    mixup: Annotated[float, Field(ge=0)] = 0.0
    """Blend images in pairs, with a share drawn from Beta(a, a) for this a (Zhang et al. 2017; 0: never)."""

    cutmix: Annotated[float, Field(ge=0)] = 0.0
    """Paste a rectangle of another image, likewise (Yun et al. 2019); with `mixup` too each pair takes
    either."""

    remainder: Literal["carry", "drop"] = "carry"
    """What becomes of the examples that fill no batch at the end of an epoch: `carry` fills the batch with
    those of the next epoch, `drop` leaves them out of this one. Evaluation always counts every example."""

    on_bad: Literal["error", "skip"] = "error"
    """An example that cannot be decoded stops the run (`error`), or another takes its place in training and
    it does not count in evaluation (`skip`), and the log names it."""

    max_bad: Fraction = 0.05
    """Share of the examples that may be skipped; more stop the run."""

    worker_processes: Annotated[int, Field(ge=0)] = 0
    """Processes that read and transform examples, each with `workers` threads (0: the threads of the training
    process, which suffice for some 10 cores). Never changes the data."""

    synthetic_examples: Positive = 1024
    """Synthetic only: training examples; a quarter as many are for evaluation."""

    synthetic_classes: Annotated[int, Field(ge=2)] = 1000
    """Synthetic only: number of classes."""

    @model_validator(mode="before")
    @classmethod
    def _read_name(cls, values: Any) -> Any:
        """Divides `tfds:NAME` into `name` and `dataset`."""
        given: dict[str, Any] = values if isinstance(values, dict) else getattr(values, "kwargs", None) or {}
        name, _, dataset = str(given.get("name", "")).partition(":")
        if name != "tfds" or not dataset:
            return values
        if given.get("dataset") not in (None, dataset):
            raise ValueError(
                f"data.name tfds:{dataset} and data.dataset {given['dataset']} name two data sets: "
                "give only one"
            )
        return given | {"name": name, "dataset": dataset}

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.name in ("fashion_mnist", "arrays", "image_folder", "imagenet", "tfds") and not self.dir:
            problems.append(f"data.name {self.name} is read from files: set data.dir to where they are")
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
