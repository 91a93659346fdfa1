"""How a whole training state is divided, and what that comes to in bytes."""

import math
from collections import Counter
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxdl.errors import ConfigError
from jaxdl.optim.masks import path_name
from jaxdl.parallel.rules import Rules, axes_of


@dataclass(frozen=True)
class Layout:
    """Rules applied to the arrays of a task.

    Attributes:
        rules: how arrays are divided by their names and shapes.
        names: names of the axes of `(params, model_state)`, as trees of `PartitionSpec`; None: they have
            none.
    """

    rules: Rules
    names: Any = None

    def parameters(self, params: Any, model_state: Any) -> dict[str, tuple[tuple[int, ...], PartitionSpec]]:
        """Divides parameters and statistics.

        Returns:
            The shape and the division of each, by its path.

        Raises:
            ConfigError: one of them cannot be divided as asked.
        """
        leaves = jax.tree_util.tree_leaves_with_path((params, model_state))
        self._require_exceptions_fit([path_name(path[1:]) for path, _ in leaves])
        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731 - a predicate for the line below
        names = [()] * len(leaves) if self.names is None else jax.tree.leaves(self.names, is_leaf=is_spec)
        return {
            path_name(path[1:]): (leaf.shape, self.rules.spec(path_name(path[1:]), leaf.shape, tuple(named)))
            for (path, leaf), named in zip(leaves, names, strict=True)
        }

    def _require_exceptions_fit(self, paths: list[str]) -> None:
        for pattern, _ in self.rules.exceptions:
            if not any(fnmatchcase(path, pattern) for path in paths):
                near = " or ".join(get_close_matches(pattern, paths, 3))
                raise ConfigError(
                    f"parallel.layout {pattern} fits no parameter"
                    f"{f'; did you mean {near}?' if near else ''} (--parallel.show_layout true lists them)"
                )

    def state(self, state: Any) -> Any:
        """Divides a training state.

        What an optimizer keeps by parameter, as its moments, lies as the parameter does, or finer with
        ZeRO-1: it is known by a path that ends in the parameter's and by its shape. So do moving averages.

        Args:
            state: a `TrainState` of arrays or shapes.

        Returns:
            A tree like it of `PartitionSpec`.

        Raises:
            ConfigError: an array cannot be divided as asked.
        """
        divided = self.parameters(state.params, state.model_state)

        def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
            for start in range(1, len(path)):
                name = path_name(path[start:])
                shape, found = divided.get(name, (None, PartitionSpec()))
                if shape == leaf.shape:
                    optimizer = path[0].name == "opt_state"
                    return self.rules.optimizer_spec(name, found, leaf.shape) if optimizer else found
            return PartitionSpec()

        return jax.tree_util.tree_map_with_path(spec, state)


def rows(params: Any, opt_state: Any) -> list[list[str]]:
    """Writes how arrays are laid out: path, shape, mesh axis by dimension, bytes on a device.

    Args:
        params: abstract parameters, laid out.
        opt_state: abstract optimizer state, laid out.

    Returns:
        A row for each parameter, and one for the sum of them and of the optimizer's state: with the bytes
        of all, and of the device that has most.
    """

    def total(name: str, tree: Any) -> list[str]:
        on_device: Counter[Any] = Counter()
        for leaf in jax.tree.leaves(tree):
            for device in leaf.sharding.device_set:
                on_device[device] += _bytes_held(leaf)
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        return [name, f"{size:,} bytes", "", f"{max(on_device.values(), default=0):,}"]

    lines = []
    everywhere = len({device for leaf in jax.tree.leaves(params) for device in leaf.sharding.device_set})
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        spec = leaf.sharding.spec
        axes = ", ".join("+".join(axes_of(part)) or "-" for part in spec) if any(spec) else "whole"
        if len(leaf.sharding.device_set) < everywhere:
            axes += f", on {len(leaf.sharding.device_set)} of {everywhere} devices"
        shape = "x".join(map(str, leaf.shape))
        lines.append([path_name(path), shape, axes, f"{_bytes_held(leaf):,}"])
    return [*lines, total("all parameters", params), total("optimizer's state", opt_state)]


def _bytes_held(leaf: Any) -> int:
    return int(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)
