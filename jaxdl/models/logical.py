"""What a model says of its arrays by the names of their axes; a plan may have rules for them, or none.

A plan traces a model within `flax.linen.logical_axis_rules` and a mesh. Without them, this does nothing.
"""

import contextlib
from collections.abc import Iterator

import jax
from flax import linen as nn

AXIS = "replica"
"""Name of the axis along which a plan maps copies of a computation, each with another part of the batch."""


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Asks that an activation be laid out by the names of its axes; without a plan, does nothing."""
    constrained: jax.Array = nn.with_logical_constraint(x, names)
    return constrained


def mesh_axes(name: str) -> dict[str, int]:
    """Gives the mesh axes, with their sizes, over which a plan lays out axes of a name; without one, none."""
    axes = dict(nn.get_logical_axis_rules()).get(name) or ()
    sizes = jax.sharding.get_abstract_mesh().shape
    return {axis: sizes[axis] for axis in ((axes,) if isinstance(axes, str) else axes) if axis in sizes}


@contextlib.contextmanager
def layout_of(name: str, axes: tuple[str, ...] = ()) -> Iterator[None]:
    """Lets `constrain` lay axes of a name out over other mesh axes, or over none."""
    rules = [rule for rule in nn.get_logical_axis_rules() if rule[0] != name]
    with nn.logical_axis_rules([*rules, (name, axes)] if axes else rules):
        yield
