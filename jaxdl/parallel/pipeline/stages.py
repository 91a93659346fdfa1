"""Stages of a model on parts of a mesh: which devices each has, and how arrays lie on them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.config import BATCH_AXES, MESH_AXES
from jaxdl.parallel.layout import Layout
from jaxdl.parallel.pipeline.chain import Piece
from jaxdl.parallel.pipeline.split import STAGE_AXIS, Split


@dataclass(frozen=True)
class Stages:
    """Which devices each stage has, and how arrays lie on them.

    Attributes:
        mesh: the devices; stage `s` has those at `s` of the axis `pipeline`.
        layout: how arrays are divided over the devices of their stage, and stacks of layers over stages.
        stages: the pieces of each stage.
        parts: micro-batches of each batch.
    """

    mesh: Mesh
    layout: Layout
    stages: tuple[tuple[Piece, ...], ...]
    parts: int

    @cached_property
    def meshes(self) -> list[Mesh]:
        """The devices of each stage, with all axes."""
        place = MESH_AXES.index(STAGE_AXIS)
        return [
            Mesh(self.mesh.devices.take([stage], place), MESH_AXES, axis_types=self.mesh.axis_types)
            for stage in range(len(self.stages))
        ]

    def batch_sharding(self, stage: int) -> NamedSharding:
        """Layout of arrays [examples, ...] on a stage's devices."""
        return NamedSharding(self.meshes[stage], PartitionSpec(BATCH_AXES))

    def replicated(self, stage: int) -> NamedSharding:
        """Layout of what each device of a stage has a copy of."""
        return NamedSharding(self.meshes[stage], PartitionSpec())

    @contextlib.contextmanager
    def placed(self, stage: int) -> Iterator[None]:
        """What the models' constraints on activations look for."""
        with jax.set_mesh(self.meshes[stage]), nn.logical_axis_rules(self.layout.rules.for_activations):
            yield

    def split(self, tree: Any) -> Split:
        """Prepares to take apart trees like one of arrays or shapes with shardings."""
        return Split(tree, self.stages, self.meshes)
