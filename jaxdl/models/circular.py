"""A stack of equal layers as a pipeline whose stages are one array axis: one program for all devices.

Huang et al. 2018, "GPipe" (https://arxiv.org/abs/1811.06965); interleaved runs of layers as in Narayanan
et al. 2021 (https://arxiv.org/abs/2104.04473). All stages compute at once, as a map over that axis, each
on another micro-batch; then every result moves on by one stage. Where a plan lays the axis named `stage`
out over devices, the map runs on them side by side and the move is the only thing they send. Nothing here
depends on that: on one device the same loop gives the same numbers.

Where a plan divides each micro-batch over devices as well, those have a copy of the parameters each, along an
axis of its own, so that in the loop each sums its own gradients, and all are summed once, after it.

With `p` stages, `m` micro-batches and `v` runs of layers a stage, the loop takes `v m + p - 1` turns, of
which a stage is idle in `p - 1`: a share of (p - 1) / (v m + p - 1).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.errors import ConfigError
from jaxdl.models.logical import constrain, layout_of, mesh_axes


@dataclass(frozen=True)
class Circular:
    """How a stack of layers is run as a pipeline.

    Attributes:
        stages: Stages that compute at the same time.
        microbatches: Parts of each batch, which follow each other.
        repeats: Times that each micro-batch goes round; stage `s` has the runs of layers `s`, `s +
            stages`, ...
    """

    stages: int
    microbatches: int
    repeats: int = 1

    def require(self, depth: int) -> None:
        """Refuses a stack that the stages do not divide evenly.

        Raises:
            ConfigError: They do not, or the first micro-batch would come round before its turn.
        """
        runs = self.stages * self.repeats
        if depth % runs:
            fitting = [n for n in range(1, depth + 1) if depth % n == 0]
            raise ConfigError(
                f"parallel.pipeline {self.stages} x parallel.repeats {self.repeats} = {runs} does not divide "
                f"the model's {depth} layers: the product can be one of {', '.join(map(str, fitting))}"
            )
        if self.repeats > 1 and self.microbatches < self.stages:
            raise ConfigError(
                f"parallel.repeats {self.repeats} needs at least as many parallel.microbatches "
                f"({self.microbatches}) as there are stages (parallel.pipeline {self.stages})"
            )


def run_circular(
    run: Callable[[Any, jax.Array, Any, jax.Array], jax.Array],
    params: Any,
    x: jax.Array,
    inputs: Any,
    pipeline: Circular,
    names: Any,
) -> jax.Array:
    """Runs a stack of layers as a pipeline.

    With `repeats` above 1 the parameters of a stage are not neighbours in the stack, so where the stack
    is laid out over devices, they are exchanged at the start.

    Args:
        run: `(params, x, inputs, first) -> x` applies consecutive layers, the first of which has the
            place `first` in the stack; it treats each example of a batch apart.
        params: Arrays [layers, ...].
        x: Hidden states [batch, ...].
        inputs: Arrays [batch, ...] that every layer gets, such as a mask.
        pipeline: Stages, micro-batches and repeats.
        names: Names of the axes of `params`, the first of which is `layers`, as a tree of `PartitionSpec`.

    Returns:
        What the last layer gives, like x.

    Raises:
        ConfigError: The numbers of layers, stages and micro-batches do not fit together.
    """
    stages, micro, repeats = pipeline.stages, pipeline.microbatches, pipeline.repeats
    depth = jax.tree.leaves(params)[0].shape[0]
    pipeline.require(depth)
    length = depth // (stages * repeats)

    axes = mesh_axes("batch")
    copies = math.prod(axes.values())

    def by_stage(array: jax.Array, names: Any) -> jax.Array:
        """[layers, ...] -> [stages, copies, repeats, length, ...]."""
        runs = array.reshape(repeats, stages, length, *array.shape[1:]).swapaxes(0, 1)
        rest = (None, None, *tuple(names)[1:])
        runs = constrain(runs, "stage", *rest)
        runs = jnp.broadcast_to(runs[:, None], (stages, copies, *runs.shape[1:]))
        return constrain(runs, "stage", "batch", *rest)

    def by_part(array: jax.Array) -> jax.Array:
        """[batch, ...] -> [micro, batch / micro, ...], each part with every micro-th example."""
        return array.reshape(-1, micro, *array.shape[1:]).swapaxes(0, 1)

    def staged(array: jax.Array, *before: None) -> jax.Array:
        rest = array.ndim - 2 - len(before)
        return constrain(array, "stage", *before, "batch", *(None,) * rest)

    def by_copy(array: jax.Array) -> jax.Array:
        """[stages, batch, ...] -> [stages, copies, batch / copies, ...]."""
        return array.reshape(stages, copies, -1, *array.shape[2:])

    def run_all(runs: Any, x: jax.Array, inputs: Any, firsts: jax.Array) -> jax.Array:
        """Each stage its layers, on each device of it."""
        each = jax.vmap(run, (0, 0, 0, None), spmd_axis_name=tuple(axes) or None)
        with layout_of("batch"):
            results = jax.vmap(each)(runs, by_copy(x), jax.tree.map(by_copy, inputs), firsts)
        return results.reshape(x.shape)

    params, inputs = jax.tree.map(by_stage, params, names), jax.tree.map(by_part, inputs)
    place = jnp.arange(stages)

    def turn(carry: tuple[jax.Array, jax.Array], time: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        arriving, waiting = carry
        # Stage s works on the item that stage 0 began s turns ago; items count parts, then rounds.
        item = jnp.clip(time - place, 0, micro * repeats - 1)
        part, round_ = item % micro, item // micro
        first = jnp.where(_along(place, arriving) == 0, waiting[:, time % micro], arriving)
        runs = jax.tree.map(
            lambda array: jax.vmap(lambda own, i: jax.lax.dynamic_index_in_dim(own, i, 1, False))(
                array, round_
            ),
            params,
        )
        given = jax.tree.map(lambda array: array[part], inputs)
        results = run_all(runs, staged(first), given, (round_ * stages + place) * length)
        moved = staged(_onward(staged(results)))
        # What comes back to stage 0 waits there for its next round, or is a result; before the first has been
        # all the way round, nothing has come back. The other stages write what nobody reads.
        back = time - (stages - 1)
        slot = jnp.maximum(back, 0) % micro
        kept = jnp.where(back >= 0, moved, waiting[:, slot])
        waiting = staged(waiting.at[:, slot].set(kept), None)
        return (moved, waiting), None

    parts = by_part(x)
    # Only stage 0's row is read: others hold zeros, so that the axis can be laid out over devices.
    waiting = staged(jnp.zeros((stages, *parts.shape), x.dtype).at[0].set(parts), None)
    arriving = staged(jnp.zeros((stages, *parts.shape[1:]), x.dtype))
    turns = jnp.arange(micro * repeats + stages - 1)
    (_, waiting), _ = jax.lax.scan(turn, (arriving, waiting), turns)
    results: jax.Array = waiting[0].swapaxes(0, 1).reshape(x.shape)
    return results


@jax.custom_vjp
def _onward(x: jax.Array) -> jax.Array:
    return jnp.roll(x, 1, axis=0)


def _onward_forward(x: jax.Array) -> tuple[jax.Array, None]:
    return _onward(x), None


def _onward_backward(_: None, dy: jax.Array) -> tuple[jax.Array]:
    # By itself it would be the sum of two parts, sent one by one.
    return (jnp.roll(dy, -1, axis=0),)


_onward.defvjp(_onward_forward, _onward_backward)


def _along(vector: jax.Array, array: jax.Array) -> jax.Array:
    return vector.reshape(-1, *(1,) * (array.ndim - 1))
