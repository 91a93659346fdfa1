"""The section `parallel`."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from jaxdl.config.fields import STRICT, Positive, refuse

Axis = Annotated[int, Field(ge=-1)]
BATCH_AXES = ("node", "data", "fsdp")
"""Mesh axes over which each batch is divided."""
MESH_AXES = ("node", "pipeline", "data", "fsdp", "tensor")
"""Axes of the mesh of devices, from those that send the least, and bear slow links, to those that send the
most."""


def uneven_batch(batch: int, parts: dict[str, int]) -> list[str]:
    """Says what is wrong with a batch that is divided by all of some numbers, given by name, if anything."""
    unit = math.prod(parts.values())
    if batch % unit == 0:
        return []
    near = sorted({max(batch // unit, 1) * unit, -(-batch // unit) * unit})
    factors = " times ".join(f"{name} {size}" for name, size in parts.items() if size > 1)
    return [
        f"data.batch_size {batch} is not a multiple of {unit} ({factors}): take {' or '.join(map(str, near))}"
    ]


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """How the step is spread over devices and processes. No choice changes the numbers, but `batch_norm` and,
    for networks with batch normalisation, `microbatches`."""

    backend: Literal["jit", "shard_map", "pmap"] = "jit"
    """Who divides the step: `jit` lets the compiler, along every axis below; `shard_map` and `pmap` (its
    classic form) run it on each device's part of the batch and sum the gradients once, along `node` and
    `data` only."""

    node: Axis = 1
    """Machines, or groups of devices that are linked slowly; they share each batch. The devices of a run are
    the product of node, pipeline, data, fsdp and tensor; -1 for one of them takes all devices that are
    left."""

    data: Axis = -1
    """Devices that share each batch, each with a copy of the parameters."""

    fsdp: Axis = 1
    """Devices that share each batch, and among which parameters and optimizer state are divided too (ZeRO-3,
    Rajbhandari et al. 2019)."""

    tensor: Axis = 1
    """Devices that share the channels, heads and hidden units of every layer (Megatron-LM, Shoeybi et al.
    2019)."""

    pipeline: Positive = 1
    """Stages: consecutive layers on devices of their own."""

    schedule: Literal["gpipe", "1f1b", "circular"] = "1f1b"
    """Order of the micro-batches in the stages: `gpipe` (Huang et al. 2018) runs all forward, then all
    backward; `1f1b` (Narayanan et al. 2019) goes backward as soon as it can, and holds the activations of at
    most as many micro-batches as there are stages; `circular` is one program for all devices, also of several
    processes, for models whose layers are equal, each device with `repeats` runs of layers (interleaved)."""

    microbatches: Positive | None = None
    """Parts of each batch that follow each other through the stages (null: as many as stages). Batch
    normalisation sees one part at a time, as with memory.accumulate."""

    cut: Annotated[str, Field(examples=["estimated", "measured", "5,6,4,3"])] = "estimated"
    """Where `gpipe` and `1f1b` cut a model whose blocks differ: so that the slowest stage is as fast as
    it can be, by operations counted (`estimated`) or by seconds `measured` on the first device; or the
    number of blocks of each stage, as `5,6,4,3`."""

    repeats: Positive = 1
    """Runs of layers on each device (`circular` only): more leave it idle for less time, and send more."""

    sequence: bool = False
    """Divide what lies between the layers of a Transformer along the sequence among the `tensor` devices
    (Korthikanti et al. 2022)."""

    zero1: bool = False
    """Divide the optimizer's state, but not the parameters, among the devices that share the batch
    (ZeRO-1)."""

    batch_norm: Annotated[str, Field(examples=["global", "local", "groups:8"])] = "global"
    """Whose statistics normalise an example: `global`, those of the whole batch; `groups:8`, of its part of
    the batch among 8, wherever it is computed (Hoffer et al. 2017); `local`, of its device's part, for
    `shard_map` and `pmap`. Fewer examples are other numbers, and less to send."""

    layout: tuple[str, ...] = ()
    """Exceptions to how parameters are divided: a pattern of the path, and the mesh axis of each dimension,
    as `head/kernel=fsdp -, */query/kernel=- tensor -`; the first that fits counts."""

    show_layout: bool = False
    """Print how each parameter is divided, and its bytes on each device, before the run."""

    cluster: Literal["none", "auto", "slurm", "ompi", "mpi4py", "k8s"] = "none"
    """Who tells a process its place among several: `auto` looks for any of the others' traces. Not needed
    with `python -m experiments.launch` nor with the three options below."""

    coordinator: str | None = None
    """Address of process 0, as `host:port`, where processes are started by hand."""

    processes: Positive | None = None
    """Number of processes, where they are started by hand."""

    process: Annotated[int, Field(ge=0)] | None = None
    """This process's number, where they are started by hand."""

    timeout: Annotated[float, Field(ge=5)] = 40.0
    """Seconds after which a silent process counts as lost, and the others end with exit code 6."""

    @property
    def parts(self) -> int:
        """Micro-batches that the stages of the pipeline see of each batch."""
        return (self.microbatches or self.pipeline) if self.pipeline > 1 else 1

    @property
    def staged(self) -> bool:
        """Whether the model is cut into stages that are programs of their own."""
        return self.pipeline > 1 and self.schedule != "circular"

    @property
    def circular(self) -> bool:
        """Whether the model's layers are a pipeline within one program."""
        return self.pipeline > 1 and self.schedule == "circular"

    @property
    def batch_norm_groups(self) -> int | None:
        """Parts of the whole batch that are normalised apart; None: each device's."""
        name, _, groups = self.batch_norm.partition(":")
        return {"global": 1, "local": None}[name] if not groups else int(groups)

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        problems += [
            f"parallel.{axis} 0 leaves no device: take -1 (all that are left) or at least 1"
            for axis, size in sizes.items()
            if size == 0
        ]
        filled = [f"parallel.{axis}" for axis, size in sizes.items() if size == -1]
        if len(filled) > 1:
            # data is -1 unless it was set, so the message says what to set.
            problems.append(
                f"{' and '.join(filled)} cannot both take the devices that are left (-1, which "
                "parallel.data is unless it is set): give one a number"
            )
        divided = [f"parallel.{axis}" for axis in ("pipeline", "fsdp", "tensor") if sizes[axis] != 1]
        divided += ["parallel.zero1"] * self.zero1
        if self.backend != "jit" and divided:
            problems.append(
                f"parallel.backend {self.backend} keeps a copy of everything on each device, so it cannot do "
                f"with {', '.join(divided)}: take jit"
            )
        if self.sequence and self.tensor == 1:
            problems.append(
                "parallel.sequence divides sequences among the parallel.tensor devices: set that above 1"
            )
        name, colon, groups = self.batch_norm.partition(":")
        listed = name == "groups" and groups.isdecimal() and int(groups) > 0
        if not listed and (colon or name not in ("global", "local")):
            problems.append(
                f"parallel.batch_norm {self.batch_norm!r} is not global, local or a number of groups, as "
                "groups:8"
            )
        if self.batch_norm == "local" and self.backend == "jit":
            problems.append(
                "parallel.batch_norm local is what each device of backend shard_map or pmap does; with jit "
                "say how many parts of the batch are normalised apart, as groups:8"
            )
        if self.pipeline == 1 and self.microbatches is not None:
            problems.append(
                "parallel.microbatches are for parallel.pipeline; without it, memory.accumulate divides "
                "a batch"
            )
        listed = all(part.strip().isdecimal() and int(part) > 0 for part in self.cut.split(","))
        if self.cut not in ("estimated", "measured") and not listed:
            problems.append(
                f"parallel.cut {self.cut!r} is not estimated, measured or a number of blocks for each stage, "
                "as 5,6,4,3"
            )
        if self.repeats > 1 and not self.circular:
            problems.append("parallel.repeats works with a pipeline of parallel.schedule circular only")
        by_hand = [self.coordinator, self.processes, self.process]
        if any(given is not None for given in by_hand):
            if None in by_hand:
                problems.append(
                    "parallel.coordinator, parallel.processes and parallel.process go together: set all three"
                )
            elif self.process is not None and self.processes is not None and self.process >= self.processes:
                problems.append(
                    f"parallel.process {self.process} is not one of {self.processes} processes: they count "
                    "from 0"
                )
            if self.cluster != "none":
                problems.append(
                    f"parallel.cluster {self.cluster} finds out what parallel.coordinator, .processes and "
                    ".process say: give one or the other"
                )
        refuse(problems)
        return self
