"""A tree of arrays as bytes for the network, and back; nothing that is received is unpickled.

A message is a list of frames: a header in JSON, with the message's own fields and the name, dtype and
shape of each array, then the bytes of each array as they lie in memory (little-endian, as on every
machine that jax runs on). What comes is compared with a tree of what is expected, before any of it is
used.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdl.errors import DataError

Leaf = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of an array."""

MARK = "jaxdl exchange 1"
"""What every header begins with: others may knock at the same port."""


class WireError(DataError):
    """What another process sent is not what was agreed on."""


def describe(tree: Any) -> list[Leaf]:
    """Names, dtypes and shapes of a tree's arrays, in the order in which they are sent."""
    return [
        (jax.tree_util.keystr(path), np.dtype(leaf.dtype).name, tuple(map(int, leaf.shape)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def pack(fields: dict[str, Any], tree: Any = None) -> list[bytes]:
    """Makes a message.

    The bytes are copies, so the arrays may be changed or donated while the message is on its way.

    Args:
        fields: what JSON can express.
        tree: arrays to go with it; None for none.

    Returns:
        The frames.
    """
    header = {"mark": MARK, "fields": fields, "leaves": describe(tree)}
    leaves = jax.device_get(jax.tree.leaves(tree))
    return [json.dumps(header).encode(), *(np.asarray(leaf).tobytes() for leaf in leaves)]


def read(frames: Sequence[bytes]) -> dict[str, Any]:
    """Reads the fields of a message.

    Raises:
        WireError: it is no message of ours.
    """
    return _dictionary(_header(frames).get("fields"))


def unpack(frames: Sequence[bytes], like: Any) -> Any:
    """Reads the arrays of a message.

    Args:
        frames: the message.
        like: a tree of the arrays that are expected, or of their shapes and dtypes.

    Returns:
        A tree of NumPy arrays, which cannot be written to.

    Raises:
        WireError: names, dtypes, shapes or sizes are others than expected.
    """
    expected = describe(like)
    leaves = _header(frames).get("leaves")
    announced = leaves if isinstance(leaves, list) else []
    wanted = [[name, dtype, list(shape)] for name, dtype, shape in expected]
    if announced != wanted:
        pairs = zip(announced, wanted, strict=False)
        differs = next((pair for pair in pairs if pair[0] != pair[1]), None)
        cause = f"{differs[0]} instead of {differs[1]}" if differs else "the number of arrays"
        raise WireError(
            f"another process sent {len(announced)} arrays where {len(wanted)} were expected; "
            f"what differs: {cause}. All processes must train the same model, in the same dtypes."
        )
    buffers = frames[1:]
    sizes = [np.dtype(leaf.dtype).itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(like)]
    if [len(buffer) for buffer in buffers] != sizes:
        raise WireError(
            f"another process sent {size(buffers)} bytes of arrays where {sum(sizes)} were expected, "
            "or not divided among the arrays as announced: the message is damaged."
        )
    # The dtype is the expected one: bfloat16 and its kind are of ml_dtypes, and no name has to be looked
    # up.
    arrays = [
        np.frombuffer(buffer, np.dtype(leaf.dtype)).reshape(leaf.shape)
        for buffer, leaf in zip(buffers, jax.tree.leaves(like), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def size(frames: Sequence[bytes]) -> int:
    """Counts the bytes of a message; the network adds a few for each frame and packet."""
    return sum(map(len, frames))


def _header(frames: Sequence[bytes]) -> dict[str, Any]:
    try:
        header = _dictionary(json.loads(frames[0]))
    except (IndexError, ValueError, RecursionError) as error:
        raise WireError(f"what came is no message of jaxdl ({type(error).__name__})") from None
    if header.get("mark") != MARK:
        raise WireError(f"what came is no message of jaxdl: its mark is {header.get('mark')!r:.80}")
    return header


def _dictionary(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError("what came is no message of jaxdl: its header is no JSON object")
    return value
