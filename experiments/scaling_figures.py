"""How the study of scaling shows what it has found: a table and a chart."""

import argparse
from dataclasses import dataclass, field

from experiments.scaling_plans import PLANS
from experiments.subjects import SUBJECTS
from jaxdl.commandline.programs import table

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One plan on a number of devices.

    Attributes:
        plan: its name, or its options.
        devices: how many it uses.
        on: the chip, described or at hand.
        batch_size: examples a step, over all devices.
        reason: why it was not measured; what follows is unknown then.
        seconds: of every step that counts.
        reference: of the steps of one device with the same batch, taken in turns with these.
        step_seconds: the median.
        examples_per_second: of the median step.
        speedup: examples per second, in units of the first row's.
        efficiency: speed-up by device.
        overhead: median step in units of the reference's median.
        state_bytes: of the state on each device.
        peak_bytes: the most memory on each device at any time, as the compiler plans it.
        sent: bytes that each device sends in a step, by kind.
        expected: the same by formula, over all kinds.
        exact: whether the compiled program tells what is sent exactly.
        compile_seconds: time that tracing and compiling took.
    """

    plan: str
    devices: int
    on: str
    batch_size: int
    reason: str | None = None
    seconds: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    step_seconds: float | None = None
    examples_per_second: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    overhead: float | None = None
    state_bytes: int | None = None
    peak_bytes: int | None = None
    sent: dict[str, int] | None = None
    expected: int | None = None
    exact: bool = True
    compile_seconds: float | None = None


def figures(arguments: argparse.Namespace, rows: list[Row], *, simulated: bool) -> str:
    """Lays the rows out as text."""

    def shown(value: float | None, unit: float = 1, form: str = ",.2f") -> str:
        return "-" if value is None else format(value / unit, form)

    columns: dict[str, list[str]] = {"plan": [row.plan for row in rows]}
    if len(arguments.on) > 1:
        columns["on"] = [row.on for row in rows]
    columns["devices"] = [f"{row.devices}" for row in rows]
    columns["batch"] = [f"{row.batch_size:,}" for row in rows]
    if not arguments.on:
        columns["ms/step"] = [shown(row.step_seconds, 1e-3, ",.1f") for row in rows]
        columns["examples/s"] = [shown(row.examples_per_second, form=",.1f") for row in rows]
        columns["speed-up"] = [shown(row.speedup) for row in rows]
        columns["efficiency"] = [shown(row.efficiency) for row in rows]
    if simulated:
        columns["x one device"] = [shown(row.overhead) for row in rows]
    columns["state MiB"] = [shown(row.state_bytes, MIB) for row in rows]
    columns["peak MiB"] = [shown(row.peak_bytes, MIB, ",.1f") for row in rows]
    totals = [None if row.sent is None else sum(row.sent.values()) for row in rows]
    marks = ["" if row.exact else "~" for row in rows]
    columns["sent MiB"] = [mark + shown(size, MIB) for mark, size in zip(marks, totals, strict=True)]
    columns["x formula"] = [
        shown(size / row.expected if size is not None and row.expected else None)
        for row, size in zip(rows, totals, strict=True)
    ]
    text = table([*columns], [*zip(*columns.values(), strict=True)])
    remarks = ["", *map(remark, rows)]
    lines = [f"{line}  {last}" for line, last in zip(text.splitlines(), remarks, strict=True)]
    chips = ", ".join(dict.fromkeys(row.on for row in rows))
    title = [f"{SUBJECTS[arguments.subject]}; on {'simulated ' * simulated}{chips}; MiB a device"]
    if simulated:
        title += [
            "The simulated devices share the CPU's cores, so speed-up and efficiency mean little. What",
            "counts is `x one device`, the overhead: step time over that of one device with the same batch.",
        ]
    return "\n".join([*title, *map(str.rstrip, lines)])


def remark(row: Row) -> str:
    """What stands behind a row: what is sent in MiB by kind, or why nothing is."""
    kinds = sorted((row.sent or {}).items(), key=lambda pair: -pair[1])
    return row.reason or " + ".join(f"{kind} {size / MIB:,.2f}" for kind, size in kinds)


def chart(arguments: argparse.Namespace, rows: list[Row], *, simulated: bool) -> None:
    """Draws a line for each plan over the number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    def value(row: Row) -> float | None:
        if arguments.on:
            return None if row.sent is None else sum(row.sent.values()) / MIB
        return row.overhead if simulated else row.efficiency

    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        height = value(row)
        if row.plan != "single" and height is not None:
            # On one device all named plans are the same, so that most have no row for it.
            start = {1: 0.0 if arguments.on else 1.0} if row.plan in PLANS else {}
            lines.setdefault((row.on, row.plan), start)[row.devices] = height
    for place, ((chip, plan), points) in enumerate(lines.items()):
        axis.plot(
            [*points],
            [*points.values()],
            marker="osD^vP*X"[place % 8],
            linestyle="-" if place < 10 else "--",
            label=f"{plan} on {chip}" if len(arguments.on) > 1 else plan,
        )
    axis.set_xscale("log", base=2)
    ticks = sorted({row.devices for row in rows})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel("simulated devices" if simulated else "devices")
    if arguments.on:
        axis.set_ylabel("MiB sent by each device in a step")
    else:
        axis.set_ylabel("step time / one device, same batch" if simulated else "efficiency")
        axis.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axis.set_ylim(bottom=0)
    axis.set_title(SUBJECTS[arguments.subject])
    axis.grid(alpha=0.3)
    if lines:
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))  # beside the lines
    figure.savefig(arguments.chart, dpi=150)
    plt.close(figure)
