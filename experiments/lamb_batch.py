"""Trains one BERT with small and large batches, with AdamW and LAMB, on equally many examples.

    python -m experiments.lamb_batch [--batch_sizes 64 512] [--examples 131072] [--rates 0.5 1 2] [options]

The further options are those of `experiments.bert`; without --config it trains configs/bert/lamb_batch.yaml.

Every combination is a run of `experiments.bert`. Learning rates grow with the square root of the batch,
as LAMB's authors let them (You et al. 2019, https://arxiv.org/abs/1904.00962), from one for the first
batch size; each is tried with several factors, and the best run of each batch and optimizer counts, so
that neither is judged by a rate that suits the other. A tenth of the updates is warm-up.
"""

import argparse
import json
import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

from experiments import bert
from experiments.studies import call, new_directory
from jaxdl import commandline
from jaxdl.commandline.programs import Parser, emit, leave_after, table, whole_number
from jaxdl.config import BertConfig
from jaxdl.errors import ConfigError

PROGRAM = "python -m experiments.lamb_batch"
RATES = {"adamw": 2e-3, "lamb": 1e-2}
"""Learning rate of each optimizer for the first batch size."""


def main() -> int:
    """Runs the study."""
    parser = Parser(PROGRAM, __doc__)
    parser.add_argument("--batch_sizes", type=whole_number(1), nargs="+", default=[64, 512], metavar="N",
                        help="examples per update (default: 64 512)")  # fmt: skip
    parser.add_argument("--examples", type=whole_number(1), default=131_072, metavar="N",
                        help="examples that each run sees (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rates", type=factor, nargs="+", default=[0.5, 1.0, 2.0], metavar="X",
                        help="factors of the learning rates to try (default: 0.5 1 2)")  # fmt: skip
    parser.add_argument("--workdir", type=Path, help="a new directory (default: runs/lamb_batch-<time>)")
    arguments, options = parser.parse_known_args()
    return study(arguments, options)


def factor(text: str) -> float:
    """Reads a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def study(arguments: argparse.Namespace, options: list[str]) -> int:
    """Runs all combinations and writes table.txt, table.json and chart.png.

    Returns:
        The exit code of the first run that failed, or 0. A run that diverged is a result, not a failure.

    Raises:
        ConfigError: an option is wrong; nothing has run then.
        CheckpointError: the directory cannot be made; likewise.
    """
    if not any(option.startswith("--config") for option in options):
        options = [f"--config={bert.PRESETS / 'lamb_batch.yaml'}", *options]
    few = [size for size in arguments.batch_sizes if arguments.examples // size < 10]
    if few:
        raise ConfigError(
            f"--examples {arguments.examples} are fewer than 10 updates of --batch_sizes {few[0]}: take more"
        )
    runs = [
        (optimizer, batch, rate, flags(arguments, optimizer, batch, rate))
        for batch, optimizer, rate in product(arguments.batch_sizes, RATES, arguments.rates)
    ]
    for *_, own in runs:
        commandline.parse(PROGRAM, [*options, *own], BertConfig)
    workdir = new_directory(arguments.workdir, "lamb_batch")
    rows: list[dict[str, Any]] = []
    for number, (optimizer, batch, rate, own) in enumerate(runs, 1):
        print(
            f"== {number}/{len(runs)}: {optimizer}, batch {batch}, rate x {rate:g}",
            file=sys.stderr,
            flush=True,
        )
        directory = workdir / f"{optimizer}-{batch}-{rate:g}"
        code = call([sys.executable, "-m", "experiments.bert", *options, *own, f"--workdir={directory}"])
        if code == 75:
            return code
        row = {
            "optimizer": optimizer,
            "batch_size": batch,
            "updates": arguments.examples // batch,
            "learning_rate": learning_rate(arguments, optimizer, batch, rate),
            "exit_code": code,
        }
        rows.append(row | (measured(directory) if code == 0 else {}))
    text = figures(rows)
    (workdir / "table.txt").write_text(text)
    (workdir / "table.json").write_text(json.dumps(rows, indent=2) + "\n")
    chart(rows, workdir / "chart.png")
    emit(text + f"table.txt, table.json and chart.png are in {workdir}\n")
    return next((int(row["exit_code"]) for row in rows if row["exit_code"] not in (0, 3)), 0)


def learning_rate(arguments: argparse.Namespace, optimizer: str, batch: int, rate: float) -> float:
    """Gives the learning rate of a run."""
    return float(RATES[optimizer] * rate * math.sqrt(batch / arguments.batch_sizes[0]))


def flags(arguments: argparse.Namespace, optimizer: str, batch: int, rate: float) -> list[str]:
    """Gives the options of `experiments.bert` that make a run what it is."""
    updates = arguments.examples // batch
    return [
        f"--optimizer.name={optimizer}",
        f"--optimizer.learning_rate={learning_rate(arguments, optimizer, batch, rate)!r}",
        "--optimizer.scale_with_batch=false",
        f"--optimizer.warmup_steps={updates // 10}",
        f"--data.batch_size={batch}",
        f"--train.steps={updates}",
        f"--train.log_every={max(updates // 16, 1)}",
    ]


def measured(directory: Path) -> dict[str, Any]:
    """Reads the results of a run that is done."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    evaluation = next(line for line in reversed(lines) if line["split"] == "eval")
    return {
        "loss": float(evaluation["loss"]),
        "accuracy": float(evaluation["accuracy"]),
        "unigram_accuracy": evaluation["unigram_accuracy"],
        "curve": [(line["step"], float(line["loss"])) for line in lines if line["split"] == "train"],
    }


def best_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keeps of each optimizer and batch size the run with the lowest loss."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        key = (row["optimizer"], row["batch_size"])
        if row.get("loss", math.inf) < best.get(key, {}).get("loss", math.inf):
            best[key] = row
    return list(best.values())


def figures(rows: list[dict[str, Any]]) -> str:
    """Lays all runs out as text, the best of each optimizer and batch marked."""
    best = best_of(rows)
    head = ["optimizer", "batch", "updates", "learning rate", "eval loss", "masked accuracy", ""]
    lines = []
    for row in rows:
        done = row["exit_code"] == 0
        shown = (
            [f"{row['loss']:.4f}", f"{row['accuracy']:.4f}"] if done else [f"exit {row['exit_code']}", "-"]
        )
        rate = f"{row['learning_rate']:.3g}"
        mark = "best" if any(row is each for each in best) else ""
        lines.append([row["optimizer"], str(row["batch_size"]), str(row["updates"]), rate, *shown, mark])
    text = table(head, lines) + "\n"
    if best:
        text += f"the most frequent word alone: masked accuracy {best[0]['unigram_accuracy']:.4f}\n"
    return text


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the training loss of the best runs over the examples seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for row in best_of(rows):
        steps, losses = zip(*row["curve"], strict=True)
        label = f"{row['optimizer']}, batch {row['batch_size']}"
        axis.plot([step * row["batch_size"] for step in steps], losses, label=label)
    axis.set_xlabel("examples")
    axis.set_ylabel("training loss")
    axis.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    leave_after(main)
