"""Which parameters a transformation touches, and where a layer ends in them: both decided by their path."""

from collections.abc import Callable
from typing import Any

import jax

DECAYED = frozenset({"kernel", "embedding"})
"""Names of the leaves that weight decay shrinks and that LAMB and LARS adapt; biases and normalisation
parameters are left alone."""

LayerAxes = Callable[[str], int]
"""Tells by a parameter's path how many of its leading axes count layers: 0, or 1 in a scan over layers, as
`lambda path: int("layers" in path.split("/"))`."""


def unstacked(path: str) -> int:
    """The `LayerAxes` of a model in which each parameter belongs to one layer."""
    del path
    return 0


def path_name(path: tuple[Any, ...]) -> str:
    """Writes a key path of `jax.tree_util` as `block/conv/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_names(tree: Any) -> list[str]:
    """Lists the path of every leaf, in the order of `jax.tree.leaves`."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def decay_mask(params: Any) -> Any:
    """Marks the parameters that weight decay shrinks and that LAMB and LARS adapt.

    Args:
        params: a tree of parameters, plain or stacked by a scan over layers.

    Returns:
        A tree of the same structure with True on kernels and embeddings.

    Raises:
        ValueError: no parameter is named in `DECAYED`, so decay would silently do nothing.
    """
    mask = jax.tree_util.tree_map_with_path(lambda path, _: path_name(path[-1:]) in DECAYED, params)
    if not any(jax.tree.leaves(mask)):
        raise ValueError(f"no parameter is named {' or '.join(sorted(DECAYED))}: {leaf_names(params)}")
    return mask
