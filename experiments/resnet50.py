"""Trains a residual network on images: `python -m experiments.resnet50 --help`."""

import os.path
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdl import commandline, environment
from jaxdl.config import ImageConfig
from jaxdl.errors import ConfigError

if TYPE_CHECKING:
    from jaxdl.data.images.types import Source
    from jaxdl.train.task import Classification

PRESETS = Path(__file__).resolve().parents[1] / "configs" / "resnet50"


def run(config: ImageConfig) -> int:
    """Builds what the configuration names, and trains it."""
    environment.prepare(config.memory.allocator)
    # JAX is imported only now: it reads the environment, and `--help` should not wait for it.
    from jaxdl.data.images.batches import ImageFeed
    from jaxdl.data.images.sources import open_source
    from jaxdl.parallel.processes import joined
    from jaxdl.train.loop import train

    environment.compilation_cache()
    with joined(config.parallel):
        train_source = open_source(config.data, "train")
        eval_source = open_source(config.data, "eval")
        task = build_task(config, train_source)
        initial = initial_values(config, task)
        feed = ImageFeed(config.data, train_source, eval_source)
        return train(config, task, feed, experiment="resnet50", initial=initial)


def build_task(config: ImageConfig, train_source: "Source") -> "Classification":
    """Builds the network and its loss for the classes and channels of a training set."""
    from jaxdl import models
    from jaxdl.precision import parse_policy
    from jaxdl.train.task import Classification

    policy, parallel = parse_policy(config.precision.policy), config.parallel
    if parallel.circular:
        raise ConfigError(
            f"parallel.schedule circular is for models whose layers are equal; {config.model.name} takes "
            "gpipe or 1f1b"
        )
    model = models.build(
        config.model.name,
        num_classes=train_source.num_classes,
        stem=models.resolve_stem(config.model.stem, config.data.image_size),
        dtype=policy.compute,
        param_dtype=policy.params,
        convolution=config.model.convolution,
        remat=config.memory.remat,
        offload=config.memory.offloads_activations,
        batch_norm=models.BatchNormScope(parallel.batch_norm_groups),
    )
    return Classification(
        model=model,
        image_size=config.data.image_size,
        mean=train_source.mean,
        std=train_source.std,
        label_smoothing=config.optimizer.label_smoothing,
        mixed=bool(config.data.mixup or config.data.cutmix),
        output_dtype=policy.output,
    )


def initial_values(config: ImageConfig, task: "Classification") -> Any:
    """Reads the `(params, model_state)` to start from, or gives None where they are drawn at random."""
    if config.model.weights is None:
        return None
    import jax

    from jaxdl.models.torch_weights import load_torch_weights

    shapes = jax.eval_shape(lambda: task.init(jax.random.key(0)))
    path = os.path.expanduser(config.model.weights)  # noqa: PTH111 - leaves a ~user that does not exist
    return load_torch_weights(Path(path), shapes)


if __name__ == "__main__":
    commandline.main(
        run,
        program="python -m experiments.resnet50",
        config=ImageConfig,
        default_preset=PRESETS / "digits.yaml",
        description="Train a residual network on images.",
    )
