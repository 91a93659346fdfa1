"""BERT in Hugging Face's layout: a directory with config.json and model.safetensors, read and written.

Usage:
    sizes, epsilon = read_sizes(directory)
    shapes = jax.eval_shape(lambda: task.init(jax.random.key(0)))[0]
    params = load_bert(directory, shapes)
    save_bert(other, params, sizes, epsilon=epsilon)
"""

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from jaxdl.errors import CheckpointError, ConfigError
from jaxdl.models.bert import Sizes
from jaxdl.models.huggingface.files import CONFIG, WEIGHTS, Weights, open_weights, read_json, write_files
from jaxdl.models.huggingface.names import (
    DECODER,
    REQUIRED,
    WORDS,
    Array,
    Entry,
    Parameter,
    is_buffer,
    parameters,
    prefixed,
    sizes_of,
)

_log = logging.getLogger(__name__)

# What another value of would be another network; the library's own default stands in for a missing key.
_FIXED: Mapping[str, Any] = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}
_SIZES: Mapping[str, tuple[str, int | None]] = {
    "depth": ("num_hidden_layers", None),
    "width": ("hidden_size", None),
    "heads": ("num_attention_heads", None),
    "mlp": ("intermediate_size", None),
    "words": ("vocab_size", None),
    "positions": ("max_position_embeddings", 512),
    "types": ("type_vocab_size", 2),
}
# The network of a head there. The first head that the parameters have decides.
_ARCHITECTURES = {
    "next_sentence": "BertForPreTraining",
    "masked_words": "BertForMaskedLM",
    "classifier": "BertForSequenceClassification",
    "answer": "BertForQuestionAnswering",
}
_BARE = "BertModel"


def read_sizes(directory: Path) -> tuple[Sizes, float]:
    """Reads the sizes of a checkpoint's network and the epsilon of its layer normalisations.

    Args:
        directory: With config.json.

    Raises:
        CheckpointError: config.json cannot be read, is damaged or lacks a size.
        ConfigError: It is a network that `jaxdl.models.bert` is not.
    """
    path = directory / CONFIG
    config = read_json(path)
    for key, value in _FIXED.items():
        if (found := config.get(key, value)) != value:
            raise ConfigError(
                f"model.weights: {path} has {key} {found!r}, and this network is a BERT with {value!r} only"
            )
    sizes: dict[str, Any] = {ours: config.get(key, default) for ours, (key, default) in _SIZES.items()}
    for ours, size in sizes.items():
        if type(size) is not int or size < 1:
            raise CheckpointError(f"model.weights: {path} has no usable {_SIZES[ours][0]} ({size!r})")
    if sizes["width"] % sizes["heads"]:
        raise CheckpointError(
            f"model.weights: {path} has hidden_size {sizes['width']}, which is not a multiple of "
            f"num_attention_heads {sizes['heads']}"
        )
    epsilon = config.get("layer_norm_eps", 1e-12)
    if type(epsilon) not in (int, float) or not 0 < epsilon < 1:
        raise CheckpointError(f"model.weights: {path} has no usable layer_norm_eps ({epsilon!r})")
    return Sizes(**sizes), float(epsilon)


def load_bert(directory: Path, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the parameters of a network, and the heads that the checkpoint has too.

    Embeddings and encoder must be there. A head that is not, and a classifier for another number of classes,
    is left as it was given. A table of words may have more rows here: the others are 0, and so are their
    biases. A table of positions may have fewer: it is cut.

    Args:
        directory: With config.json, and model.safetensors or its parts and their index.
        shapes: The parameters of a task as `jax.eval_shape` gives them.

    Returns:
        The same tree, with NumPy arrays, float32 whatever the file has, where the file has them.

    Raises:
        CheckpointError: A file is missing or damaged, or holds values that are not finite.
        ConfigError: The weights are those of another network.
    """
    sizes, _ = read_sizes(directory)
    wanted = parameters(shapes)
    with contextlib.ExitStack() as stack:
        file = open_weights(stack, directory)
        wanted = _held(directory, file, wanted)
        _check_fit(directory, sizes, file, wanted)
        used = {name for entry, leaf in wanted.values() for name in entry.names(leaf.shape)}
        if "masked_words/bias" in wanted:
            used |= _check_tied(directory, file)
        if unused := [name for name in file if name not in used and not is_buffer(name)]:
            _log.info("%s holds %d arrays that are not used: %s", directory, len(unused), _list(unused))
        filled = {path: _fill(file, parameter) for path, parameter in wanted.items()}
    return _merged(shapes, filled)


def save_bert(
    directory: Path,
    params: Mapping[str, Any],
    sizes: Sizes,
    *,
    epsilon: float,
    words: int | None = None,
    dropout: float = 0.1,
    attention_dropout: float = 0.1,
    id2label: Mapping[int, str] | None = None,
) -> None:
    """Writes a network that normalises after each branch and whose activation is gelu, as float32.

    What there was of the same names is replaced once all is written.

    Args:
        directory: Made if there is none.
        params: Parameters of embeddings, encoder and heads, arrays.
        sizes: Of the network.
        epsilon: Of the layer normalisations.
        words: Rows of the table of words to write, the first ones; None: all.
        dropout: Share that is dropped in training of the embeddings and of each branch's result.
        attention_dropout: Share of the attention weights.
        id2label: Name of each class of a classifier; None: `LABEL_0`, `LABEL_1` ...

    Raises:
        CheckpointError: The files cannot be written.
        ValueError: `params` are not those of a BERT.
    """
    architecture = next((name for head, name in _ARCHITECTURES.items() if head in params), _BARE)
    found = parameters(params)
    if len(found) != len(jax.tree.leaves(params)):
        raise ValueError(f"a BERT's checkpoint has not all of these parts: {sorted(params)}")
    if (own := sizes_of(found)) != replace(sizes, words=own.words, unused=0):
        raise ValueError(f"these are parameters of {own}, not of {sizes}")
    tensors: dict[str, Array] = {}
    for entry, leaf in found.values():
        array = np.asarray(leaf).astype(np.float32, copy=False)
        array = array[:words] if entry.rows == "words" else array
        for name, each in zip(entry.names(array.shape), array if entry.layered else [array], strict=True):
            # The safetensors library writes memory as it lies.
            theirs = np.ascontiguousarray(entry.to_theirs(each))
            tensors[name if architecture == _BARE else prefixed(name)] = theirs
    config = {
        **_FIXED,
        **{key: getattr(sizes, ours) for ours, (key, _) in _SIZES.items()},
        "architectures": [architecture],
        "vocab_size": len(found["embeddings/word/embedding"].leaf[:words]),
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": attention_dropout,
        "layer_norm_eps": epsilon,
        "initializer_range": 0.02,
        **(_labels(len(params["classifier"]["bias"]), id2label or {}) if "classifier" in params else {}),
    }
    text = json.dumps(config, indent=2) + "\n"
    write_files(
        directory,
        {
            WEIGHTS: lambda path: safetensors.numpy.save_file(tensors, path, {"format": "pt"}),
            CONFIG: lambda path: path.write_text(text, encoding="utf-8"),
        },
    )


def _labels(classes: int, names: Mapping[int, str]) -> dict[str, Any]:
    labels = {number: names.get(number, f"LABEL_{number}") for number in range(classes)}
    return {"id2label": labels, "label2id": {label: number for number, label in labels.items()}}


def _held(directory: Path, file: Weights, wanted: dict[str, Parameter]) -> dict[str, Parameter]:
    """Leaves out the heads that the file has not, or for other classes."""
    names = {path: entry.names(leaf.shape) for path, (entry, leaf) in wanted.items()}
    parts = {entry.part for entry, _ in wanted.values()}
    there = {wanted[path].entry.part for path in wanted if file.keys() & names[path]}
    left = parts - there - set(REQUIRED)
    if left:
        _log.info("%s has no %s: random values are the start", directory, ", ".join(sorted(left)))
    if "classifier" in there:
        classes, found = wanted["classifier/bias"].leaf.shape, file.get("classifier.bias")
        if found is not None and found.shape != classes:
            _log.warning(
                "%s tells %s classes apart and this model %d: its last layer starts from random values",
                *(directory, _shape(found.shape), *classes),
            )
            left.add("classifier")
    return {path: parameter for path, parameter in wanted.items() if parameter.entry.part not in left}


def _check_fit(directory: Path, sizes: Sizes, file: Weights, wanted: Mapping[str, Parameter]) -> None:
    ours = sizes_of(wanted)
    # Shapes would not tell: heads lie in one axis there, and layers beyond ours are arrays of other names.
    for key in ("depth", "heads"):
        if getattr(sizes, key) != getattr(ours, key):
            raise ConfigError(
                f"model.weights: {directory} is a network of model.{key} {getattr(sizes, key)}, and this one "
                f"has {getattr(ours, key)}"
            )
    shapes = {
        name: _shape_there(directory, file, entry, leaf.shape)
        for entry, leaf in wanted.values()
        for name in entry.names(leaf.shape)
    }
    problems = {
        "missing": [name for name in shapes if name not in file],
        "of another shape": [
            f"{name} {_shape(file[name].shape)}, in the model {_shape(shape)}"
            for name, shape in shapes.items()
            if name in file and file[name].shape != shape
        ],
    }
    if any(problems.values()):
        told = "; ".join(f"{len(names)} {kind} ({_list(names)})" for kind, names in problems.items() if names)
        raise ConfigError(f"model.weights: {directory} does not fit the model: {told}")


def _shape_there(directory: Path, file: Weights, entry: Entry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that an array of the file should have: tables may be larger there, or here."""
    there = entry.shape_there(shape)
    table = {"words": WORDS, "positions": entry.theirs, None: ""}[entry.rows]
    if table not in file or not file[table].shape:
        return there
    rows = file[table].shape[0]
    if entry.rows == "words":
        return (min(rows, there[0]), *there[1:])
    if rows < there[0]:
        raise ConfigError(
            f"model.weights: {directory} has vectors of {rows} positions: set model.positions to {rows} or "
            f"less, not {there[0]}"
        )
    return (rows, *there[1:])


def _check_tied(directory: Path, file: Weights) -> set[str]:
    """Refuses a last layer with parameters of its own; gives the names of what is there twice."""
    pairs = {f"{DECODER}.weight": WORDS, f"{DECODER}.bias": "cls.predictions.bias"}
    copies = {copy: own for copy, own in pairs.items() if copy in file}
    for copy, own in copies.items():
        if file[copy].shape != file[own].shape or not np.array_equal(file[copy].read(), file[own].read()):
            raise ConfigError(
                f"model.weights: {directory} has a {copy} that differs from {own}, with which it is one here"
            )
    return set(copies)


def _fill(file: Weights, parameter: Parameter) -> Array:
    entry, leaf = parameter
    filled = np.zeros(leaf.shape, np.float32)
    arrays = [file[name].read() for name in entry.names(leaf.shape)]
    if entry.rows:
        rows = min(len(arrays[0]), leaf.shape[0])
        filled[:rows] = arrays[0][:rows]
        return filled
    places = filled if entry.layered else filled[None]
    for place, array in zip(places, arrays, strict=True):
        place[...] = entry.to_ours(array, place.shape)
    return filled


def _merged(shapes: Mapping[str, Any], filled: Mapping[str, Array]) -> dict[str, Any]:
    leaves, structure = jax.tree_util.tree_flatten_with_path(dict(shapes))
    merged = [filled.get("/".join(key.key for key in keys), leaf) for keys, leaf in leaves]
    tree: dict[str, Any] = jax.tree_util.tree_unflatten(structure, merged)
    return tree


def _list(names: Iterable[str]) -> str:
    first, *rest = names
    return ", ".join([first, *rest[:2], *(["..."] if len(rest) > 2 else [])])


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
