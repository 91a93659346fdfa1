"""The largest batch that fits: the training step compiled ahead of time, with no array allocated.

The compiler knows what a step needs on each device: its arguments (state and batch), its temporaries
(activations above all) and its outputs, less what outputs take over from arguments. What it cannot know, the
batches on their way, evaluation and fragmentation, a margin leaves room for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxdl.config import ImageConfig, ImageDataConfig
from jaxdl.data.images.batches import train_batches
from jaxdl.data.images.types import Source
from jaxdl.data.types import Batch
from jaxdl.errors import ConfigError
from jaxdl.parallel.mesh import batch_shards, make_mesh
from jaxdl.planning.capacity import MARGIN, device_capacity, show_bytes
from jaxdl.train.finders import without_schedule
from jaxdl.train.program import prepare
from jaxdl.train.report import peak_memory
from jaxdl.train.task import Task


@dataclass(frozen=True)
class Need:
    """What a step needs on each device.

    Attributes:
        batch: examples per update, over all devices and micro-batches.
        accumulate: micro-batches per update.
        needed: bytes on each device; None if memory ran out already in compiling.
        fits: whether that is within the capacity less the margin.
    """

    batch: int
    accumulate: int
    needed: int | None
    fits: bool


@dataclass(frozen=True)
class Plan:
    """What fits.

    Attributes:
        devices: how many share each batch.
        device_kind: what they are.
        capacity: bytes on each device.
        capacity_from: where that is known from.
        usable: the capacity less the margin.
        needs: what was compiled, by batch size.
        best: the largest of the candidates that fits; None if none does.
        candidates: the sizes in question, ascending.
        configured: the batch size of the configuration.
    """

    devices: int
    device_kind: str
    capacity: int
    capacity_from: str
    usable: int
    needs: tuple[Need, ...]
    best: int | None
    candidates: tuple[int, ...]
    configured: Need


@dataclass(frozen=True)
class Trial:
    """How one real step went.

    Attributes:
        batch: examples per update.
        fits: whether it went through.
        peak: most bytes in use on a device, or by the process on a CPU; None if it did not.
        reason: why it did not.
    """

    batch: int
    fits: bool
    peak: int | None
    reason: str | None = None


def plan_batch_size(
    config: ImageConfig,
    task: Task,
    source: Source,
    *,
    limit: int,
    capacity: int | None,
    say: Callable[[str], None],
) -> Plan:
    """Finds the largest batch whose step fits, by compiling.

    Candidates are the powers of two that the devices and micro-batches share
    evenly, or such multiples of their number where it is none itself. The
    search starts near the configured size and doubles, or halves, until the
    answer changes: a larger batch never needs less.

    Args:
        config: the whole run.
        task: model and loss.
        source: the training set.
        limit: largest candidate.
        capacity: bytes on each device; None asks the devices.
        say: told of each size that was compiled.

    Raises:
        ConfigError: the settings do not fit the devices, or the limit leaves no candidate.
    """
    if config.parallel.staged:
        raise ConfigError(
            f"parallel.pipeline {config.parallel.pipeline} with {config.parallel.schedule} is many programs, "
            "and what fits is asked of one: try sizes with parallel.pipeline 1"
        )
    accumulate, configured = config.memory.accumulate, config.data.batch_size
    mesh = make_mesh(config.parallel, batch_size=configured, accumulate=accumulate)
    unit = batch_shards(mesh) * config.parallel.parts * accumulate
    candidates = [unit << power for power in range(limit.bit_length()) if unit << power <= limit]
    if not candidates:
        raise ConfigError(
            f"--limit {limit} is less than the smallest batch of {batch_shards(mesh)} devices x "
            f"memory.accumulate {accumulate}: take {unit} or more"
        )
    if capacity is None:
        capacity, capacity_from = device_capacity(list(mesh.devices.flat))
    else:
        capacity_from = "--capacity"
    usable = round(capacity * (1 - MARGIN))
    needs: dict[int, Need] = {}

    def fits(batch: int) -> bool:
        if batch not in needs:
            needs[batch] = need(config, task, source, batch=batch, accumulate=accumulate, usable=usable)
            say(describe(needs[batch]))
        return needs[batch].fits

    start = max((place for place, size in enumerate(candidates) if size <= configured), default=0)
    best = largest(candidates, fits, start)
    fits(configured)
    return Plan(
        devices=mesh.size,
        device_kind=mesh.devices.flat[0].device_kind,
        capacity=capacity,
        capacity_from=capacity_from,
        usable=usable,
        needs=tuple(needs[batch] for batch in sorted(needs)),
        best=best,
        candidates=tuple(candidates),
        configured=needs[configured],
    )


def largest(candidates: Sequence[int], fits: Callable[[int], bool], start: int) -> int | None:
    """Finds the last of the ascending candidates that fits, walking from the place `start`."""
    place = start
    if fits(candidates[place]):
        while place + 1 < len(candidates) and fits(candidates[place + 1]):
            place += 1
        return candidates[place]
    return next((candidates[i] for i in reversed(range(start)) if fits(candidates[i])), None)


def fitting_accumulation(
    config: ImageConfig,
    task: Task,
    source: Source,
    *,
    micro_batch: int,
    usable: int,
    say: Callable[[str], None],
) -> Need | None:
    """Finds the fewest micro-batches with which the configured batch fits, by compiling; None if none do.

    Args:
        config: the whole run, whose batch does not fit as it is.
        task: model and loss.
        source: the training set.
        micro_batch: size of micro-batches that fit.
        usable: bytes on each device.
        say: told of each number that was compiled.
    """
    batch = config.data.batch_size
    mesh = make_mesh(config.parallel, batch_size=batch, accumulate=config.memory.accumulate)
    devices = batch_shards(mesh)
    for accumulate in range(config.memory.accumulate + 1, batch // devices + 1):
        if batch % (accumulate * devices) == 0 and batch // accumulate <= micro_batch:
            found = need(config, task, source, batch=batch, accumulate=accumulate, usable=usable)
            say(describe(found))
            if found.fits:
                return found
    return None


def need(
    config: ImageConfig, task: Task, source: Source, *, batch: int, accumulate: int, usable: int
) -> Need:
    """Compiles the training step for a batch size, and asks the compiler what it needs."""
    candidate = _with_batch(config, batch, accumulate)
    program = prepare(candidate, task, len(source))
    example = _first_batch(replace(config.data, batch_size=1), config.seed, source)
    shapes = {
        name: jax.ShapeDtypeStruct((batch, *array.shape[1:]), array.dtype) for name, array in example.items()
    }
    try:
        compiled: Any = program.plan.compile_train(program.train_step, program.state, shapes)
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return Need(batch, accumulate, None, False)
    needed = step_bytes(compiled.memory_analysis())
    return Need(batch, accumulate, needed, needed <= usable)


def step_bytes(analysis: Any) -> int:
    """Adds up a compiled program's memory on each device: arguments, temporaries, outputs."""
    return int(
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def try_step(config: ImageConfig, task: Task, source: Source, batch: int) -> Trial:
    """Makes one real update, to be called in a process of its own."""
    candidate = _with_batch(config, batch, config.memory.accumulate)
    try:
        program = prepare(candidate, task, len(source))
        examples = _first_batch(candidate.data, config.seed, source)
        state = program.plan.compile_init(program.init)()
        step = program.plan.compile_train(program.train_step, program.state, examples)
        jax.block_until_ready(step(state, program.plan.put(examples)))
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return Trial(batch, False, None, str(error).splitlines()[0])
    except MemoryError:
        return Trial(batch, False, None, "the batch itself does not fit into memory")
    return Trial(batch, True, peak_memory())


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of JAX says that memory ran out."""
    return "RESOURCE_EXHAUSTED" in str(error)


def describe(found: Need) -> str:
    """Writes what was found for a person who waits."""
    parts = f" in {found.accumulate} micro-batches" if found.accumulate > 1 else ""
    needed = "more than compiling could take" if found.needed is None else show_bytes(found.needed)
    return f"batch {found.batch}{parts} needs {needed}: {'fits' if found.fits else 'does not fit'}"


def _with_batch(config: ImageConfig, batch: int, accumulate: int) -> ImageConfig:
    return replace(
        without_schedule(config, 1),
        data=replace(config.data, batch_size=batch),
        memory=replace(config.memory, accumulate=accumulate),
    )


def _first_batch(config: ImageDataConfig, seed: int, source: Source) -> Batch:
    batches = train_batches(source, replace(config, workers=0), seed=seed)
    try:
        return next(batches)
    finally:
        batches.close()
