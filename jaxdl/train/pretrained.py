"""Weights to start from: a directory in Hugging Face's layout, or that of a run of ours."""

import json
import logging
import os.path
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from jaxdl.config import BertModelConfig
from jaxdl.errors import CheckpointError, ConfigError
from jaxdl.models.bert import SIZES, Bert, Sizes, with_words
from jaxdl.models.huggingface import load_bert, read_sizes
from jaxdl.train.arrays import ARRAYS, by_path, load_arrays
from jaxdl.train.checkpoint import Checkpointer
from jaxdl.train.task import Task

_log = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
"""Name of the vocabulary's file in a run's directory, as in Hugging Face's layout."""

NETWORK = "network.json"
"""Name of the file in a run's directory that says what network it is."""
CHECKPOINTS = "checkpoints"
_BODY = ("embeddings", "encoder", "final_norm")


def sizes_of(model: BertModelConfig, words: int) -> tuple[Sizes, float]:
    """Gives the sizes of the configured network and the epsilon of its layer normalisations.

    Args:
        model: the section `model`.
        words: pieces in the vocabulary.

    Raises:
        ConfigError: the sizes do not fit together, or the vocabulary not the weights.
    """
    found, epsilon = described(model) if model.weights else (None, 1e-12)
    if model.name == "pretrained" and found is not None:
        if words > found.words:
            raise ConfigError(
                f"model.weights: {model.weights} knows {found.words:,} words, and the vocabulary has "
                f"{words:,}: set data.vocabulary to that of the weights"
            )
        rows = found.words + -found.words % model.words_multiple
        return replace(found, words=rows, unused=found.unused + rows - found.words), epsilon
    given = {name: getattr(model, name) for name in ("depth", "width", "heads", "mlp", "positions")}
    sizes = replace(SIZES[model.name], **{name: value for name, value in given.items() if value})
    if sizes.width % sizes.heads:
        raise ConfigError(f"model.width {sizes.width} is not a multiple of model.heads {sizes.heads}")
    return with_words(sizes, words, multiple=model.words_multiple), epsilon


def described(model: BertModelConfig) -> tuple[Sizes, float]:
    """Reads what network the weights are of.

    Raises:
        ConfigError: it normalises elsewhere than `model.pre_norm` says, or is none of ours.
        CheckpointError: the description cannot be read.
    """
    directory = weights_directory(model)
    file = directory / NETWORK
    if not is_file(file):
        if model.pre_norm:
            raise ConfigError(f"model.pre_norm true: the network of {directory} normalises after branches")
        return read_sizes(directory)
    try:
        found = json.loads(file.read_text("utf-8"))
        sizes, epsilon, pre_norm = Sizes(**found["sizes"]), float(found["epsilon"]), bool(found["pre_norm"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"model.weights: {file} cannot be read ({error})") from error
    if pre_norm != model.pre_norm:
        raise ConfigError(f"model.pre_norm is {str(pre_norm).lower()} in {directory}: set it so")
    return sizes, epsilon


def description(bert: Bert) -> str:
    """Writes what `described` reads, for a run's directory."""
    network = {"sizes": asdict(bert.sizes), "epsilon": bert.epsilon, "pre_norm": bert.pre_norm}
    return json.dumps(network, indent=1) + "\n"


def weights_directory(model: BertModelConfig) -> Path:
    """Gives the directory that `model.weights` names."""
    return Path(os.path.expanduser(model.weights or ""))  # noqa: PTH111 - leaves a ~user that does not exist


def vocabulary_of(model: BertModelConfig) -> Path | None:
    """Gives the file of the vocabulary that the weights were trained with.

    Returns:
        Its path, or None where there are no weights, or none with a vocabulary beside them.

    Raises:
        CheckpointError: there is no such directory.
    """
    if not model.weights:
        return None
    directory = weights_directory(model)
    if not os.path.isdir(directory):  # noqa: PTH112 - the method of Path raises for some
        raise CheckpointError(f"model.weights: {directory} is no directory")
    paths = [directory / name for name in (TOKENIZER, "vocab.txt")]
    return next((path for path in paths if is_file(path)), None)


def is_file(path: Path) -> bool:
    """Tells whether there is such a file; not where the path is impossible, as one that is too long."""
    return os.path.isfile(path)  # noqa: PTH113 - the method of Path raises for some


def initial_values(model: BertModelConfig, task: Task) -> Any:
    """Reads the `(params, model_state)` to start from, or gives None where they are drawn at random.

    What the weights do not have, as a head, is abstract in it.

    Raises:
        ConfigError: the weights are of another network.
        CheckpointError: they cannot be read.
    """
    if not model.weights:
        return None
    directory = weights_directory(model)
    shapes, state = jax.eval_shape(lambda: task.init(jax.random.key(0)))
    if os.path.isdir(directory / CHECKPOINTS):  # noqa: PTH112 - the method of Path raises for some
        return newest_parameters(directory / CHECKPOINTS, shapes), state
    return load_bert(directory, shapes), state


def newest_parameters(directory: Path, shapes: Any = None) -> Any:
    """Reads parameters of the newest sound checkpoint, for another task than the one that made it.

    Where the run kept moving averages, they are what is read.

    Args:
        directory: Where the checkpoints are.
        shapes: Nested dicts of abstract parameters; None: all that there are.

    Returns:
        The same with arrays of the stored dtype. The parameters of a head that the checkpoint has not, or for
        another number of classes, stay abstract.

    Raises:
        ConfigError: Embeddings or encoder are missing or have another shape.
        CheckpointError: None of the checkpoints is sound.
    """
    found = Checkpointer(directory, keep=1).newest_sound()
    if found is None:
        raise CheckpointError(f"{directory} has no checkpoint to start from.")
    leaves = found["leaves"]
    prefix = "ema/0/" if any(name.startswith("ema/0/") for name in leaves) else "params/"
    if shapes is None:
        own = {name.removeprefix(prefix): leaf for name, leaf in leaves.items() if name.startswith(prefix)}
        flat = {
            tuple(name.split("/")): jax.ShapeDtypeStruct(tuple(x["shape"]), jnp.dtype(x["dtype"]))
            for name, x in own.items()
        }
        shapes = unflatten_dict(flat)
    wanted, one = by_path(shapes), jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    chosen = {}
    for name, leaf in wanted.items():
        stored = leaves.get(prefix + name)
        shape = None if stored is None else tuple(stored["shape"])
        if shape != leaf.shape and name.split("/")[0] in _BODY:
            here = "is missing" if shape is None else f"has the shape {shape}, and the network {leaf.shape}"
            raise ConfigError(f"{directory}: {name} {here}: set up the network as that run did")
        if stored is None or shape != leaf.shape:
            _log.warning("%s: %s is not there for this network, and starts at random", directory, name)
            continue
        chosen[prefix + name] = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(stored["dtype"]), sharding=one)
    if not chosen:
        raise ConfigError(f"{directory} has no parameter of this network.")
    arrays = load_arrays(directory.absolute() / str(found["step"]) / ARRAYS, chosen)
    values = {name: jax.device_get(arrays[prefix + name]) for name in wanted if prefix + name in arrays}
    return jax.tree.unflatten(
        jax.tree.structure(shapes), [values.get(name, leaf) for name, leaf in wanted.items()]
    )
