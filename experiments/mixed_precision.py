"""Trains one model under several precision policies and compares what each bought.

    python -m experiments.mixed_precision [--policies fp32 bf16 fp16] [--workdir DIRECTORY] [options]

The further options are those of `experiments.resnet50`.

Every policy is a run of `experiments.resnet50` in a process of its own, so that
peak memory is that policy's alone. Without options it trains the digits on a
CPU, and ImageNet's shapes with synthetic data where JAX finds a GPU.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments import resnet50
from experiments.studies import call, new_directory
from jaxdl import commandline
from jaxdl.commandline.programs import Parser, emit, leave_after, table
from jaxdl.config import ImageConfig
from jaxdl.errors import ConfigError

ON_GPU = [
    f"--config={resnet50.PRESETS / 'imagenet.yaml'}",
    "--data.name=synthetic",
    "--train.steps=200",
    "--optimizer.warmup_epochs=0",
]
"""What runs on a GPU when no other options are given."""

COLUMNS = {
    "seconds_per_epoch": "s/epoch",
    "examples_per_second": "examples/s",
    "speedup": "speed-up",
    "peak_memory_mib": "peak MiB",
    "accuracy": "accuracy",
    "skipped_updates": "skipped",
}


def main() -> int:
    """Runs the study."""
    parser = Parser("python -m experiments.mixed_precision", __doc__)
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["fp32", "bf16", "fp16", "bf16_full", "O3"],
        help="policies to compare; speed-ups are relative to the first (default: %(default)s)",
    )
    parser.add_argument("--workdir", type=Path, help="a new directory (default: runs/mixed_precision-<time>)")
    arguments, options = parser.parse_known_args()
    return study(arguments.policies, arguments.workdir, options)


def study(policies: list[str], workdir: Path | None, options: list[str]) -> int:
    """Runs each policy and writes table.txt, table.json and chart.png.

    A policy whose run fails keeps its row, with the exit code in place of figures, and the others go on.

    Args:
        policies: names or custom policies.
        workdir: a directory that must not exist.
        options: options of `experiments.resnet50`.

    Returns:
        The exit code of the first run that failed, or 0.

    Raises:
        ConfigError: an option or a policy is wrong; nothing has run then.
        CheckpointError: the directory cannot be made; likewise.
    """
    if len(set(policies)) < len(policies):
        raise ConfigError(f"--policies {' '.join(policies)}: give each policy once.")
    options = options or (ON_GPU if has_gpu() else [])
    for policy in policies:
        flags = [*options, f"--precision.policy={policy}"]
        commandline.parse("", flags, ImageConfig, resnet50.PRESETS / "digits.yaml")
    workdir = new_directory(workdir, "mixed_precision")
    rows: list[dict[str, Any]] = []
    for policy in policies:
        print(f"== {policy}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "experiments.resnet50", *options]
        directory = workdir / policy.replace(",", "_").replace("=", "-")
        code = call([*command, f"--precision.policy={policy}", f"--workdir={directory}"])
        rows.append({"policy": policy, "exit_code": code} | (measured(directory) if code == 0 else {}))
        rows[-1]["speedup"] = ratio(rows[-1], rows[0])
    text = figures(rows)
    (workdir / "table.txt").write_text(text)
    (workdir / "table.json").write_text(json.dumps(rows, indent=2) + "\n")
    chart(rows, workdir / "chart.png")
    emit(text + f"table.txt, table.json and chart.png are in {workdir}\n")
    return next((int(row["exit_code"]) for row in rows if row["exit_code"] != 0), 0)


def has_gpu() -> bool:
    """Asks JAX in a process of its own, so that this one does not hold the GPU's memory."""
    script = "import jax; print(jax.default_backend())"
    asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return asked.stdout.strip() == "gpu"


def measured(directory: Path) -> dict[str, Any]:
    """Reads the results of a run that is done."""
    summary, lines = directory / "summary.json", directory / "metrics.jsonl"
    values = json.loads(summary.read_text())
    training = [json.loads(line) for line in lines.read_text().splitlines() if '"train"' in line]
    return {
        "examples_per_second": values["examples_per_second"],
        "seconds_per_epoch": values["examples_per_epoch"] / values["examples_per_second"],
        "peak_memory_mib": values["peak_memory_bytes"] / 2**20,
        "accuracy": values["evaluation"]["accuracy"],
        "loss": values["evaluation"]["loss"],
        "skipped_updates": training[-1].get("skipped_updates", 0),
    }


def ratio(row: dict[str, Any], first: dict[str, Any]) -> float | None:
    """Gives a row's throughput in units of the first row's."""
    if "examples_per_second" not in row or "examples_per_second" not in first:
        return None
    return float(row["examples_per_second"] / first["examples_per_second"])


def figures(rows: list[dict[str, Any]]) -> str:
    """Lays the rows out as text."""
    formats = {
        "accuracy": "{:.4f}",
        "speedup": "{:.2f}",
        "peak_memory_mib": "{:,.0f}",
        "skipped_updates": "{:.0f}",
    }
    lines = [
        [
            row["policy"] + ("" if row["exit_code"] == 0 else f" (exit {row['exit_code']})"),
            *(
                formats.get(key, "{:,.1f}").format(row[key]) if row.get(key) is not None else "-"
                for key in COLUMNS
            ),
        ]
        for row in rows
    ]
    return table(["policy", *COLUMNS.values()], lines) + "\n"


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws throughput, peak memory and accuracy as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), layout="constrained")
    shown = [row for row in rows if row["exit_code"] == 0]
    for axis, key in zip(axes, ("examples_per_second", "peak_memory_mib", "accuracy"), strict=True):
        bars = axis.bar([row["policy"] for row in shown], [row[key] for row in shown], color="#4477aa")
        axis.bar_label(bars, fmt="{:.4g}", fontsize=8)
        axis.set_title(COLUMNS[key])
        axis.tick_params(axis="x", rotation=30)
    accuracies = [row["accuracy"] for row in shown]
    if accuracies:
        axes[2].set_ylim(max(0.0, min(accuracies) - 0.05), 1.0)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    leave_after(main)
