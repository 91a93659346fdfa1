"""Views of a training state by stage: which arrays, or which layers of an array, belong to which stage.

A state that is laid out over stages is one tree like any other. The arrays of a single block lie on its
stage's devices; a stack of layers is one array over all devices, divided along its first axis; what every
stage needs, as counters, has a copy on each. A view takes what lies on one stage's devices, and copies
nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.parallel.pipeline.chain import Piece

STAGE_AXIS = "pipeline"


class Split:
    """Takes trees of one structure apart and puts them together again.

    Args:
        tree: arrays or shapes with shardings; parameters and what is like them are dicts within it.
        stages: the pieces of each stage.
        meshes: the devices of each stage.
    """

    def __init__(self, tree: Any, stages: Sequence[Sequence[Piece]], meshes: Sequence[Mesh]) -> None:
        leaves, self._structure = jax.tree.flatten(tree)
        self._shapes = [leaf.shape for leaf in leaves]
        self._shardings = [leaf.sharding for leaf in leaves]
        self._meshes = meshes
        numbered = jax.tree.unflatten(self._structure, range(len(leaves)))
        trees = [select(numbered, belongs(pieces)) for pieces in stages]
        self._places: list[list[int]] = [jax.tree.leaves(tree) for tree in trees]
        self._structures = [jax.tree.structure(tree) for tree in trees]
        if missing := set(range(len(leaves))) - {place for places in self._places for place in places}:
            raise ValueError(f"no stage has the leaves {sorted(missing)} of {self._structure}")

    def places(self, stage: int) -> list[int]:
        """Lists, for each leaf of a stage's view, the place of its array among the leaves of the tree."""
        return self._places[stage]

    def take(self, tree: Any, stage: int) -> Any:
        """Gives a stage's view of a tree of arrays or shapes; arrays share their memory with the tree's."""
        leaves = jax.tree.leaves(tree)
        mesh = self._meshes[stage]
        views = [view(leaves[place], self._shardings[place], mesh) for place in self._places[stage]]
        return jax.tree.unflatten(self._structures[stage], views)

    def join(self, parts: Sequence[Any]) -> Any:
        """Puts the views of all stages together."""
        found: list[list[jax.Array]] = [[] for _ in self._shapes]
        for places, part in zip(self._places, parts, strict=True):
            for place, leaf in zip(places, jax.tree.leaves(part), strict=True):
                found[place].append(leaf)
        whole = [
            arrays[0]
            if len(arrays) == 1
            else jax.make_array_from_single_device_arrays(
                shape, sharding, [shard.data for array in arrays for shard in array.addressable_shards]
            )
            for arrays, shape, sharding in zip(found, self._shapes, self._shardings, strict=True)
        ]
        return jax.tree.unflatten(self._structure, whole)


def view(leaf: Any, sharding: NamedSharding, mesh: Mesh) -> Any:
    """Gives what lies on a stage's devices of an array, or of its shape."""
    if sharding.mesh == mesh:
        return leaf
    divided = STAGE_AXIS in sharding.spec
    spec = PartitionSpec(*(None if axis == STAGE_AXIS else axis for axis in sharding.spec))
    own = NamedSharding(mesh, spec)
    shape = leaf.shape
    if divided:
        shape = (shape[0] // sharding.mesh.shape[STAGE_AXIS], *shape[1:])
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=own)
    devices = set(mesh.devices.flat)
    shards = [shard.data for shard in leaf.addressable_shards if shard.device in devices]
    return jax.make_array_from_single_device_arrays(shape, own, shards)


def belongs(pieces: Sequence[Piece]) -> Callable[[tuple[str, ...]], bool | None]:
    """Tells of a path of keys whether what lies there is a stage's; None: some of it is."""
    paths = [piece.link.path for piece in pieces]

    def verdict(path: tuple[str, ...]) -> bool | None:
        if any(path[: len(own)] == own for own in paths):
            return True
        return None if any(own[: len(path)] == path for own in paths) else False

    return verdict


def select(node: Any, verdict: Callable[[tuple[str, ...]], bool | None], path: tuple[str, ...] = ()) -> Any:
    """Leaves out of a tree's dicts what `verdict` says no to, by its path of keys in the outermost dict."""
    if isinstance(node, dict):
        kept = {}
        for key, child in node.items():
            decision = verdict((*path, key))
            if decision is None:
                child = select(child, verdict, (*path, key))
            # A branch of which nothing is kept would be missing in a tree that was never whole, too.
            if decision or (decision is None and jax.tree.leaves(child)):
                kept[key] = child
        return kept
    if isinstance(node, tuple):
        children = [select(child, verdict, path) for child in node]
        return type(node)(*children) if hasattr(node, "_fields") else tuple(children)
    if jax.tree_util.all_leaves([node]) or node is None:
        return node
    # A registered dataclass.
    children, structure = jax.tree.flatten(node, is_leaf=lambda child: child is not node)
    return jax.tree.unflatten(structure, [select(child, verdict, path) for child in children])
