"""Where each parameter of a BERT lies in a Hugging Face checkpoint, for reading and writing alike."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from numpy.typing import NDArray

from jaxdl.models.bert import Sizes

Array = NDArray[Any]
Kind = Literal["table", "norm", "dense", "dense_of_two", "bias"]
"""What a module holds; `dense_of_two` sums over two axes, heads and their width."""
Rows = Literal["words", "positions"]

BASE = ("embeddings", "encoder", "pooler")
"""Parts that heads build upon: there they are named `bert.<part>` in a network with heads."""
REQUIRED = ("embeddings", "encoder")
"""Parts without which a file is no BERT."""
WORDS = "embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder"
"""The last layer of masked words there: its kernel is the table of words, its bias `cls.predictions.bias`."""

_LEAVES: Mapping[Kind, Mapping[str, str]] = {
    "table": {"embedding": "weight"},
    "norm": {"scale": "weight", "bias": "bias"},
    "dense": {"kernel": "weight", "bias": "bias"},
    "dense_of_two": {"kernel": "weight", "bias": "bias"},
    "bias": {"bias": "bias"},
}

# Our path, their name ({} is a layer's number, the first axis of ours), and what is in it.
_MODULES: tuple[tuple[str, str, Kind], ...] = (
    ("embeddings/word", "embeddings.word_embeddings", "table"),
    ("embeddings/position", "embeddings.position_embeddings", "table"),
    ("embeddings/type", "embeddings.token_type_embeddings", "table"),
    ("embeddings/norm", "embeddings.LayerNorm", "norm"),
    ("encoder/layers/query", "encoder.layer.{}.attention.self.query", "dense"),
    ("encoder/layers/key", "encoder.layer.{}.attention.self.key", "dense"),
    ("encoder/layers/value", "encoder.layer.{}.attention.self.value", "dense"),
    ("encoder/layers/attention_out", "encoder.layer.{}.attention.output.dense", "dense_of_two"),
    ("encoder/layers/attention_norm", "encoder.layer.{}.attention.output.LayerNorm", "norm"),
    ("encoder/layers/mlp_in", "encoder.layer.{}.intermediate.dense", "dense"),
    ("encoder/layers/mlp_out", "encoder.layer.{}.output.dense", "dense"),
    ("encoder/layers/mlp_norm", "encoder.layer.{}.output.LayerNorm", "norm"),
    ("pooler/dense", "pooler.dense", "dense"),
    ("masked_words/dense", "cls.predictions.transform.dense", "dense"),
    ("masked_words/norm", "cls.predictions.transform.LayerNorm", "norm"),
    ("masked_words", "cls.predictions", "bias"),
    ("next_sentence", "cls.seq_relationship", "dense"),
    ("classifier", "classifier", "dense"),
    ("answer", "qa_outputs", "dense"),
)

_ROWS: Mapping[str, Rows] = {
    "embeddings/word/embedding": "words",
    "embeddings/position/embedding": "positions",
    "masked_words/bias": "words",
}


@dataclass(frozen=True)
class Entry:
    """A parameter of ours and its arrays there.

    Attributes:
        ours: Path in the tree of parameters.
        theirs: Name, with {} for a layer's number if there is one array for each layer.
        inputs: Axes that a kernel sums over, 0: no kernel.
        rows: What the first axis counts, where it may be longer in one place than in the other.
    """

    ours: str
    theirs: str
    inputs: int
    rows: Rows | None

    @property
    def part(self) -> str:
        """The first name of the path."""
        return self.ours.partition("/")[0]

    @property
    def layered(self) -> bool:
        """Whether the first axis of ours is that of the layers."""
        return "{}" in self.theirs

    def names(self, shape: tuple[int, ...]) -> list[str]:
        """Names of the arrays there, for a parameter of this shape."""
        return [self.theirs.format(layer) for layer in range(shape[0] if self.layered else 1)]

    def shape_there(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Gives the shape of one array there, for that of a parameter."""
        shape = shape[1:] if self.layered else shape
        if self.inputs:
            return math.prod(shape[self.inputs :]), math.prod(shape[: self.inputs])
        return shape if self.ours.endswith("/embedding") else (math.prod(shape),)

    def to_ours(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Gives an array as ours has it, in the shape without the axis of layers."""
        return (array.T if self.inputs else array).reshape(shape)

    def to_theirs(self, array: Array) -> Array:
        """Gives an array of ours, without the axis of layers, as it is there; the inverse of `to_ours`."""
        shape = self.shape_there((1, *array.shape) if self.layered else array.shape)
        return array.reshape(shape[::-1]).T if self.inputs else array.reshape(shape)


def _entries() -> Iterator[Entry]:
    for module, name, kind in _MODULES:
        for leaf, leaf_there in _LEAVES[kind].items():
            ours = f"{module}/{leaf}"
            inputs = (2 if kind == "dense_of_two" else 1) if leaf == "kernel" else 0
            yield Entry(ours, f"{name}.{leaf_there}", inputs, _ROWS.get(ours))


ENTRIES = tuple(_entries())
"""All parameters that a checkpoint can have."""


class Parameter(NamedTuple):
    """A leaf of a tree of parameters and where it lies in a checkpoint."""

    entry: Entry
    leaf: Any


def parameters(tree: Mapping[str, Any]) -> dict[str, Parameter]:
    """Pairs the leaves of a tree, by path, with their entries; parts that no checkpoint has are left out.

    Raises:
        ValueError: A part has other parameters than that of a BERT, or embeddings or encoder are not there.
    """
    leaves = {
        "/".join(key.key for key in keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    known = {entry.part for entry in ENTRIES} & tree.keys() | set(REQUIRED)
    entries = {entry.ours: entry for entry in ENTRIES if entry.part in known}
    if odd := entries.keys() ^ {path for path in leaves if path.partition("/")[0] in known}:
        raise ValueError(f"these are not the parameters of a BERT: {sorted(odd)} here or there only")
    return {path: Parameter(entries[path], leaf) for path, leaf in leaves.items() if path in entries}


def sizes_of(found: Mapping[str, Parameter]) -> Sizes:
    """Gives the sizes of the network that has these parameters."""
    depth, width, heads, _ = found["encoder/layers/query/kernel"].leaf.shape
    words, positions, types = (
        found[f"embeddings/{table}/embedding"].leaf.shape[0] for table in ("word", "position", "type")
    )
    mlp = found["encoder/layers/mlp_in/bias"].leaf.shape[1]
    return Sizes(depth, width, heads, mlp, words, positions, types)


def canonical(name: str) -> str:
    """Gives a name of a file without the prefix of networks with heads, and with today's names of norms."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            name = name.removesuffix(old) + new
    return name.removeprefix("bert.")


def prefixed(name: str) -> str:
    """Gives a name as a network with heads has it."""
    return f"bert.{name}" if name.partition(".")[0] in BASE else name


def is_buffer(name: str) -> bool:
    """Whether an array is none that is learnt: old files hold the numbers of the positions."""
    return name.endswith((".position_ids", ".token_type_ids"))
