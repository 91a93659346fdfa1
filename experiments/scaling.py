"""Measures how a training step scales over plans and numbers of devices: time, memory, bytes moved.

    python -m experiments.scaling [encoder-tiny|resnet50|...] [--plans data fsdp] [--devices 1 2 4 8]
    python -m experiments.scaling encoder-base --on h100x8 [options]

On a CPU the devices that are missing are simulated. They share its cores, so no step gets faster: what
counts there is the overhead, a step's time in units of that of one device with the same batch, which
takes turns with it, step by step. With --on nothing is run: the step is compiled for chips that need
not be there (the extra `plan` brings the compilers).

Plans, besides free ones as data=2,tensor=4 (-1 takes the devices left):
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiments import scaling_plans, subjects
from experiments.scaling_figures import Row, chart, figures
from experiments.scaling_plans import PLANS, PROGRAM, Case, combinations, configuration, prepared
from experiments.subjects import SUBJECTS
from jaxdl import environment
from jaxdl.commandline.programs import Parser, emit, leave_after, refuse_unwritable, whole_number
from jaxdl.config import ParallelConfig
from jaxdl.errors import ConfigError

SIMULATED = 8
"""Devices that a CPU is made to have where none are asked for."""

WARMUP = 2
"""Steps before those that count."""

CHARTS = (".png", ".pdf", ".svg")


def main() -> None:
    """Runs the study."""
    arguments = parse(sys.argv[1:])
    plans = [(text, *scaling_plans.read(text)) for text in dict.fromkeys(arguments.plans)]
    for flag, path in (("--json", arguments.json), ("--chart", arguments.chart)):
        if path is not None:
            if flag == "--chart" and path.suffix not in CHARTS and not path.is_dir():
                raise ConfigError(f"--chart {path}: the name must end in one of {', '.join(CHARTS)}.")
            refuse_unwritable(path, flag)
    chips = settle_devices(arguments, plans)
    cases: list[Case] = []
    for chip, devices in chips.items():
        cases += combinations(arguments, plans, chip, devices)
    simulated = not arguments.on and next(iter(chips.values()))[0].platform == "cpu"
    rows: list[Row] = []
    described = {
        "subject": arguments.subject,
        "fixed": arguments.fixed,
        "batch_size": arguments.batch_size,
        **({"image_size": arguments.image_size} if arguments.subject == "resnet50" else
           {"length": arguments.length}),
        "steps": arguments.steps,
        "simulated": simulated,
    }  # fmt: skip
    for row in study(arguments, cases, simulated=simulated):
        rows.append(row)
        say(row)
        if arguments.json:  # after every row, so that nothing is lost
            text = json.dumps(described | {"rows": [*map(asdict, rows)]}, indent=2)
            arguments.json.write_text(text + "\n")
    emit(figures(arguments, rows, simulated=simulated) + "\n")
    if arguments.chart:
        chart(arguments, rows, simulated=simulated)


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the arguments.

    Raises:
        ConfigError: one of them is wrong.
    """
    listed = "\n".join(f"  {name:16} {text}" for name, (_, text) in PLANS.items())
    parser = Parser(PROGRAM, f"{__doc__}\n{listed}")
    add = parser.add_argument
    add("subject", nargs="?", choices=list(SUBJECTS), default="encoder-tiny",
        help="; ".join(f"{name}: {text}" for name, text in SUBJECTS.items())
        + " (default: %(default)s)")  # fmt: skip
    add("--plans", nargs="+", default=["data", "fsdp", "tensor", "1f1b"], metavar="PLAN",
        help="what to compare (default: data fsdp tensor 1f1b); "
        "on one device, one row stands for all")  # fmt: skip
    add("--devices", nargs="+", type=whole_number(1), metavar="N",
        help="numbers of devices (default: powers of two, on a CPU up to 8)")  # fmt: skip
    add("--batch_size", type=whole_number(1), default=32, metavar="N",
        help="examples a step (default: %(default)s)")  # fmt: skip
    add("--fixed", choices=["batch", "share"], default="batch",
        help="what --batch_size counts, and what stays as devices are added: the whole batch (strong "
        "scaling), or each device's share of it (weak scaling) (default: %(default)s)")  # fmt: skip
    add("--image_size", type=whole_number(32), default=64, metavar="N",
        help="height and width of images (default: %(default)s)")  # fmt: skip
    add("--length", type=whole_number(1), default=128, metavar="N",
        help="words in a sequence (default: %(default)s)")  # fmt: skip
    add("--steps", type=whole_number(1), default=10, metavar="N",
        help="steps that count (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write every single figure there too")
    add("--chart", type=Path, metavar="FILE.png", help="draw a line for each plan there")
    add("--on", nargs="+", default=[], metavar="CHIP", help="only compile, for h100x8, v5e:2x4 or such")
    return parser.parse_args(argv)


def settle_devices(arguments: argparse.Namespace, plans: list[Any]) -> dict[str, list[Any]]:
    """Finds the devices, simulating those that a CPU lacks, and settles `arguments.devices`.

    Returns:
        The devices by the name of the chip.

    Raises:
        ConfigError: more are asked for than there are, or there is no such chip.
    """
    asked = max([*(arguments.devices or []), *(fixed or 1 for *_, fixed in plans)])
    if arguments.on:
        from jaxdl.planning.topology import described_devices

        chips = {chip: described_devices(chip) for chip in arguments.on}
    else:
        # It says nothing about accelerators: where there are some, these are taken.
        given, flags = os.environ.get("JAX_NUM_CPU_DEVICES", "1"), os.environ.get("XLA_FLAGS", "")
        wanted = asked if arguments.devices else max(asked, SIMULATED)
        if "xla_force_host_platform_device_count" not in flags and given.isdecimal():
            os.environ["JAX_NUM_CPU_DEVICES"] = str(max(int(given), wanted))
        environment.prepare("tuned")
        from jaxdl.parallel.mesh import make_mesh

        environment.compilation_cache()
        # All that there are, by how they are linked; any number divides a batch of none.
        devices = list(make_mesh(ParallelConfig(), batch_size=0, accumulate=1).devices.flat)
        chips = {devices[0].device_kind: devices}
    for chip, devices in chips.items():
        if asked > len(devices):
            raise ConfigError(
                f"{asked} devices are asked for, but of {chip} there are {len(devices)}: "
                f"--devices and the product of a plan's axes may be 1 to {len(devices)}."
            )
    return chips


class Trial:
    """A compiled step with its state and a batch."""

    def __init__(self, case: Case) -> None:
        began = time.monotonic()
        self._case, program = case, case.program
        example = case.task.example(case.batch_size)
        self.compiled: Any = program.plan.compile_train(program.train_step, program.state, example)
        self.compile_seconds = time.monotonic() - began
        self._state: Any = None
        self._batch: Any = None

    def start(self) -> None:
        """Makes state and batch, and warms up."""
        plan = self._case.program.plan
        self._state = plan.compile_init(self._case.program.init)()
        self._batch = plan.put(subjects.batch(self._case.task, self._case.batch_size))
        for _ in range(WARMUP):
            self.step()

    def step(self) -> float:
        """Makes an update and waits: many in flight would block simulated devices."""
        import jax

        began = time.perf_counter()
        self._state, metrics = self.compiled(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - began

    def described(self) -> dict[str, Any]:
        """The figures of a row that the compiler and the plan tell."""
        case = self._case
        sent, exact = scaling_plans.sent(case.program, self.compiled)
        return {
            "state_bytes": scaling_plans.state_bytes(case.program.state),
            "peak_bytes": scaling_plans.peak_bytes(case.program, self.compiled),
            "sent": sent,
            "expected": scaling_plans.expected(case.config, case.program, case.task),
            "exact": exact,
            "compile_seconds": self.compile_seconds,
        }


def study(arguments: argparse.Namespace, cases: list[Case], *, simulated: bool) -> Iterator[Row]:
    """Measures every combination in turn."""
    import jax

    first: Row | None = None
    reference: Trial | None = None
    reference_batch = 0
    for case in cases:
        row = Row(case.plan, case.devices, case.on, case.batch_size, case.reason)
        if case.reason is None:
            try:
                if simulated and case is not cases[0] and reference_batch != case.batch_size:
                    reference, reference_batch = alone(arguments, case), case.batch_size
                trial = Trial(case)
                row = replace(row, **trial.described())
                if not arguments.on:
                    row = timed(row, trial, reference, arguments.steps)
                    first = first or row
                    row = compared(row, first)
                if simulated and case is cases[0]:
                    reference, reference_batch = trial, case.batch_size
            # JAX has no error of its own for memory that is used up.
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                row = replace(row, reason=f"out of memory: {str(error).splitlines()[0]}")
        yield row


def alone(arguments: argparse.Namespace, case: Case) -> Trial:
    """One device with the whole batch of a case."""
    config = configuration(arguments, case.batch_size, ["--parallel.data=1"])
    device = case.program.plan.mesh.devices.flat[0]
    task, program = prepared(arguments, config, [device])
    trial = Trial(replace(case, config=config, task=task, program=program))
    trial.start()
    return trial


def timed(row: Row, trial: Trial, reference: Trial | None, steps: int) -> Row:
    """Measures steps, in turns with any reference, so that other work on the machine meets both."""
    trial.start()
    seconds: list[float] = []
    others: list[float] = []
    for _ in range(steps):
        if reference is not None:
            others.append(reference.step())
        seconds.append(trial.step())
    return replace(row, seconds=seconds, reference=others, step_seconds=statistics.median(seconds))


def compared(row: Row, first: Row) -> Row:
    """Relates a row's times to the first row's and to its reference's."""
    assert row.step_seconds is not None
    assert first.step_seconds is not None
    rate = row.batch_size / row.step_seconds
    speedup = rate / (first.batch_size / first.step_seconds)
    return replace(
        row,
        examples_per_second=rate,
        speedup=speedup,
        efficiency=speedup / row.devices,
        overhead=row.step_seconds / statistics.median(row.reference) if row.reference else None,
    )


def say(row: Row) -> None:
    """Tells how far it is; the results go to the standard output."""
    text = row.reason or f"compiled in {row.compile_seconds:.1f} s"
    if row.step_seconds is not None:
        text += f", {1000 * row.step_seconds:.1f} ms a step"
    if row.overhead is not None:
        text += f", {row.overhead:.2f} x one device"
    print(f"{row.plan} on {row.devices} x {row.on}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave_after(main)
