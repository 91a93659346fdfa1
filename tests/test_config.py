"""Checks between fields, and the conversions that the types promise."""

import dataclasses
import re
from typing import Any

import pytest
from pydantic import ValidationError

from jaxdl.commandline.schema import options
from jaxdl.config import (
    ImageConfig,
    ImageDataConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ProfileConfig,
    TrainConfig,
)

TRAIN = TrainConfig(steps=10)


def test_defaults_need_only_a_length() -> None:
    assert ImageConfig(train=TRAIN).optimizer.step_epochs == (30.0, 60.0, 80.0)


def test_a_tfds_set_may_be_named_with_its_source() -> None:
    config = ImageDataConfig(name="tfds:cifar10:3.0.2", dir="/data")
    assert (config.name, config.dataset) == ("tfds", "cifar10:3.0.2")
    assert dataclasses.replace(config, batch_size=8).dataset == "cifar10:3.0.2"


def test_every_option_has_a_default_and_a_meaning() -> None:
    for key, schema in options(ImageConfig).items():
        assert "default" in schema, key
        assert len(schema["description"]) > 10, key


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ImageConfig(), r"set train\.steps or train\.epochs"),
        (lambda: TrainConfig(steps=1, epochs=1), r"train\.steps and train\.epochs exclude each other"),
        (lambda: ImageDataConfig(name="image_folder"), r"image_folder .* set data\.dir"),
        (lambda: ImageDataConfig(name="fashion_mnist", dir=""), r"set data\.dir"),
        (lambda: ImageDataConfig(name="tfds", dir="/data"), r"set data\.dataset"),
        (lambda: ImageDataConfig(name="arrays"), r"arrays .* set data\.dir"),
        (
            lambda: ImageDataConfig(name="tfds:cifar10", dataset="mnist", dir="/data"),
            r"data\.name tfds:cifar10 and data\.dataset mnist name two data sets",
        ),
        (lambda: OptimizerConfig(step_epochs=(30, 30)), r"step_epochs must increase .* not 30, 30"),
        (lambda: OptimizerConfig(name="adamw", nesterov=True), r"nesterov works with optimizer\.name sgd"),
        (lambda: OptimizerConfig(epsilon=float("inf")), "finite"),
        (lambda: ParallelConfig(data=0), r"parallel\.data 0 leaves no device"),
        (lambda: ImageConfig(train=TRAIN, resume=True), "as workdir"),
        (
            lambda: ImageConfig(train=TRAIN, profile=ProfileConfig(start=10)),
            r"profile\.start 10 .* take 9 or less",
        ),
        (
            lambda: ImageConfig(train=TRAIN, memory=MemoryConfig(accumulate=3)),
            r"multiple of 3 .* take 255 or 258",
        ),
        (lambda: ImageConfig(train=TRAIN, memory=MemoryConfig(accumulate=300)), r"take 300\b"),
        *[
            (lambda remat=remat: MemoryConfig(remat=remat), rf"memory\.remat '{remat}' is not none, dots")
            for remat in ("dot", "blocks,full", "names", "names:", "names:a,,b", "NONE")
        ],
        *[
            (lambda key=key: PrecisionConfig(**{key: 2**31}), "less than")
            for key in ("scale_window", "scale_hysteresis", "max_skipped_updates")
        ],
        *[
            (lambda key=key, value=value: PrecisionConfig(**{key: value}), "than or equal")
            for key in ("scale_start", "scale_minimum", "scale_maximum")
            for value in (1e39, 1e-38)
        ],
        (lambda: MemoryConfig(offload="activations"), r"set memory\.remat to dots or names:\.\.\., not none"),
        (lambda: MemoryConfig(offload="all", remat="blocks"), r"memory\.offload all .* not blocks"),
        (
            lambda: ImageConfig(
                train=TRAIN, memory=MemoryConfig(accumulate=4), parallel=ParallelConfig(data=3)
            ),
            r"multiple of 12 \(memory\.accumulate 4 times parallel\.data 3\): take 252 or 264",
        ),
    ],
)
def test_impossible_combinations(build: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build()


def test_all_problems_of_a_config_are_named_together() -> None:
    with pytest.raises(ValidationError) as caught:
        ImageConfig(resume=True, memory=MemoryConfig(accumulate=3))
    assert all(re.search(word, str(caught.value)) for word in ("train.steps", "batch_size", "workdir"))


def test_sections_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TRAIN.steps = 3  # type: ignore[misc]
