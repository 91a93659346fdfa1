"""Weights to start from: a directory in Hugging Face's layout, or that of a run of ours."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxdl.config import BertModelConfig
from jaxdl.errors import ConfigError
from jaxdl.models.bert import SIZES, Sizes, with_words
from jaxdl.models.huggingface import load_bert, read_sizes
from jaxdl.train.checkpoint import newest_parameters
from jaxdl.train.task import Task

TOKENIZER = "tokenizer.json"
"""Name of the vocabulary's file in a run's directory, as in Hugging Face's layout."""

CHECKPOINTS = "checkpoints"


def sizes_of(model: BertModelConfig, words: int) -> tuple[Sizes, float]:
    """Gives the sizes of the configured network and the epsilon of its layer normalisations.

    Args:
        model: the section `model`.
        words: pieces in the vocabulary.

    Raises:
        ConfigError: the sizes do not fit together, or the vocabulary not the weights.
    """
    if model.name == "pretrained":
        sizes, epsilon = read_sizes(weights_directory(model))
        if words > sizes.words:
            raise ConfigError(
                f"model.weights: {model.weights} knows {sizes.words:,} words, and the vocabulary has "
                f"{words:,}: set data.vocabulary to that of the weights"
            )
        return sizes, epsilon
    given = {name: getattr(model, name) for name in ("depth", "width", "heads", "mlp", "positions")}
    sizes = replace(SIZES[model.name], **{name: value for name, value in given.items() if value})
    if sizes.width % sizes.heads:
        raise ConfigError(f"model.width {sizes.width} is not a multiple of model.heads {sizes.heads}")
    return with_words(sizes, words, multiple=model.words_multiple), 1e-12


def weights_directory(model: BertModelConfig) -> Path:
    """Gives the directory that `model.weights` names."""
    path = Path(model.weights or "")
    return Path(path.parts[0]).expanduser().joinpath(*path.parts[1:]) if path.parts else path


def initial_values(model: BertModelConfig, task: Task) -> Any:
    """Reads the `(params, model_state)` to start from, or gives None where they are drawn at random.

    What the weights do not have, as a head, is abstract in it.

    Raises:
        ConfigError: the weights are of another network.
        CheckpointError: they cannot be read.
    """
    if model.weights is None:
        return None
    directory = weights_directory(model)
    shapes, state = jax.eval_shape(lambda: task.init(jax.random.key(0)))
    if (directory / CHECKPOINTS).is_dir():
        return newest_parameters(directory / CHECKPOINTS, shapes), state
    return load_bert(directory, shapes), state
