"""Trains a residual network on images: `python -m experiments.resnet50 --help`."""

from pathlib import Path

from jaxdl import commandline, environment
from jaxdl.config import Config

PRESETS = Path(__file__).resolve().parents[1] / "configs" / "resnet50"


def run(config: Config) -> int:
    """Builds what the configuration names, and trains it."""
    environment.prepare(config.memory.allocator)
    # JAX is imported only now: it reads the environment, and `--help` should not wait for it.
    from jaxdl import models
    from jaxdl.data.sources import open_source
    from jaxdl.precision import parse_policy
    from jaxdl.train.loop import train
    from jaxdl.train.task import Classification

    environment.compilation_cache()
    train_source = open_source(config.data, "train")
    eval_source = open_source(config.data, "eval")
    policy = parse_policy(config.precision.policy)
    model = models.build(
        config.model.name,
        num_classes=train_source.num_classes,
        stem=models.resolve_stem(config.model.stem, config.data.image_size),
        dtype=policy.compute,
        param_dtype=policy.params,
        convolution=config.model.convolution,
    )
    task = Classification(
        model=model,
        image_size=config.data.image_size,
        mean=train_source.mean,
        std=train_source.std,
        label_smoothing=config.optimizer.label_smoothing,
        output_dtype=policy.output,
    )
    return train(config, task, train_source, eval_source, experiment="resnet50")


if __name__ == "__main__":
    commandline.main(
        run,
        program="python -m experiments.resnet50",
        default_preset=PRESETS / "digits.yaml",
        description="Train a residual network on images.",
    )
