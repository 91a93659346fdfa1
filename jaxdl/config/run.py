"""A whole run, whatever it trains, and the sections that every run has."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from jaxdl.config.fields import STRICT, Positive, refuse
from jaxdl.config.optimizer import OptimizerConfig
from jaxdl.config.parallel import BATCH_AXES, ParallelConfig, uneven_batch
from jaxdl.config.precision import PrecisionConfig


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The network."""

    name: str = "own"
    """Architecture."""

    weights: str | None = None
    """Where weights to start from are."""


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Where examples come from and how they are batched."""

    name: str = "own"
    """Source."""

    dir: str | None = None
    """Directory of the data set."""

    batch_size: Positive = 256
    """Examples per update, over all devices and micro-batches."""

    eval_batch_size: Positive = 256
    """Examples per evaluation batch; the last one is padded, and every example counts once."""

    workers: Annotated[int, Field(ge=0)] = 2
    """Threads that read and transform examples (0: in the training thread). Never changes the data."""


@dataclass(frozen=True, config=STRICT)
class MemoryConfig:
    """What is traded for memory."""

    accumulate: Positive = 1
    """Micro-batches per update; their gradients are summed before one update."""

    remat: Annotated[str, Field(examples=["none", "dots", "blocks", "full", "names:conv2"])] = "none"
    """What the backward pass computes again rather than finds in memory: the same results for less memory and
    more time. `none`; `dots` keeps the results of convolutions and of products with parameters; `blocks` the
    input of each residual block; `full` the input of each stage of a ResNet or layer of an encoder;
    `names:a,b` keeps the activations named, as `names:conv2,conv3`."""

    offload: Literal["none", "activations", "optimizer", "all"] = "none"
    """What is held in the host's memory rather than the accelerator's, and copied when needed: `activations`
    are those that `remat` keeps by name (`dots` or `names:`), `optimizer` is the optimizer's state. Not on
    CPUs, whose memory is the host's."""

    allocator: Literal["tuned", "default"] = "tuned"
    """CPU only. `tuned` restarts the program once at its start with malloc settings (huge pages, no returning
    of memory between steps) that make training about a quarter faster; `default` leaves the process as it
    is."""

    @property
    def offloads_activations(self) -> bool:
        """Whether what `remat` keeps by name is held in the host's memory."""
        return self.offload in ("activations", "all")

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state is held in the host's memory."""
        return self.offload in ("optimizer", "all")

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        level, _, names = self.remat.partition(":")
        listed = level == "names" and all(name.strip() for name in names.split(","))
        if self.remat not in ("none", "dots", "blocks", "full") and not listed:
            problems.append(
                f"memory.remat {self.remat!r} is not none, dots, blocks, full or a list of activations, as "
                "names:conv2,conv3"
            )
        if self.offloads_activations and level not in ("dots", "names"):
            problems.append(
                f"memory.offload {self.offload} holds what memory.remat keeps by name: set memory.remat to "
                f"dots or names:..., not {self.remat}"
            )
        refuse(problems)
        return self


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """The loop."""

    steps: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Updates to make; give this or `epochs`."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training data; give this or `steps`."""

    log_every: Positive = 50
    """Updates between training lines in metrics.jsonl."""

    eval_every: Positive | None = None
    """Updates between evaluations (null: once an epoch); the last update is always followed by one."""

    checkpoint_every: Positive | None = None
    """Updates between checkpoints (null: once an epoch); the last update is always saved."""

    keep: Positive = 2
    """Newest checkpoints to keep, besides the best one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("train.steps and train.epochs exclude each other: give only one")
        return self


@dataclass(frozen=True, config=STRICT)
class ProfileConfig:
    """A trace of some steps for TensorBoard or Perfetto."""

    start: Annotated[int, Field(ge=0)] | None = None
    """Update after which tracing starts (null: no trace)."""

    steps: Positive = 5
    """Updates to trace."""

    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """What one device can do in matrix products of the policy's dtype, in 10^12 operations a second; `mfu` is
    the share of it (null: the maker's figure, where it is known)."""


@dataclass(frozen=True, config=STRICT)
class Config:
    """A whole run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    train: TrainConfig = TrainConfig()
    profile: ProfileConfig = ProfileConfig()

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of initial values, data order, augmentation and dropout."""

    workdir: str | None = None
    """Directory of the run (null: a new one under runs/)."""

    resume: bool = False
    """Go on from the newest sound checkpoint in `workdir`; starts afresh where there is none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.train.steps is None and self.train.epochs is None:
            problems.append("the length of the training is missing: set train.steps or train.epochs")
        steps, start = self.train.steps, self.profile.start
        if steps is not None and start is not None and start >= steps:
            problems.append(
                f"profile.start {start} is past the last step to trace: train.steps is {steps}, so take "
                f"{steps - 1} or less"
            )
        if self.parallel.staged and self.memory.accumulate > 1:
            problems.append(
                f"memory.accumulate {self.memory.accumulate}: the stages of parallel.pipeline accumulate "
                "over their micro-batches; set parallel.microbatches instead"
            )
        numbers = {
            "memory.accumulate": self.memory.accumulate,
            "parallel.microbatches": self.parallel.parts,
        }
        numbers |= {f"parallel.{axis}": max(getattr(self.parallel, axis), 1) for axis in BATCH_AXES}
        problems += uneven_batch(self.data.batch_size, numbers)
        if self.resume and not self.workdir:
            problems.append("resume needs the directory of the run to go on with, as workdir")
        refuse(problems)
        return self
