"""The text of `--help`: usage, presets, how values are read, exit codes, and every option."""

import json
import re
import shutil
import textwrap
from pathlib import Path

from jaxdl.commandline.layers import read_file
from jaxdl.commandline.schema import allowed_values, options, sections
from jaxdl.config import Config
from jaxdl.errors import EXIT_STOPPED, CheckpointError, ConfigError, DataError, DivergedError


def manual(program: str, config: type[Config], preset: Path | None, description: str) -> str:
    """Write the manual: usage, presets, how values are read, exit codes, and every option."""
    width = min(shutil.get_terminal_size().columns, 100)

    def fill(text: str, indent: int, hang: int = 0) -> str:
        hanging = " " * (indent + hang)
        return textwrap.fill(text, width, initial_indent=" " * indent, subsequent_indent=hanging,
                             break_long_words=False, break_on_hyphens=False)  # fmt: skip

    example = preset or "FILE.yaml"
    parts = [
        f"usage: {program} [--config FILE.yaml ...] [--section.key VALUE ...]",
        fill(description or "Train a network.", 0),
        "  --config FILE.yaml ...  options from YAML files; later files win, and flags win over files\n"
        "  --print_config          print the final configuration and exit; a run stores the same text,\n"
        "                          and --config with it repeats the run (workdir and resume are left out)\n"
        "  --help                  print this text and exit",
        f"examples:\n  {program}\n  {program} --config {example} --train.steps 100\n"
        f"  {program} --optimizer.learning_rate 3e-2 --print_config > my.yaml\n"
        f"  {program} --workdir runs/first --resume true",
    ]
    if preset:
        lines = [f"presets in {preset.parent}:"]
        for path in sorted(preset.parent.glob("*.yaml")):
            chosen = " (used where no --config is given)" if path.name == preset.name else ""
            comments = re.findall(r"(?m)^#+ *(\S.*)", path.read_text("utf-8", errors="replace"))
            lines.append(fill(f"{path.name}{chosen}: {(comments or [''])[0]}", 2, 4))
        parts.append("\n".join(lines))
    parts.append(
        "values:\n" + fill("They read the same in files and in flags: numbers as 10, 1e3 or 1e-4; true, yes, "
        "on, 1 and false, no, off, 0; lists as 2,4 or [2, 4] or (2, 4); null or none for nothing (in a file, "
        "quotes make it text). A flag always has a value, as in --resume true; one that begins with -- is "
        "joined to it, as in --data.dir=--odd; of a flag given twice the last counts. train.steps and "
        "train.epochs replace each other, so either may be set over a file that sets the other.", 2)
    )  # fmt: skip
    codes = {error.exit_code: error.__doc__ for error in (ConfigError, DivergedError, DataError)}
    codes |= {CheckpointError.exit_code: CheckpointError.__doc__}
    codes |= {EXIT_STOPPED: "Stopped by SIGTERM or SIGINT; the same with --resume true goes on."}
    parts.append("exit codes:\n  0   Done.\n" + "\n".join(f"  {code:<3} {codes[code]}" for code in codes))
    in_preset = read_file(preset, config)[0] if preset else {}
    shown = None
    for key, schema in options(config).items():
        section = key.rpartition(".")[0]
        if section != shown:
            shown = section
            parts.append(f"{section}: {sections(config)[section].__doc__}" if section else "the run:")
        default = json.dumps(schema["default"]).strip('"')
        if key in in_preset:
            value = in_preset[key].value
            default = f"{value if isinstance(value, str) else ', '.join(value)} in {preset}, else {default}"
        parts[-1] += "\n" + fill(f"--{key}  {allowed_values(schema)} (default {default})", 2, 8)
        parts[-1] += "\n" + fill(" ".join(schema["description"].split()), 6)
    return "\n\n".join(parts) + "\n"
