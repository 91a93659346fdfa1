"""What the study of scaling compares: plans by name, and what each sends, as compiled and in theory."""

import argparse
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments import subjects
from jaxdl import commandline
from jaxdl.config import MESH_AXES, ImageConfig, ParallelConfig
from jaxdl.errors import ConfigError

if TYPE_CHECKING:
    from jaxdl.train.program import Program
    from jaxdl.train.task import Task

PROGRAM = "python -m experiments.scaling"

Options = Mapping[str, str | int]
"""Options `parallel.*` by their names without that."""

BETWEEN = "between stages"
"""What `gpipe` and `1f1b` hand from one stage to the next is no collective."""


def _hybrid(devices: int) -> Options:
    if devices % 4:
        raise ConfigError(f"hybrid is fsdp 2 x tensor 2: {devices} devices are no multiple of 4.")
    return {"data": devices // 4, "fsdp": 2, "tensor": 2}


PLANS: Mapping[str, tuple[Callable[[int], Options], str]] = {
    "single": (lambda n: {}, "one device, however many there are"),
    "data": (lambda n: {"data": n}, "a copy of the state on each device"),
    "zero1": (lambda n: {"data": n, "zero1": "true"}, "the optimizer's state divided"),
    "fsdp": (lambda n: {"fsdp": n}, "parameters divided too"),
    "tensor": (lambda n: {"tensor": n}, "every layer divided"),
    "tensor+sequence": (lambda n: {"tensor": n, "sequence": "true"}, "and what lies between the layers"),
    "hybrid": (_hybrid, "data x fsdp 2 x tensor 2"),
    "shard_map": (lambda n: {"data": n, "backend": "shard_map"}, "data, gradients summed by the step"),
    "pmap": (lambda n: {"data": n, "backend": "pmap"}, "the same in its classic form"),
    "gpipe": (lambda n: {"pipeline": n, "schedule": "gpipe"}, "stages, all forward first"),
    "1f1b": (lambda n: {"pipeline": n, "schedule": "1f1b"}, "stages, backward as soon as possible"),
    "circular": (lambda n: {"pipeline": n, "schedule": "circular"}, "stages of one program, for encoders"),
}
"""Name -> (what it sets for a number of devices, what it is)."""


def read(text: str) -> tuple[Callable[[int], Options], int | None]:
    """Reads a plan: a name, or options as `data=2,tensor=4`.

    Returns:
        What it sets for a number of devices, and that number where the plan fixes it.

    Raises:
        ConfigError: it is neither.
    """
    if text in PLANS:
        return PLANS[text][0], 1 if text == "single" else None
    pairs: list[list[str]] = []
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals:
            pairs.append([name, value])
        elif pairs:
            pairs[-1][1] += f",{part}"  # as in cut=3,3
        else:
            raise ConfigError(
                f"--plans: {text!r} is none of {', '.join(PLANS)}, "
                "nor options of parallel, as data=2,tensor=4."
            )
    known = ParallelConfig.__dataclass_fields__
    for name, _ in pairs:
        if name not in known:
            raise ConfigError(f"--plans {text}: no parallel.{name}; there are {', '.join(known)}.")
    options: Options = {name: value for name, value in pairs}  # noqa: C416 - dict() is of other types
    sizes = [str(options.get(axis, 1)) for axis in MESH_AXES]
    if not all((size.isdecimal() and int(size)) or size == "-1" for size in sizes):
        raise ConfigError(
            f"--plans {text}: {', '.join(MESH_AXES)} are whole numbers of at least 1, "
            "or -1 for the devices left."
        )
    return lambda n: options, None if "-1" in sizes else math.prod(map(int, sizes))


def flags(plan: Callable[[int], Options], devices: int) -> list[str]:
    """The flags of a plan; at one device all are the same program, but those that map the step.

    Raises:
        ConfigError: the plan is not for that many devices.
    """
    options = plan(devices) if devices > 1 else {
        name: value for name, value in plan(4).items() if name == "backend"
    }  # fmt: skip
    return [f"--parallel.{name}={value}" for name, value in ({"data": 1} | dict(options)).items()]


@dataclass(frozen=True)
class Case:
    """One plan on a number of devices.

    Attributes:
        plan: its name, or its options.
        devices: how many it uses.
        on: the chip, described or at hand.
        batch_size: examples a step, over all devices.
        reason: why it does not fit; what follows is missing then.
        config: the run.
        task: what is trained.
        program: the run, worked out.
    """

    plan: str
    devices: int
    on: str
    batch_size: int
    reason: str | None = None
    config: Any = None
    task: Any = None
    program: Any = None


def combinations(
    arguments: argparse.Namespace, plans: list[Any], chip: str, devices: list[Any]
) -> list[Case]:
    """Works out every combination, the single device first; what does not fit keeps its reason.

    Raises:
        ConfigError: not even a single device will do.
    """
    counts = arguments.devices or [2**power for power in range(len(devices).bit_length())]
    wanted = [(1, "single", PLANS["single"][0])]
    for count in sorted(set(counts)):
        wanted += [(count, name, plan) for name, plan, fixed in plans if fixed is None]
    wanted += [(fixed, name, plan) for name, plan, fixed in plans if fixed is not None]
    cases: list[Case] = []
    for count, name, plan in wanted:
        batch = arguments.batch_size * (count if arguments.fixed == "share" else 1)
        head = name, count, chip, batch
        try:
            config = configuration(arguments, batch, flags(plan, count))
            if any(case.config == config for case in cases):
                continue
            cases.append(Case(*head, None, config, *prepared(arguments, config, devices[:count])))
        except ConfigError as error:
            if not cases:
                raise
            cases.append(Case(*head, first_sentence(str(error))))
    return cases


def configuration(arguments: argparse.Namespace, batch_size: int, flags: list[str]) -> ImageConfig:
    """One combination as a run's configuration, checked as any other.

    Raises:
        ConfigError: a value is wrong.
    """
    options = [
        *("--data.name=synthetic", "--train.steps=1", "--optimizer.warmup_epochs=0"),
        f"--optimizer.name={subjects.OPTIMIZERS.get(arguments.subject, 'adamw')}",
        f"--data.batch_size={batch_size}",
        f"--data.image_size={arguments.image_size}",
        "--model.stem=imagenet",  # whatever the size of the images
    ]
    return commandline.parse(PROGRAM, [*options, *flags], ImageConfig)


def prepared(
    arguments: argparse.Namespace, config: ImageConfig, devices: list[Any]
) -> tuple["Task", "Program"]:
    """Works a run out on some devices.

    Raises:
        ConfigError: it cannot be divided so.
    """
    from jaxdl.train.program import prepare

    task = subjects.build(arguments.subject, config, length=arguments.length)
    return task, prepare(config, task, config.data.synthetic_examples, devices=devices)


def first_sentence(text: str) -> str:
    """What went wrong, without what to do about it."""
    return " ".join(text.split()).split(". ")[0].removesuffix(".")


def state_bytes(state: Any) -> int:
    """Bytes of a laid out state on the device that has most."""
    import jax

    held: Counter[Any] = Counter()
    for leaf in jax.tree.leaves(state):
        for device in leaf.sharding.device_set:
            held[device] += _held(leaf)
    return max(held.values())


def _held(leaf: Any) -> int:
    """Bytes of an array on each of its devices."""
    if not hasattr(leaf.dtype, "itemsize"):
        return 0
    return int(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)


def peak_bytes(program: "Program", compiled: Any) -> int | None:
    """The most memory on each device at any time, as planned; None for stages, which are many programs."""
    if not hasattr(compiled, "memory_analysis"):
        return None
    needs = compiled.memory_analysis()
    # The peak that a CPU's compiler tells is without temporaries.
    if program.plan.mesh.devices.flat[0].platform == "cpu":
        held = needs.argument_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes
        return int(held + needs.temp_size_in_bytes)
    return int(needs.peak_memory_in_bytes)


def sent(program: "Program", compiled: Any) -> tuple[dict[str, int], bool]:
    """Reads what each device sends in a step, in bytes by kind, and whether the text tells exactly.

    Of stages that differ, the one that sends most counts.
    """
    from jaxdl.parallel.pipeline.plan import StagePlan
    from jaxdl.parallel.pipeline.step import StagedTrainStep
    from jaxdl.planning.communication import collectives

    exact = True

    def count(executable: Any, times: int, sums: Counter[str]) -> None:
        nonlocal exact
        for one in collectives(executable.as_text()):
            sums[one.kind] += times * one.sent
            exact &= one.exact

    if not (isinstance(compiled, StagedTrainStep) and isinstance(program.plan, StagePlan)):
        sums: Counter[str] = Counter()
        count(compiled, 1, sums)
        return dict(sums), exact
    parts, stages = program.plan.parts, []
    for number, stage in enumerate(compiled.stages):
        sums = Counter()
        for executable, times in ((stage.forward, parts), (stage.backward, parts), (stage.finish, 1),
                                  (stage.propose, 1)):  # fmt: skip
            count(executable, times, sums)
        if number + 1 < len(compiled.stages):
            sums[BETWEEN] += parts * activations(stage.y, differentiable=False)
        if number:
            sums[BETWEEN] += parts * activations(stage.x, differentiable=True)
        stages.append(dict(sums))
    return max(stages, key=lambda sums: sum(sums.values())), exact


def activations(tree: Any, *, differentiable: bool) -> int:
    """Bytes that each device of a stage hands on, of all arrays or of those that have gradients."""
    import jax
    import jax.numpy as jnp

    leaves = jax.tree.leaves(tree)
    return sum(
        _held(leaf) for leaf in leaves if not differentiable or jnp.issubdtype(leaf.dtype, jnp.inexact)
    )


def expected(config: ImageConfig, program: "Program", task: "Task") -> int | None:
    """What theory expects each device to send in a step; None where there is no formula.

    The formulas are those of `jaxdl.planning.communication`, summed over the axes of the mesh. They know
    of parameters and of what goes between an encoder's layers, not of the embedding nor of scalars.
    """
    import jax

    from experiments.tagging import Tagging
    from jaxdl.parallel.rules import axes_of
    from jaxdl.planning import communication

    sizes = dict(program.plan.mesh.shape)
    parallel = config.parallel
    replicas = sizes["node"] * sizes["data"]
    shards = replicas * sizes["fsdp"]
    if (sizes["tensor"] > 1 or sizes["pipeline"] > 1) and not isinstance(task, Tagging):
        return None
    # A device's part of the parameters, as gathered from those that share the batch.
    whole = divided = 0
    for leaf in jax.tree.leaves(program.state.params):
        axes = {axis for part in leaf.sharding.spec for axis in axes_of(part)}
        if "fsdp" in axes:
            divided += _held(leaf)
        else:
            whole += _held(leaf)
    terms: list[tuple[dict[str, int], int]] = []
    gathered = divided * sizes["fsdp"]
    terms.append((communication.fully_sharded(gathered, gathered), sizes["fsdp"]))
    terms.append((communication.data_parallel(divided), replicas))
    over_all = communication.zero(whole, whole) if parallel.zero1 else communication.data_parallel(whole)
    terms.append((over_all, shards))
    if isinstance(task, Tagging):
        micro = config.data.batch_size // shards // parallel.parts * task.length * task.embed
        micro *= task.types["dtype"].dtype.itemsize
        layers = task.encoder.depth // sizes["pipeline"]
        between = communication.tensor_parallel(parallel.parts * micro, layers, parallel.sequence)
        terms.append((between, sizes["tensor"]))
        stages = communication.pipeline(micro, parallel.parts, parallel.repeats)
        if sizes["pipeline"] == 2 and parallel.schedule != "circular":
            stages = {kind: size // 2 for kind, size in stages.items()}  # both are an end
        terms.append((stages, sizes["pipeline"]))
    return sum(
        communication.ring_bytes(kind, size, group)
        for term, group in terms
        for kind, size in term.items()
        if group > 1
    )
