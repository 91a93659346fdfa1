"""Writes any source of images as a TFDS data set: in a few large files rather than many small ones.

    python -m experiments.prepare --to DIRECTORY [--as NAME] [--size N] [options below] [--data.* options]

The --data.* options of experiments.resnet50 name the source: --data.name, .dir, .dataset, .train_split,
.eval_split, .on_bad, .max_bad and the synthetic ones. The data set is afterwards read by

    --data.name tfds --data.dataset NAME --data.dir DIRECTORY

and by any other program that uses TFDS or Grain: its files are in the array_record format. If the program is
ended before its time, the same command goes on where it was.
"""

import argparse
import os
import re
import sys
from pathlib import Path

from experiments import resnet50
from jaxdl import commandline
from jaxdl.commandline.programs import Parser, emit, leave_after, whole_number
from jaxdl.config import ImageConfig
from jaxdl.errors import ConfigError

PROGRAM = "python -m experiments.prepare"


def main() -> None:
    """Prepares a data set, or reads one back."""
    arguments, options = parse(sys.argv[1:])
    config = commandline.parse(PROGRAM, options, ImageConfig, resnet50.PRESETS / "digits.yaml")
    # Imported only now: a wrong argument should be refused at once.
    from jaxdl.data.files import printable
    from jaxdl.data.images.prepare import Plan, prepare, verify

    root = Path(os.path.expanduser(arguments.to))  # noqa: PTH111 - leaves a ~user that does not exist
    try:
        os.fspath(root).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"--to {printable(root)} is not UTF-8, as the writer needs: choose another"
        ) from None
    plan = Plan(config.data, root, arguments.name, arguments.size, arguments.quality, arguments.shard_size)
    if arguments.verify:
        examples = verify(plan.directory, arguments.processes, say)
        emit(f"{plan.directory} is sound: {examples:,} examples\n")
        return
    made = prepare(plan, arguments.processes, say)
    skipped = [message for contents in made.values() for each in contents for message in each.skipped]
    if skipped:
        say("\n  ".join([f"left out {len(skipped):,} images:", *skipped]))
    train, held_out = (sum(each.examples for each in contents) for contents in made.values())
    emit(
        f"{plan.directory} has {train:,} examples for training and {held_out:,} for evaluation; read it by\n"
        f"  --data.name tfds --data.dataset {plan.name} --data.dir {plan.root}\n"
    )


def say(line: str) -> None:
    """Prints a line about the progress."""
    print(line, file=sys.stderr, flush=True)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Sorts the arguments into the program's own and those of the source.

    Raises:
        ConfigError: one of the program's own is wrong.
    """
    parser = Parser(
        PROGRAM, __doc__, "`python -m experiments.resnet50 --help` explains the --data.* options."
    )
    add = parser.add_argument
    add("--to", required=True, metavar="DIRECTORY",
        help="data directory; the data set goes to DIRECTORY/NAME/1.0.0")  # fmt: skip
    add("--as", dest="name", type=_name, default="images", metavar="NAME",
        help="the data set's name (default: %(default)s)")  # fmt: skip
    add("--size", type=whole_number(1), metavar="N",
        help="store JPEG files with a shorter side of N pixels, smaller images as large as they are "
        "(default: store the files as they are)")  # fmt: skip
    add("--quality", type=whole_number(1), default=95, metavar="N",
        help="of those JPEG files, up to 100 (default: %(default)s)")  # fmt: skip
    add("--shard_size", type=whole_number(1), default=1280, metavar="N",
        help="examples in a shard (default: %(default)s, 1,001 shards of ImageNet)")  # fmt: skip
    add("--processes", type=whole_number(1), default=len(os.sched_getaffinity(0)), metavar="N",
        help="how many work at once; the result is the same (default: one for each core)")  # fmt: skip
    add("--verify", action="store_true",
        help="prepare nothing, but read back what is there: every record is decoded, every digest "
        "compared; of the other options only --to, --as and --processes count")  # fmt: skip
    arguments, options = parser.parse_known_args(argv)
    if arguments.quality > 100:
        raise ConfigError(f"--quality {arguments.quality} is more than 100")
    return arguments, options


def _name(text: str) -> str:
    if re.fullmatch("[a-z][a-z0-9_]*", text):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a name of lower-case letters, digits and underscores that begins with a letter"
    )


if __name__ == "__main__":
    leave_after(main)
