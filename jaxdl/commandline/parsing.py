"""From a program's arguments to its configuration, or to one message that says what to change."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from jaxdl.commandline.dump import run_yaml
from jaxdl.commandline.layers import merge, read_file, scan, stored_config
from jaxdl.commandline.manual import manual
from jaxdl.commandline.programs import emit
from jaxdl.commandline.schema import (
    SECTIONS,
    Layer,
    allowed_values,
    as_values,
    choices_of,
    did_you_mean,
    kind_of,
    options,
)
from jaxdl.config import Config
from jaxdl.errors import ConfigError

Made = TypeVar("Made", bound=Config)


def _validate(merged: Layer, problems: Sequence[str], config: type[Made]) -> Made:
    """Convert the merged text.

    Args:
        merged: Every given key.
        problems: What is wrong already. Fields are then still checked, but not against each other.

    Raises:
        ConfigError: with all the problems, old and new.
    """
    values: dict[str, Any] = {}
    for key, entry in merged.items():
        section, _, leaf = key.rpartition(".")
        (values.setdefault(section, {}) if section else values)[leaf] = as_values(entry, options(config)[key])
    found = list(problems)
    try:
        made = TypeAdapter(config).validate_python(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            if detail["type"] != "value_error":
                found.append(_field_problem(detail, merged, config))
            elif not problems:
                lines = str(detail["ctx"]["error"]).splitlines()
                found += [line + _sources(line, merged) for line in lines]
    else:
        if not found:
            return made
    raise ConfigError(found[0] if len(found) == 1 else "\n  ".join([f"{len(found)} problems:", *found]))


def _field_problem(detail: Mapping[str, Any], merged: Layer, config: type[Config]) -> str:
    """Say what is wrong with one value: where it stands, what it is and what was allowed."""
    location, value = detail["loc"], detail["input"]
    key = ".".join(location[:2]) if location[0] in SECTIONS else location[0]
    schema = options(config)[key]
    if isinstance(location[-1], int):  # one item of a list
        schema = kind_of(schema)["items"]
    allowed = allowed_values(schema)
    if detail["type"] == "finite_number":
        allowed = allowed.replace("a number", "a finite number", 1)
    hint = did_you_mean(get_close_matches(str(value).lower(), choices_of(schema), n=1, cutoff=0.5))
    return f"{merged[key].where}: {'null' if value is None else repr(value)} is not {allowed}{hint}"


def _sources(sentence: str, merged: Layer) -> str:
    """Say where the keys that a sentence names were set, so that the reader knows what to edit."""
    keys = dict.fromkeys(re.findall(r"[a-z]+(?:\.[a-z_]+)?", sentence))
    places = [merged[key].where for key in keys if key in merged]
    return f" (set by {' and '.join(places)})" if places else ""


def parse(
    program: str,
    argv: Sequence[str],
    config: type[Made],
    default_preset: Path | None = None,
    description: str = "",
) -> Made:
    """Turn a program's arguments into its configuration.

    The layers, each winning over those before it: the defaults in `jaxdl.config`;
    `default_preset` where no --config is given; the --config files in their order;
    the flags. With `resume` true and a stored configuration in `workdir`, that one
    takes the place of the preset, so the run goes on as it was started.

    Args:
        program: The command as a person types it, for the help.
        argv: The arguments after it.
        config: The kind of configuration.
        default_preset: YAML file to start from; the presets beside it are listed in the help.
        description: What the program does, for the help.

    Raises:
        ConfigError: with everything that is wrong.
        CheckpointError: the directory to resume in cannot be looked into, or what --help or --print_config
            print cannot be written.
        SystemExit: with code 0 after --help or --print_config.
    """
    preset = default_preset
    if preset and preset.is_relative_to(Path.cwd()):
        preset = preset.relative_to(Path.cwd())
    if "--help" in argv or "-h" in argv:
        emit(manual(program, config, preset, description))
        raise SystemExit(0)
    arguments = scan(argv, config)
    base = [read_file(preset, config)] if preset and not arguments.files else []
    given = [*(read_file(path, config) for path in arguments.files), (arguments.flags, arguments.problems)]
    merged = merge(layer for layer, _ in base + given)
    if stored := stored_config(merged):
        base = [read_file(stored, config), ({key: merged[key] for key in ("workdir", "resume")}, [])]
        merged = merge(layer for layer, _ in base + given)
    made = _validate(merged, [problem for _, problems in base + given for problem in problems], config)
    if arguments.print_config:
        emit(run_yaml(made))
        raise SystemExit(0)
    return made
