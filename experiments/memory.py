"""Compiles a training step under each precision, rematerialisation and accumulation, and says what it needs.

    python -m experiments.memory resnet50|encoder-base|encoder-large [--on h100] [options]

Nothing is trained and no array is made: the compiler tells. With --on, the step is compiled for a chip that
need not be there (the extra `plan` brings the compilers); without, for the devices at hand. XLA's compiler
for CPUs plans memory otherwise than those for accelerators, so its temporaries say nothing about theirs.
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
from jaxdl.config import Config

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
    add("--unrolled", action="store_true", help="compile an encoder's layers one by one, not as a loop")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(argv)


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
) -> Config:
    """One combination as a run's configuration, checked as any other.

    Raises:
        ConfigError: a value is wrong.
    """
    optimizer = "sgd" if arguments.subject == "resnet50" else "adamw"
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
    return commandline.parse(PROGRAM, options, None)


if __name__ == "__main__":
    leave_after(main)
