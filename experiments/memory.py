"""Compiles a training step under each precision, rematerialisation and accumulation, and says what it needs.

    python -m experiments.memory resnet50|encoder-base|bert-large|... [--on h100x8] [--largest] [options]

Nothing is trained and no array is made: the compiler tells. With --on, the step is compiled for a chip that
need not be there (the extra `plan` brings the compilers); without, for the devices at hand. XLA's compiler
for CPUs plans memory otherwise than those for accelerators, so its temporaries say nothing about theirs.

With --largest it finds for each combination the largest batch that fits, by --step examples a device. Whether
it does, the compiler of a TPU says; of a GPU it is an estimate: a tenth less than the share of its
memory that JAX takes.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from experiments import subjects
from experiments.subjects import SUBJECTS
from jaxdl import commandline
from jaxdl.commandline.programs import Parser, emit, leave_after, refuse_unwritable, table, whole_number
from jaxdl.config import ImageConfig
from jaxdl.planning.capacity import MARGIN, show_bytes, size_argument
from jaxdl.planning.largest import largest_that_fits

PROGRAM = "python -m experiments.memory"
MIB = 2**20


@dataclass(frozen=True)
class Need:
    """What one step needs of each device, in bytes.

    Attributes:
        policy: precision policy.
        remat: what is kept for the backward pass.
        accumulate: micro-batches.
        offload: what is held in the host's memory.
        arguments: state and batch.
        temporaries: what the step needs beside them.
        peak: the most at any time, arguments included.
        host: arguments and temporaries in the host's memory.
        compile_seconds: time that tracing and compiling took.
    """

    policy: str
    remat: str
    accumulate: int
    offload: str
    arguments: int
    temporaries: int
    peak: int
    host: int
    compile_seconds: float


def main() -> None:
    """Runs the study."""
    arguments = parse(sys.argv[1:])
    if file := arguments.json:
        refuse_unwritable(file)
    if arguments.largest:
        emit(largest(arguments))
        return
    needs = []
    for need in study(arguments):
        needs.append(need)
        print(f"compiled {need.policy} {need.remat} in {need.compile_seconds:.0f} s", file=sys.stderr)
    chip = arguments.on or "this machine"
    title = f"{SUBJECTS[arguments.subject]}; batch {arguments.batch_size}, compiled for {chip}; MiB a device"
    head = ["policy", "remat", "accumulate", "offload", "arguments", "temporaries", "peak", "host", "x peak"]
    rows = [
        [
            *(need.policy, need.remat, need.accumulate, need.offload),
            *(f"{size / MIB:,.0f}" for size in (need.arguments, need.temporaries, need.peak, need.host)),
            f"{need.peak / needs[0].peak:.2f}",
        ]
        for need in needs
    ]
    if on_cpu(arguments):
        title += "\nA CPU's compiler plans memory in its own way: for an accelerator's, name one with --on."
    emit(f"{title}\n{table(head, rows)}\n")
    if file:
        described = {"subject": arguments.subject, "on": arguments.on, "batch_size": arguments.batch_size}
        file.write_text(json.dumps(described | {"needs": [*map(asdict, needs)]}, indent=2) + "\n")


def on_cpu(arguments: argparse.Namespace) -> bool:
    """Whether the figures are those of a CPU's compiler."""
    import jax

    return arguments.on is None and jax.default_backend() == "cpu"


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the arguments.

    Raises:
        ConfigError: one of them is wrong.
    """
    parser = Parser(PROGRAM, __doc__)
    add = parser.add_argument
    add(
        "subject",
        choices=list(SUBJECTS),
        help="; ".join(f"{name}: {text}" for name, text in SUBJECTS.items()),
    )
    add("--on", metavar="CHIP", help="as h100, h100x8, v5e:2x4 (default: the devices at hand)")
    add("--batch_size", type=whole_number(1), default=32, metavar="N",
        help="examples per update, over all devices (default: %(default)s)")  # fmt: skip
    add("--image_size", type=whole_number(32), default=224, metavar="N",
        help="height and width of images (default: %(default)s)")  # fmt: skip
    add("--length", type=whole_number(1), default=512, metavar="N",
        help="words in a sequence (default: %(default)s)")  # fmt: skip
    add("--policies", nargs="+", default=["fp32"], metavar="POLICY",
        help="values of precision.policy to compare (default: fp32)")  # fmt: skip
    add("--remat", nargs="+", default=["none", "dots", "blocks", "full"], metavar="LEVEL",
        help="values of memory.remat to compare (default: none dots blocks full)")  # fmt: skip
    add("--accumulate", nargs="+", type=whole_number(1), default=[1], metavar="N",
        help="values of memory.accumulate to compare (default: 1)")  # fmt: skip
    add("--offload", nargs="+", default=["none"], metavar="WHAT",
        help="values of memory.offload to compare (default: none); the compilers of GPUs that are not there "
        "count an optimizer's state as the device's even so")  # fmt: skip
    add("--largest", action="store_true", help="find the largest batch that fits of each combination")
    add("--step", type=whole_number(1), default=8, metavar="N",
        help="with --largest: examples on each device by which it goes (default: %(default)s)")  # fmt: skip
    add("--capacity", type=size_argument, metavar="SIZE",
        help="with --largest: memory of a device, as 80GB (default: as described)")  # fmt: skip
    add("--unrolled", action="store_true", help="compile an encoder's layers one by one, not as a loop")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(argv)


def largest(arguments: argparse.Namespace) -> str:
    """Finds the largest batch that fits of every combination, and writes the table of them."""
    combinations = list(product(arguments.policies, arguments.remat, arguments.accumulate, arguments.offload))
    for each in combinations:
        configuration(arguments, *each)

    # JAX is imported only now: a wrong argument should be refused at once.
    import jax

    from jaxdl.planning.capacity import device_capacity
    from jaxdl.planning.topology import described_devices, described_memory

    devices = None if arguments.on is None else described_devices(arguments.on)
    capacity = arguments.capacity or (arguments.on and described_memory(arguments.on))
    if capacity is None and devices is None:
        capacity, _ = device_capacity(jax.local_devices())
    refuses = devices is not None and devices[0].platform == "tpu" and not arguments.capacity
    usable = None if refuses or not capacity else round(capacity * (1 - MARGIN))
    count = len(devices or jax.devices())
    rows, found = [], []
    for each in combinations:
        sizes: dict[int, int | None] = {}

        def needed(batch: int, each: Any = each, sizes: Any = sizes) -> int | None:
            sizes[batch] = answer = bytes_of(arguments, each, batch, devices)
            shown = "does not fit" if answer is None else f"needs {show_bytes(answer)}"
            print(f"{' '.join(map(str, each))}: batch {batch} {shown}", file=sys.stderr, flush=True)
            return answer

        best = largest_that_fits(needed, unit=arguments.step * count * each[2], usable=usable, hint=capacity)
        shown = (
            [f"{best:,}", f"{best // count:,}", show_bytes(sizes[best] or 0)] if best else ["none", "", ""]
        )
        rows.append([*map(str, each), *shown])
        found.append([*each, best, {str(batch): size for batch, size in sizes.items()}])
    if arguments.json:
        described = {"subject": arguments.subject, "on": arguments.on, "usable": usable, "largest": found}
        arguments.json.write_text(json.dumps(described, indent=2) + "\n")
    limit = f"an estimate of {show_bytes(usable)} a device" if usable else "what the compiler takes"
    head = ["policy", "remat", "accumulate", "offload", "largest batch", "a device", "needs of each"]
    title = f"{SUBJECTS[arguments.subject]}; {arguments.length} words; compiled for {arguments.on or 'here'}"
    return f"{title}; the limit is {limit}\n{table(head, rows)}\n"


def bytes_of(
    arguments: argparse.Namespace, combination: tuple[str, str, int, str], batch: int, devices: Any
) -> int | None:
    """Compiles a combination for a batch and asks what a device needs; None if the compiler refuses it."""
    import jax

    from jaxdl.planning.batch_size import out_of_memory, step_bytes
    from jaxdl.train.program import prepare

    config = configuration(argparse.Namespace(**vars(arguments) | {"batch_size": batch}), *combination)
    task = subjects.build(arguments.subject, config, length=arguments.length, scan=not arguments.unrolled)
    program = prepare(config, task, config.data.synthetic_examples, devices=devices)
    try:
        compiled: Any = program.plan.compile_train(program.train_step, program.state, task.example(batch))
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        return None
    return step_bytes(compiled.memory_analysis())


def study(arguments: argparse.Namespace) -> Iterator[Need]:
    """Compiles every combination in turn; all are checked before the first is compiled."""
    combinations = product(arguments.policies, arguments.remat, arguments.accumulate, arguments.offload)
    configs = [configuration(arguments, *each) for each in combinations]

    # JAX is imported only now: a wrong argument should be refused at once.
    from jaxdl.planning.topology import described_devices
    from jaxdl.train.program import prepare

    devices = None if arguments.on is None else described_devices(arguments.on)
    tasks = [
        subjects.build(arguments.subject, config, length=arguments.length, scan=not arguments.unrolled)
        for config in configs
    ]
    programs = [
        prepare(config, task, config.data.synthetic_examples, devices=devices)
        for config, task in zip(configs, tasks, strict=True)
    ]
    for config, program, task in zip(configs, programs, tasks, strict=True):
        batch = task.example(config.data.batch_size)
        began = time.monotonic()
        compiled: Any = program.plan.compile_train(program.train_step, program.state, batch)
        analysis = compiled.memory_analysis()
        yield Need(
            policy=config.precision.policy,
            remat=config.memory.remat,
            accumulate=config.memory.accumulate,
            offload=config.memory.offload,
            arguments=analysis.argument_size_in_bytes,
            temporaries=analysis.temp_size_in_bytes,
            peak=analysis.peak_memory_in_bytes,
            host=analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes,
            compile_seconds=time.monotonic() - began,
        )


def configuration(
    arguments: argparse.Namespace, policy: str, remat: str, accumulate: int, offload: str
) -> ImageConfig:
    """One combination as a run's configuration, checked as any other.

    Raises:
        ConfigError: a value is wrong.
    """
    optimizer = subjects.OPTIMIZERS.get(arguments.subject, "adamw")
    options = [
        *("--data.name=synthetic", "--train.steps=1", "--optimizer.warmup_epochs=0"),
        f"--optimizer.name={optimizer}",
        f"--data.batch_size={arguments.batch_size}",
        f"--data.image_size={arguments.image_size}",
        f"--precision.policy={policy}",
        f"--memory.remat={remat}",
        f"--memory.accumulate={accumulate}",
        f"--memory.offload={offload}",
    ]
    return commandline.parse(PROGRAM, options, ImageConfig)


if __name__ == "__main__":
    leave_after(main)
