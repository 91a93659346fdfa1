"""The arrays of a checkpoint: how Orbax saves and reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from jaxdl.errors import CheckpointError
from jaxdl.optim.masks import path_name
from jaxdl.train.rundir import reason

ARRAYS = "arrays"
"""Name of the directory of the arrays within a checkpoint's."""


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their path, in the order of the pytree."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {path_name(path): leaf for path, leaf in flat}
    if len(leaves) != len(flat):
        raise ValueError("two leaves of the state have the same path")
    return leaves


def saving_options() -> Any:
    """Makes the context in which arrays are saved."""
    options = ocp.Context()
    options.array.saving.use_compression = False  # weights shrink by 8%, for four times the CPU time
    # Cutting replicas up helps processes that share the writing; within one it costs a compilation per shape.
    options.array.saving.use_replica_parallel = jax.process_count() > 1
    # Otherwise a directory that cannot be made leaves threads behind that wait for it for 20 minutes.
    options.asynchronous.create_directories_asynchronously = False
    return options


def load_arrays(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Reads arrays whose files were verified, into the layout that is asked for.

    Args:
        path: The directory of the arrays.
        wanted: What to read, by path: shapes, dtypes and shardings. There may be more.

    Raises:
        CheckpointError: They cannot be read.
    """
    try:
        stored = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in wanted.items()
            if x.size
        }
        options = ocp.Context()
        options.pytree.loading.partial_load = True  # what is stored and not wanted may be large
        with options:
            arrays = ocp.load(path, stored)
    except Exception as error:
        raise CheckpointError(f"{path} is undamaged but cannot be read ({reason(error, path)}).") from error
    loaded = {}
    for name, target in wanted.items():
        # Orbax does not store empty arrays.
        array = (
            arrays.pop(name) if target.size else jnp.zeros(target.shape, target.dtype, device=target.sharding)
        )
        if any(device.platform == "cpu" for device in target.sharding.device_set):
            # It may be a view of the reader's memory, one for all replicas, which XLA could not reuse.
            array = jax.device_put(array, target.sharding, may_alias=False)
        loaded[name] = array
    return loaded
