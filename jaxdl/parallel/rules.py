"""From the names of an array's axes to mesh axes: the table that decides how parameters are divided.

| name                              | mesh axis                       | by                                   |
|-----------------------------------|---------------------------------|--------------------------------------|
| batch (of activations)            | node, data, fsdp                | always                               |
| vocab, mlp, heads, channel        | tensor                          | `parallel.tensor`                    |
| copy (of gradients, over micro-batches) | node, data          | `memory.accumulate`, `pipeline`      |
| sequence (between encoder layers) | tensor                          | `parallel.sequence`                  |
| layers, stage                     | pipeline                        | `parallel.pipeline`                  |
| the longest that is left whole    | fsdp                            | `parallel.fsdp`                      |
| likewise, of the optimizer's state | node, data, fsdp               | `parallel.zero1`                     |

A model names the axes of its parameters. Names decide what tensor parallelism divides; what `fsdp` and ZeRO-1
divide, the shape decides, since any axis will do. `parallel.layout` overrides the table for a pattern of
paths.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from jaxdl.config import BATCH_AXES, MESH_AXES, ParallelConfig
from jaxdl.errors import ConfigError

TENSOR_NAMES = ("vocab", "mlp", "heads", "channel")
"""Names of axes that tensor parallelism divides: each layer's outputs (column-parallel) and, where an output
is the next product's input by the same name, its inputs (row-parallel), as Megatron-LM does."""

SMALL = 2**12
"""Elements below which `fsdp` and ZeRO-1 leave an array whole: fetching it takes longer than it saves."""


@dataclass(frozen=True)
class Rules:
    """How parameters and activations are divided over a mesh.

    Attributes:
        sizes: size of each mesh axis.
        sequence: whether activations between Transformer layers are divided along the sequence.
        zero1: whether the optimizer's state is divided over the batch's axes although parameters are not.
        exceptions: pattern of a path -> mesh axes by dimension.
    """

    sizes: Mapping[str, int]
    sequence: bool = False
    zero1: bool = False
    exceptions: tuple[tuple[str, tuple[str | None, ...]], ...] = ()

    @classmethod
    def of(cls, config: ParallelConfig, mesh: Mesh) -> "Rules":
        """Reads the configuration.

        Raises:
            ConfigError: `parallel.layout` cannot be read.
        """
        return cls(dict(mesh.shape), config.sequence, config.zero1, tuple(map(_exception, config.layout)))

    @property
    def for_activations(self) -> tuple[tuple[str, Any], ...]:
        """flax's logical axis rules for `jaxdl.models.layers.constrain`."""
        return (
            ("batch", BATCH_AXES),
            ("sequence", "tensor" if self.sequence else None),
            ("copy", ("node", "data")),
            ("stage", "pipeline"),
            *((name, "tensor") for name in TENSOR_NAMES),
        )

    def spec(self, path: str, shape: tuple[int, ...], names: tuple[str | None, ...]) -> PartitionSpec:
        """Divides a parameter.

        Args:
            path: as `block/conv/kernel`.
            shape: of the whole parameter.
            names: of its axes; none at all for a parameter that carries no names.

        Raises:
            ConfigError: the parameter cannot be divided as asked; it is never left whole in silence.
        """
        for pattern, axes in self.exceptions:
            if fnmatchcase(path, pattern):
                return self._checked(pattern, path, shape, axes)
        divided: list[tuple[str, ...]] = [()] * len(shape)
        wanted = {"layers": "pipeline"} | dict.fromkeys(TENSOR_NAMES, "tensor")
        for place, name in enumerate(names):
            axis = wanted.get(name or "")
            # One mesh axis divides one dimension; the first named takes it.
            if axis and self.sizes[axis] > 1 and not any(axis in axes for axes in divided):
                if shape[place] % self.sizes[axis]:
                    raise ConfigError(
                        f"parallel.{axis} {self.sizes[axis]} does not divide the {shape[place]} {name} of "
                        f"{path}, {shape}: take a divisor, or keep it whole with --parallel.layout "
                        f"{_whole(path, shape)}"
                    )
                divided[place] = (axis,)
        # A loop over layers fetches one after the other, so no device may hold some of them only.
        loop = [place for place, name in enumerate(names) if name == "layers"]
        return self._over(("fsdp",), path, shape, divided, loop)

    def optimizer_spec(self, path: str, spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
        """Divides what an optimizer keeps of a parameter's shape."""
        if not self.zero1:
            return spec
        divided = [axes_of(part) for part in spec] + [()] * (len(shape) - len(spec))
        used = {axis for axes in divided for axis in axes}
        return self._over(tuple(axis for axis in BATCH_AXES if axis not in used), path, shape, divided)

    def _over(
        self,
        axes: tuple[str, ...],
        path: str,
        shape: tuple[int, ...],
        divided: list[tuple[str, ...]],
        loop: Sequence[int] = (),
    ) -> PartitionSpec:
        """Divides the longest dimension that further mesh axes divide evenly, in a large enough array.

        Better one that no axis divides yet: where two divide the same, a compiler that fetches what one has
        divided fetches all of it, and every device of the other computes the whole product.
        """
        axes = tuple(axis for axis in axes if self.sizes[axis] > 1)
        parts = math.prod(self.sizes[axis] for axis in axes)

        def length(place: int) -> int:
            return shape[place] // math.prod(self.sizes[axis] for axis in divided[place])

        if parts > 1 and math.prod(shape) >= SMALL:
            fitting = [p for p in range(len(shape)) if p not in loop and length(p) % parts == 0]
            if not fitting:
                raise ConfigError(
                    f"none of the dimensions of {path}, {shape}, divides evenly among "
                    f"{' x '.join(f'parallel.{axis} {self.sizes[axis]}' for axis in axes)}: keep it whole "
                    f"with --parallel.layout {_whole(path, shape)}"
                )
            place = max(fitting, key=lambda place: (not divided[place], length(place)))
            divided = [*divided[:place], divided[place] + axes, *divided[place + 1 :]]
        return PartitionSpec(*map(_entry, divided))

    def _checked(
        self, pattern: str, path: str, shape: tuple[int, ...], axes: tuple[str | None, ...]
    ) -> PartitionSpec:
        if len(axes) != len(shape):
            raise ConfigError(
                f"parallel.layout {pattern}: {path} has {len(shape)} dimensions, {shape}, but "
                f"{len(axes)} are laid out"
            )
        for length, axis in zip(shape, axes, strict=True):
            if axis is not None and length % self.sizes[axis]:
                raise ConfigError(
                    f"parallel.layout {pattern}: {length} of {path} does not divide evenly among "
                    f"parallel.{axis} {self.sizes[axis]}"
                )
        return PartitionSpec(*axes)


def axes_of(part: Any) -> tuple[str, ...]:
    """Lists the mesh axes of an entry of a `PartitionSpec`."""
    if part is None:
        return ()
    return (part,) if isinstance(part, str) else tuple(part)


def _exception(text: str) -> tuple[str, tuple[str | None, ...]]:
    pattern, equals, listed = text.rpartition("=")
    axes = tuple(listed.split())
    named = [axis for axis in axes if axis != "-"]
    if not equals or not pattern or not set(named) <= set(MESH_AXES) or len(named) > len(set(named)):
        raise ConfigError(
            f"parallel.layout: {text!r} is not a pattern, = and for each dimension one of "
            f"{', '.join(MESH_AXES)} (each at most once) or -, as */query/kernel=- tensor -"
        )
    return pattern, tuple(None if axis == "-" else axis for axis in axes)


def _whole(path: str, shape: tuple[int, ...]) -> str:
    return f"'{path}={' '.join('-' * len(shape))}'"


def _entry(axes: tuple[str, ...]) -> Any:
    return axes if len(axes) > 1 else axes[0] if axes else None
