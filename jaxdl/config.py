"""Typed configuration: one frozen dataclass a section, and the only home of a default.

The text below a field is its help on the command line, and its type decides how
text from a YAML file or a flag is read (`jaxdl.commandline`). What a type cannot
say, such as fields that exclude each other, the `_check` methods refuse in
sentences meant for the user, one line a problem.
"""

import math
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Scale = Annotated[float, Field(ge=1e-37, le=1e38)]
"""Any number that float32 holds with a margin."""
Fraction = Annotated[float, Field(ge=0, lt=1)]

EPSILON = {"adamw": 1e-8, "lamb": 1e-6}
"""What `optimizer.epsilon` null stands for, by update rule: as published for Adam (Kingma and Ba 2014), and
as MLPerf and NVIDIA set it for LAMB."""


Axis = Annotated[int, Field(ge=-1)]
BATCH_AXES = ("node", "data", "fsdp")
"""Mesh axes over which each batch is divided."""
MESH_AXES = ("node", "pipeline", "data", "fsdp", "tensor")
"""Axes of the mesh of devices, from those that send the least, and bear slow links, to those that send the
most."""

POLICY_NAMES = ("fp32", "tf32", "bf16", "fp16", "bf16_full", "O0", "O1", "O2", "O3")
DTYPES = ("float32", "bfloat16", "float16")


def _positive_number(text: str) -> bool:
    try:
        return 1e-37 < float(text) < 1e38  # what float32 holds with a margin
    except ValueError:
        return False


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


def _refuse(problems: list[str]) -> None:
    """Raise all the problems at once, if there are any."""
    if problems:
        raise ValueError("\n".join(problems))


@dataclass(frozen=True, config=_STRICT)
class ModelConfig:
    """The network."""

    name: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet50"
    """Architecture (He et al. 2015, the v1.5 variant: stride in the 3x3 convolution)."""

    stem: Literal["auto", "imagenet", "small"] = "auto"
    """First layers: `imagenet` is 7x7 stride 2 and max-pooling, `small` a 3x3 convolution that keeps
    the resolution; `auto` takes `small` for images of at most 64 pixels."""

    weights: str | None = None
    """File with weights in torchvision's layout (.safetensors or .npz) to start from."""

    convolution: Literal["auto", "lax", "product"] = "auto"
    """How convolutions are computed: `lax` is XLA's operator, `product` writes them as matrix products
    (same parameters and results, faster on CPUs); `auto` picks by platform and shape."""


@dataclass(frozen=True, config=_STRICT)
class DataConfig:
    """Where examples come from and how they are batched."""

    name: Literal["digits", "fashion_mnist", "image_folder", "tfds", "synthetic"] = "digits"
    """Source: `digits` (1,797 images, in scikit-learn), `fashion_mnist` (idx files in `dir`),
    `image_folder` (`dir`/train/<class>/*.jpg and `dir`/val/<class>/*.jpg), `tfds` (a data set prepared
    as array_record files in `dir`), `synthetic` (generated)."""

    dir: str | None = None
    """Directory of the data set."""

    dataset: str | None = None
    """TFDS only: the data set's name, as `imagenet2012` or `cifar10:3.0.2`."""

    train_split: str = "train"
    """TFDS only: split to train on."""

    eval_split: str = "validation"
    """TFDS only: split to evaluate on."""

    batch_size: Positive = 256
    """Examples per update, over all devices and micro-batches."""

    eval_batch_size: Positive = 256
    """Examples per evaluation batch; the last one is padded, and every example counts once."""

    image_size: Positive = 224
    """Height and width of the images that the network sees, in pixels."""

    augment: Literal["auto", "none", "shift", "shift_flip", "crop_flip"] = "auto"
    """Training augmentation: `shift` moves the image by up to an eighth of its size, `shift_flip` also
    mirrors it, `crop_flip` is the random resized crop and mirror of the ImageNet recipe; `auto` takes the
    source's own."""

    workers: Annotated[int, Field(ge=0)] = 2
    """Threads that read and transform examples (0: in the training thread). Never changes the data."""

    synthetic_examples: Positive = 1024
    """Synthetic only: training examples; a quarter as many are for evaluation."""

    synthetic_classes: Annotated[int, Field(ge=2)] = 1000
    """Synthetic only: number of classes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.name in ("fashion_mnist", "image_folder", "tfds") and not self.dir:
            problems.append(f"data.name {self.name} is read from a directory: set data.dir")
        if self.name == "tfds" and not self.dataset:
            problems.append(
                "data.name tfds needs a data set: set data.dataset, as imagenet2012 or cifar10:3.0.2"
            )
        _refuse(problems)
        return self


@dataclass(frozen=True, config=_STRICT)
class OptimizerConfig:
    """The update rule and its schedule."""

    name: Literal["sgd", "adamw", "lamb", "lars"] = "sgd"
    """Update rule; `lamb` (You et al. 2019) and `lars` (You et al. 2017) are for large batches, and are those
    of the MLPerf references."""

    learning_rate: Annotated[float, Field(gt=0)] = 0.1
    """Peak learning rate, stated for a batch of 256 unless `scale_with_batch` is false."""

    scale_with_batch: bool = True
    """Multiply the learning rate by batch_size / 256 (Goyal et al. 2017). The rates published for LAMB and
    LARS are for their batch as it is, so they want false."""

    momentum: Fraction = 0.9
    """Momentum of SGD and LARS; beta1 of AdamW and LAMB."""

    nesterov: bool = False
    """Nesterov momentum (SGD only)."""

    beta2: Fraction = 0.999
    """Decay of the squared gradients (AdamW and LAMB only)."""

    epsilon: Annotated[float, Field(gt=0)] | None = None
    """Offset of the denominator (AdamW and LAMB only; null: 1e-8 for AdamW, 1e-6 for LAMB)."""

    trust_coefficient: Annotated[float, Field(gt=0)] = 0.001
    """Eta (LARS only): each layer's step, before momentum, is at most this share of the layer's norm, times
    the learning rate."""

    schedule: Literal["cosine", "step", "polynomial", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""

    warmup_epochs: Annotated[float, Field(ge=0)] = 5.0
    """Epochs of linear warm-up from 0."""

    end_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Floor of the cosine and polynomial schedules, as a share of the peak."""

    polynomial_power: Annotated[float, Field(gt=0)] = 2.0
    """Exponent of the polynomial schedule."""

    step_epochs: tuple[Annotated[float, Field(gt=0)], ...] = (30.0, 60.0, 80.0)
    """Epochs at which the step schedule multiplies the learning rate by `step_factor`."""

    step_factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Factor of the step schedule."""

    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """Decay of kernels and embeddings; never of biases or normalisation parameters. For SGD and LARS it is
    added to the gradient (L2), for AdamW it is decoupled, for LAMB it is added to the step that the trust
    ratio scales."""

    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip the gradient to this global norm (null: never). LAMB is defined with 1.0."""

    label_smoothing: Fraction = 0.0
    """Probability mass spread evenly over all classes."""

    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of parameters and batch statistics, and evaluate with it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.nesterov and self.name != "sgd":
            problems.append(f"optimizer.nesterov works with optimizer.name sgd only, not with {self.name}")
        if any(later <= earlier for earlier, later in pairwise(self.step_epochs)):
            epochs = ", ".join(f"{epoch:g}" for epoch in self.step_epochs)
            problems.append(f"optimizer.step_epochs must increase from each value to the next, not {epochs}")
        _refuse(problems)
        return self


@dataclass(frozen=True, config=_STRICT)
class PrecisionConfig:
    """Number formats."""

    policy: str = "fp32"
    """`fp32` (or `O0`): everything in float32. `tf32`: the same, with products in TensorFloat-32 on GPUs that
    have it. `bf16`: float32 master weights, bfloat16 compute. `fp16` (or `O1`, `O2`): float32 master weights,
    float16 compute. `bf16_full` and `O3`: parameters too in bfloat16 or float16, which loses small updates.
    Or one of your own, as `params=float32,compute=bfloat16,output=float32`. Batch statistics, normalisation,
    softmax, loss and sums are float32 under every policy."""

    loss_scale: Annotated[str, Field(examples=["auto", "none", "dynamic", "1024"])] = "auto"
    """`none`, `dynamic`, or a number to keep; `auto` is dynamic for compute in float16 and none otherwise."""

    scale_start: Scale = 65536.0
    """First dynamic scale."""

    scale_growth: Annotated[float, Field(gt=1)] = 2.0
    """Factor by which the dynamic scale grows after `scale_window` finite updates in a row."""

    scale_backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Factor by which the dynamic scale falls where an update is not finite."""

    scale_window: Count = 2000
    """Finite updates in a row after which the dynamic scale grows."""

    scale_minimum: Scale = 1.0
    """Floor of the dynamic scale."""

    scale_maximum: Scale = 4294967296.0
    """Ceiling of the dynamic scale."""

    scale_hysteresis: Count = 1
    """The dynamic scale falls at this skipped update and at all later ones, until it has grown again."""

    max_skipped_updates: Count = 50
    """Updates in a row that may be skipped because they are not finite, before the run ends with exit code 3.
    Without a loss scale the first such update ends it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        parts = dict(part.partition("=")[::2] for part in self.policy.split(","))
        custom = parts.keys() <= {"params", "compute", "output"} and set(parts.values()) <= set(DTYPES)
        custom = custom and len(parts) == self.policy.count(",") + 1
        if self.policy not in POLICY_NAMES and not custom:
            problems.append(
                f"precision.policy {self.policy!r} is not one of {', '.join(POLICY_NAMES)}, nor a list of "
                f"params=, compute= and output= with {', '.join(DTYPES)}"
            )
        if self.loss_scale not in ("auto", "none", "dynamic") and not _positive_number(self.loss_scale):
            problems.append(
                f"precision.loss_scale {self.loss_scale!r} is not auto, none, dynamic or a number above 0 "
                "that float32 holds"
            )
        if not self.scale_minimum <= self.scale_start <= self.scale_maximum:
            problems.append(
                f"precision.scale_start {self.scale_start:g} does not lie between precision.scale_minimum "
                f"{self.scale_minimum:g} and precision.scale_maximum {self.scale_maximum:g}"
            )
        _refuse(problems)
        return self


@dataclass(frozen=True, config=_STRICT)
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
        _refuse(problems)
        return self


@dataclass(frozen=True, config=_STRICT)
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
        _refuse(problems)
        return self


@dataclass(frozen=True, config=_STRICT)
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


@dataclass(frozen=True, config=_STRICT)
class ProfileConfig:
    """A trace of some steps for TensorBoard or Perfetto."""

    start: Annotated[int, Field(ge=0)] | None = None
    """Update after which tracing starts (null: no trace)."""

    steps: Positive = 5
    """Updates to trace."""


@dataclass(frozen=True, config=_STRICT)
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
        _refuse(problems)
        return self
