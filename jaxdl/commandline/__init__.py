"""The command line: YAML files and flags become one configuration, or one message that says what to change.

    python -m experiments.<name> [--config FILE.yaml ...] [--section.key VALUE ...]

Every source of values is a *layer*: a flat table from dotted key to the text found
there and the place it was found. Layers merge left to right, and only the merged
text is converted, by the field's type in `jaxdl.config`. YAML's own guesses (`no`
is false, `010` is eight, `1e-4` is text) never happen, so a value means the same
in a file and in a flag.

Nothing here imports jax: a bad option is refused before a device is touched.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jaxdl.commandline.dump import config_diff, run_yaml
from jaxdl.commandline.layers import STORED
from jaxdl.commandline.parsing import Made, parse
from jaxdl.commandline.programs import leave_after

__all__ = ["STORED", "config_diff", "main", "parse", "run_yaml"]


def main(
    run: Callable[[Made], int | None],
    *,
    program: str,
    config: type[Made],
    default_preset: Path | None = None,
    description: str = "",
) -> NoReturn:
    """Parse `sys.argv`, call `run`, and leave with the exit code of the contract.

    Args:
        run: The program. What it returns is the exit code (None: 0). It should import jax itself, so
            that a bad option is refused at once.
        program: See `parse`.
        config: See `parse`.
        default_preset: See `parse`.
        description: See `parse`.
    """
    leave_after(lambda: run(parse(program, sys.argv[1:], config, default_preset, description)))
