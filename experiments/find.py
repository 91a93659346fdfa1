"""Finds a learning rate or a batch size before the long run, with the options of that run.

    python -m experiments.find learning_rate [options below] [options of experiments.resnet50]
    python -m experiments.find batch_size [options below] [options of experiments.resnet50]

`learning_rate` trains a little while the rate grows, and reads the loss. `batch_size` compiles the training
step for one size after the other and compares what it needs with the memory of the device. The answer is
printed, and stored in the directory `find` within --workdir (default: a new runs/find-<time>); that of an
existing run will do.
"""

import argparse
import contextlib
import datetime
import io
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from pydantic import TypeAdapter, ValidationError

from experiments import resnet50
from jaxdl import commandline, environment
from jaxdl.commandline.programs import Parser, leave_after, table, whole_number
from jaxdl.config import ImageConfig
from jaxdl.errors import CheckpointError, ConfigError, DivergedError
from jaxdl.planning.capacity import show_bytes, size_argument
from jaxdl.planning.isolated import Killed, in_own_process

if TYPE_CHECKING:
    from jaxdl.planning.batch_size import Need, Plan, Trial

PROGRAM = "python -m experiments.find"
FINDERS = {
    "learning_rate": """Trains from the run's first state, on its batches and with its optimizer, while the
learning rate grows exponentially (the range test of Smith 2017); ends early where the smoothed loss exceeds 4
times its best. Where the loss falls fastest is the suggestion.

All rates, --from and --to too, are in units of optimizer.learning_rate: stated for a batch of 256 and scaled
to data.batch_size, unless optimizer.scale_with_batch is false. So the suggestion can be passed on as it is,
as the peak of the schedule.""",
    "batch_size": """Compiles the training step for one batch size after the other, allocating no arrays, and
suggests the largest power of two that fits; where data.batch_size does not, also the memory.accumulate with
which it does. Sizes are global, memory is that of each device.""",
}


def main() -> NoReturn:
    """Runs the finder that the arguments name, and leaves with the exit code of the contract."""
    leave_after(_run)


def _run() -> int:
    arguments, options = parse(sys.argv[1:])
    preset = resnet50.PRESETS / "digits.yaml"
    config = commandline.parse(f"{PROGRAM} {arguments.finder}", options, ImageConfig, preset)
    if config.resume:
        raise ConfigError("resume: a finder always begins at the first update; leave it out")
    refuse_second_answer(config, arguments.finder)
    environment.prepare(config.memory.allocator)
    find = find_learning_rate if arguments.finder == "learning_rate" else find_batch_size
    return find(config, arguments)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Sorts the arguments into the finder's own and those of the run.

    Raises:
        ConfigError: one of the finder's own is wrong.
        SystemExit: with code 0 after --help.
    """
    rest = "All options of `python -m experiments.resnet50 --help` may follow; they describe the run."

    parsers = {name: Parser(f"{PROGRAM} {name}", text, rest) for name, text in FINDERS.items()}
    add = parsers["learning_rate"].add_argument
    add("--from", dest="first", type=_rate, default=1e-6, metavar="RATE",
        help="rate of the first update (default: 1e-6)")  # fmt: skip
    add("--to", dest="last", type=_rate, default=10.0, metavar="RATE",
        help="rate of the last update (default: 10)")  # fmt: skip
    add("--updates", type=whole_number(10), default=100, metavar="N",
        help="updates from one to the other (default: %(default)s)")  # fmt: skip
    add = parsers["batch_size"].add_argument
    add("--limit", type=whole_number(1), default=4096, metavar="N",
        help="largest batch to look at (default: %(default)s)")  # fmt: skip
    add("--capacity", type=size_argument, metavar="SIZE",
        help="memory that the program may use on each device, as 16GiB or 16GB, to plan for another device "
        "of the same kind (default: on a GPU the limit that JAX has there, three quarters of it unless "
        "XLA_PYTHON_CLIENT_MEM_FRACTION is set; on a CPU the memory available, shared by simulated devices). "
        "A tenth of it is left free")  # fmt: skip
    add("--trial", type=_truth, default=False, metavar="true|false",
        help="make one real update with the answer, in a process of its own, and go down where it runs out "
        "of memory (default: false)")  # fmt: skip
    if not argv or argv[0] not in (*FINDERS, "-h", "--help"):
        given = f", not {argv[0]}" if argv else ""
        raise ConfigError(f"say first what to find: {' or '.join(FINDERS)}{given} (see {PROGRAM} --help)")
    if argv[0] not in FINDERS:
        top = Parser(PROGRAM, __doc__, rest)
        top.add_argument("finder", choices=list(FINDERS), help="its own options: --help after it")
        top.print_help()
        raise SystemExit(0)
    arguments, options = parsers[argv[0]].parse_known_args(argv[1:])
    if argv[0] == "learning_rate" and arguments.first >= arguments.last:
        raise ConfigError(f"--from {arguments.first:g} must be less than --to {arguments.last:g}")
    arguments.finder = argv[0]
    return arguments, options


def find_learning_rate(config: ImageConfig, arguments: argparse.Namespace) -> int:
    """Makes the range test, prints the curve and the suggestion, and stores both."""
    from jaxdl.data.images.batches import train_batches
    from jaxdl.data.images.sources import open_source
    from jaxdl.optim.schedules import peak_learning_rate
    from jaxdl.train import finders
    from jaxdl.train.loop import put_over
    from jaxdl.train.report import Progress

    environment.compilation_cache()
    progress = Progress()
    source = open_source(config.data, "train")
    task = resnet50.build_task(config, source)
    # What one unit of optimizer.learning_rate comes to for this batch.
    scale = peak_learning_rate(replace(config.optimizer, learning_rate=1.0), config.data.batch_size)
    updates, smoothing = arguments.updates, finders.smoothing_over(arguments.updates)
    program = finders.range_program(
        config,
        task,
        len(source),
        first=arguments.first * scale,
        last=arguments.last * scale,
        updates=updates,
    )
    plan, initial = program.plan, resnet50.initial_values(config, task)
    batches = train_batches(source, config.data, seed=config.seed)
    with contextlib.closing(batches):
        batch = next(batches)
        progress.say(
            f"{config.model.name} on {config.data.name}: {updates} updates of {config.data.batch_size} with "
            f"{config.optimizer.name}, learning rate {arguments.first:g} to {arguments.last:g}; compiling ..."
        )
        state = plan.compile_init(program.init)()
        if initial is not None:
            params, model_state = put_over((state.params, state.model_state), initial)
            state = replace(state, params=params, model_state=model_state)
        curve = finders.range_test(
            plan.compile_train(program.train_step, program.state, batch),
            state,
            map(plan.put, itertools.chain([batch], batches)),
            updates=updates,
            smoothing=smoothing,
            max_skipped=config.precision.max_skipped_updates,
            seen=lambda update, rate, loss: progress.update(
                f"update {update}/{updates}  lr {rate / scale:.3g}  loss {loss:.4f}"
            ),
        )
    rates, losses = [rate / scale for rate, _ in curve], [loss for _, loss in curve]
    smoothed = finders.smoothed(losses, smoothing).tolist()
    suggestion = finders.suggest(rates, losses, smoothing)
    answer = {
        "suggestion": suggestion.steepest,
        "minimum_tenth": suggestion.minimum_tenth,
        "minimum": suggestion.minimum,
        "reason": suggestion.reason,
        "unit": "optimizer.learning_rate",
        "applied_per_unit": scale,
        "from": arguments.first,
        "to": arguments.last,
        "updates": updates,
        "updates_made": len(curve),
        "smoothing": smoothing,
        "learning_rates": rates,
        "losses": losses,
        "smoothed_losses": smoothed,
    }
    shown = sorted({round(i * (len(curve) - 1) / 15) for i in range(16)}) if curve else []
    rows = [
        [f"{i + 1}", f"{rates[i]:.3g}", f"{rates[i] * scale:.3g}", f"{losses[i]:.4f}", f"{smoothed[i]:.4f}"]
        for i in shown
    ]
    progress.say(f"ended after {len(curve)} of {updates} updates")
    print(table(["update", "learning_rate", "applied", "loss", "smoothed"], rows))
    steepest, tenth = suggestion.steepest, suggestion.minimum_tenth
    if steepest is not None and tenth is not None:
        print(
            f"suggestion: --optimizer.learning_rate {steepest:.2g}, where the loss falls fastest\n"
            f"the other rule: {tenth:.2g}, a tenth of the rate at the lowest loss"
        )
        if scale != 1:
            print(
                f"both are for a batch of 256: with data.batch_size {config.data.batch_size} they are "
                f"applied as {steepest * scale:.2g} and {tenth * scale:.2g}"
            )
    stored = store(config, "learning_rate", answer, chart(answer, config))
    print(f"learning_rate.json and learning_rate.png are in {stored}")
    if suggestion.reason is not None:
        raise DivergedError(f"no suggestion: {suggestion.reason} (--from, --to).")
    return 0


def find_batch_size(config: ImageConfig, arguments: argparse.Namespace) -> int:
    """Plans, tries if asked, prints what fits and the suggestion, and stores both."""
    plan = in_own_process(plan_batch_size, config, arguments.limit, arguments.capacity)
    best = plan.best
    trials: list[Trial] = []
    if arguments.trial:
        best, trials = try_downwards(config, plan)
    configured, tried_too_large = plan.configured, [trial.batch for trial in trials if not trial.fits]
    fits = configured.fits and configured.batch < min(tried_too_large, default=math.inf)
    accumulated = None
    if not fits and best is not None:
        micro_batch = best // config.memory.accumulate
        accumulated = in_own_process(plan_accumulation, config, micro_batch, plan.usable)
    answer = {
        "suggestion": best,
        "configured": {"batch_size": configured.batch, "accumulate": configured.accumulate, "fits": fits},
        "accumulate_for_configured": None if accumulated is None else accumulated.accumulate,
        "limit": arguments.limit,
        "devices": plan.devices,
        "device_kind": plan.device_kind,
        "capacity_bytes": plan.capacity,
        "capacity_from": plan.capacity_from,
        "usable_bytes": plan.usable,
        "plans": [asdict(need) for need in [*plan.needs, *([accumulated] if accumulated else [])]],
        "trials": [asdict(trial) for trial in trials],
    }
    print_batch_sizes(plan, trials, best, arguments.limit)
    words = f"data.batch_size {configured.batch}, as configured, "
    if fits:
        print(words + "fits")
    elif accumulated is not None:
        print(
            f"{words}fits with --memory.accumulate {accumulated.accumulate}: the same gradients with "
            f"{show_bytes(accumulated.needed or 0)}"
        )
    elif best is not None:
        print(words + "fits with no memory.accumulate that divides it")
    print(f"batch_size.json is in {store(config, 'batch_size', answer)}")
    if best is None:
        raise ConfigError(
            f"no batch fits, not even one of {plan.candidates[0]}: try --precision.policy bf16, a smaller "
            "data.image_size or model.name, or more devices."
        )
    return 0


def print_batch_sizes(plan: "Plan", trials: "list[Trial]", best: int | None, limit: int) -> None:
    """Prints the table of what fits, and the suggestion."""
    capacity = show_bytes(plan.capacity)
    rows = [
        [
            f"{need.batch:,}",
            f"{need.batch // plan.devices:,}",
            "-" if need.needed is None else show_bytes(need.needed),
            capacity,
            "yes" if need.fits else "no",
        ]
        for need in plan.needs
    ]
    print(table(["batch", "per device", "needed", "capacity", "fits"], rows))
    print(
        f"for each of {plan.devices} x {plan.device_kind}; capacity: {plan.capacity_from}, of which 10 % is "
        f"left free and {show_bytes(plan.usable)} may be planned with"
    )
    for trial in trials:
        whole = ", Python and compiled programs included" if plan.device_kind == "cpu" else ""
        use = f"went through, at most {show_bytes(trial.peak or 0)} in use{whole}"
        how = use if trial.fits else f"does not fit: {trial.reason}"
        print(f"trial with a batch of {trial.batch:,}: {how}")
    if best is not None:
        parts = f" --memory.accumulate {plan.configured.accumulate}" if plan.configured.accumulate > 1 else ""
        print(f"suggestion: --data.batch_size {best}{parts}")
        if best == plan.candidates[-1]:
            print(f"larger ones may fit too: the search ended at --limit {limit}")


def plan_batch_size(config: ImageConfig, limit: int, capacity: int | None) -> "Plan":
    """Searches by compiling; for a process of its own, since it takes the device."""
    from jaxdl.data.images.sources import open_source
    from jaxdl.planning import batch_size
    from jaxdl.train.report import Progress

    environment.compilation_cache()
    source = open_source(config.data, "train")
    task = resnet50.build_task(config, source)
    say = Progress().say
    return batch_size.plan_batch_size(config, task, source, limit=limit, capacity=capacity, say=say)


def plan_accumulation(config: ImageConfig, micro_batch: int, usable: int) -> "Need | None":
    """Searches the number of micro-batches likewise."""
    from jaxdl.data.images.sources import open_source
    from jaxdl.planning import batch_size
    from jaxdl.train.report import Progress

    environment.compilation_cache()
    source = open_source(config.data, "train")
    task = resnet50.build_task(config, source)
    return batch_size.fitting_accumulation(
        config, task, source, micro_batch=micro_batch, usable=usable, say=Progress().say
    )


def try_downwards(config: ImageConfig, plan: "Plan") -> "tuple[int | None, list[Trial]]":
    """Tries the planned batch size, and smaller ones until a step goes through."""
    from jaxdl.planning.batch_size import Trial

    trials = []
    for batch in reversed([size for size in plan.candidates if size <= (plan.best or 0)]):
        print(f"trying a batch of {batch} ...", file=sys.stderr, flush=True)
        try:
            trial = in_own_process(try_batch, config, batch)
        except Killed:
            trial = Trial(batch, False, None, "the process was killed, as happens where memory runs out")
        trials.append(trial)
        if trial.fits:
            return batch, trials
    return None, trials


def try_batch(config: ImageConfig, batch: int) -> "Trial":
    """Makes one real update; for a process of its own."""
    from jaxdl.data.images.sources import open_source
    from jaxdl.planning import batch_size

    environment.compilation_cache()
    source = open_source(config.data, "train")
    return batch_size.try_step(config, resnet50.build_task(config, source), source, batch)


def refuse_second_answer(config: ImageConfig, finder: str) -> None:
    """Sees to it, before anything else is done, that no earlier answer is overwritten.

    Raises:
        ConfigError: the directory holds one.
    """
    if config.workdir is not None and (path := Path(config.workdir) / "find" / f"{finder}.json").exists():
        raise ConfigError(f"workdir: {path} exists already: choose another --workdir.")


def store(config: ImageConfig, finder: str, answer: dict[str, Any], png: bytes | None = None) -> Path:
    """Writes the answer and the configuration that it is for; returns their directory.

    Raises:
        CheckpointError: it cannot be written.
    """
    from jaxdl.train import rundir

    workdir = Path("runs") if config.workdir is None else Path(config.workdir)
    try:
        if config.workdir is None:
            workdir = _new_directory(workdir / f"find-{datetime.datetime.now():%Y%m%d-%H%M%S}")
        directory = workdir / "find"
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = rundir.reason(error, workdir.absolute())
        raise CheckpointError(f"{workdir} cannot be used ({why}): choose another --workdir.") from error
    if png is not None:
        rundir.replace_file(directory / f"{finder}.png", png)
    answer = {"finder": finder, **answer, "config": yaml.safe_load(commandline.run_yaml(config))}
    rundir.write_summary(directory / f"{finder}.json", answer)
    return directory


def _new_directory(wanted: Path) -> Path:
    for attempt in itertools.count(1):
        path = wanted if attempt == 1 else wanted.with_name(f"{wanted.name}-{attempt}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError


def chart(answer: dict[str, Any], config: ImageConfig) -> bytes:
    """Draws loss over learning rate, with the suggestions, as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(answer["learning_rates"], answer["losses"], color="#bbbbbb", lw=0.8, label="loss")
    axis.plot(answer["learning_rates"], answer["smoothed_losses"], color="#4477aa", label="smoothed")
    for key, label, color in (
        ("suggestion", "falls fastest", "#228833"),
        ("minimum_tenth", "a tenth of the lowest", "#ee6677"),
    ):
        if answer[key] is not None:
            axis.axvline(answer[key], color=color, ls="--", label=f"{label}: {answer[key]:.2g}")
    axis.set_xscale("log")
    axis.set_xlim(answer["from"], answer["to"])
    if answer["losses"]:
        # The last updates of a test may tower over all else.
        axis.set_ylim(0, 1.5 * max(answer["smoothed_losses"][: max(len(answer["losses"]) * 3 // 4, 1)]))
    unit = " (for a batch of 256)" if config.optimizer.scale_with_batch else ""
    axis.set_xlabel(f"optimizer.learning_rate{unit}")
    axis.set_title(f"{config.model.name}, {config.data.name}, {config.optimizer.name}")
    axis.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    plt.close(figure)
    return file.getvalue()


def _rate(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (rate := float(text)) < math.inf:
            return rate
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def _truth(text: str) -> bool:
    try:
        return TypeAdapter(bool).validate_python(text)
    except ValidationError:
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false") from None


if __name__ == "__main__":
    main()
