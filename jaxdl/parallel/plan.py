"""What every plan can do: lay arrays out, compile the step's functions, send batches."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding


class Plan(Protocol):
    """Where everything lies and how it is compiled; the same step under any plan gives the same numbers."""

    @property
    def mesh(self) -> Mesh:
        """The devices."""

    @property
    def share(self) -> tuple[int, int]:
        """Which part of each batch this process loads, and of how many."""

    def state_layout(self, state: Any) -> Any:
        """Gives the sharding of each array of a `TrainState` of arrays or shapes.

        Raises:
            ConfigError: an array cannot be divided as asked.
        """

    def compile_init(self, init: Callable[[], Any]) -> Callable[[], Any]:
        """Compiles the making of the state, so that each device makes its own part."""

    def compile_train(self, step: Any, state: Any, batch: Any) -> Callable[..., Any]:
        """Compiles `step(state, batch) -> (state, metrics)`; the given state's memory is reused.

        Args:
            step: the pure training step.
            state: abstract state.
            batch: this process's part of a batch, of arrays or shapes.

        Returns:
            The executable, of what `put` gives. It accepts these shapes only, so
            it can never be traced or compiled again by accident.
        """

    def compile_eval(self, step: Callable[..., Any], weights: Any, batch: Any) -> Callable[..., Any]:
        """Compiles `step(weights, batch) -> metrics by example`; every process gets those of all examples.

        Args:
            step: the pure evaluation step.
            weights: abstract `(params, model_state)`, laid out.
            batch: this process's part of a batch, of arrays or shapes.
        """

    def put(self, batch: dict[str, np.ndarray]) -> Any:
        """Sends this process's part of a batch to its devices, while steps are in flight."""


def abstract(tree: Any, layout: Any) -> Any:
    """Gives the shapes, dtypes and layout of a tree as `jax.ShapeDtypeStruct`s.

    Args:
        tree: arrays or shapes.
        layout: a sharding for each, or one for all.
    """
    return jax.tree.map(
        lambda leaf, layout: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout),
        tree,
        jax.tree.broadcast(layout, tree),
    )


def abstract_batch(batch: Any, sharding: NamedSharding, parts: int) -> Any:
    """Gives the abstract batch of all processes, from this process's part of it, one of `parts`."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (leaf.shape[0] * parts, *leaf.shape[1:]), leaf.dtype, sharding=sharding
        ),
        batch,
    )


def put_batch(batch: Any, sharding: NamedSharding, parts: int) -> Any:
    """Makes global arrays of the part of a batch, one of `parts`, that this process has."""
    return jax.tree.map(
        lambda array: jax.make_array_from_process_local_data(
            sharding, array, (array.shape[0] * parts, *array.shape[1:])
        ),
        batch,
    )
