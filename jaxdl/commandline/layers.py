"""Where values come from: YAML files and flags, each read as a layer of plain text."""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import TypeAdapter, ValidationError

from jaxdl.commandline.schema import (
    SECTIONS,
    Entry,
    Layer,
    advice,
    allowed_values,
    did_you_mean,
    nearest,
    options,
)
from jaxdl.config import Config
from jaxdl.errors import CheckpointError, ConfigError

STORED = "config.yaml"
"""Name of the configuration file in a run's directory."""

_LENGTH = ("train.steps", "train.epochs")


def _compose(path: Path) -> yaml.MappingNode | None:
    """Parse a YAML file without converting its scalars; None where it is empty.

    Raises:
        ConfigError: if it cannot be read or is no YAML mapping.
    """
    try:
        root = yaml.compose(path.read_text("utf-8-sig"), Loader=yaml.BaseLoader)
    except FileNotFoundError:
        near = get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], cutoff=0.5)
        raise ConfigError(f"{path}: there is no such file{did_you_mean(near, f'{path.parent}/')}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: the file is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}, line {line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: needs `section:` with indented `key: value` lines below it")
    return root


def _nodes(node: yaml.Node, path: Path, prefix: str = "") -> Iterator[tuple[str, yaml.Node, str]]:
    """Yield the dotted key, value and place of everything in a mapping and its sections."""
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        key = prefix + str(name.value)
        yield key, value, f"{path}, line {name.start_mark.line + 1}: {key}"
        if key in SECTIONS:
            yield from _nodes(value, path, f"{key}.")


def _entry(node: yaml.Node, where: str) -> Entry | None:
    """Return the text of a scalar or of a list of scalars; None where there is more structure."""
    if isinstance(node, yaml.ScalarNode):
        return Entry(node.value or ("" if node.style else "null"), where, bool(node.style))
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return Entry([item.value for item in node.value], where)
    return None


def read_file(path: Path, config: type[Config]) -> tuple[Layer, list[str]]:
    """Return the layer of a YAML file for a kind of configuration, and the problems in it."""
    layer: Layer = {}
    try:
        root = _compose(path)
    except ConfigError as error:
        return layer, [str(error)]
    problems: list[str] = []
    seen: set[str] = set()
    for key, node, where in _nodes(root, path) if root else ():
        entry = _entry(node, where)
        if key in seen:
            problems.append(f"{where} is given twice in this file")
        elif key in SECTIONS:
            if not isinstance(node, yaml.MappingNode) and not (entry and entry.null):
                problems.append(f"{where} is a section: write its keys indented below it")
        elif key not in options(config):
            sections = nearest(key, SECTIONS) if isinstance(node, yaml.MappingNode) else []
            problems.append(f"{where} is unknown{did_you_mean(sections) or advice(config, key)}")
        elif entry is None:
            problems.append(
                f"{where} takes {allowed_values(options(config)[key])}; it has no keys of its own"
            )
        else:
            layer[key] = entry
        seen.add(key)
    return layer, problems


class _Arguments(NamedTuple):
    files: list[Path]
    flags: Layer
    print_config: bool
    problems: list[str]


def scan(argv: Sequence[str], config: type[Config]) -> _Arguments:
    """Sort the arguments. A value that begins with `--` needs the form `--key=VALUE`; the last flag wins."""
    files: list[Path] = []
    flags: Layer = {}
    problems: list[str] = []
    print_config = False
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        flag, equals, value = token.partition("=")
        key = flag.removeprefix("--")
        if not flag.startswith("-"):
            near = [f"--{name}={value}" for name in nearest(flag, options(config))] if equals else []
            near = [f"--config {token}"] if token.endswith((".yaml", ".yml")) else near
            problems.append(f"{token}: options are written --section.key VALUE{did_you_mean(near)}")
        elif flag in ("--print_config", "--help"):
            print_config = True
            problems += [f"{flag} takes no value"] if equals else []
        elif flag == "--config":
            words = [value] if equals else list(takewhile(lambda word: not word.startswith("--"), rest))
            rest = rest if equals else rest[len(words) :]
            files += map(Path, words)
            problems += [] if words else ["--config: name one or more YAML files"]
        else:
            missing = not equals and (not rest or rest[0].startswith("--"))
            value = value if equals or missing else rest.pop(0)
            if not flag.startswith("--") or key not in options(config):
                others = ("config", "print_config", "help")
                problems.append(f"{flag} is unknown{advice(config, key.lstrip('-'), '--', others)}")
            elif missing:
                problems.append(
                    f"{flag}: the value is missing; it takes {allowed_values(options(config)[key])}"
                )
            else:
                flags[key] = Entry(value, flag)
    return _Arguments(files, flags, print_config, problems)


def merge(layers: Iterable[Layer]) -> Layer:
    """Merge left to right; one of train.steps and train.epochs in a layer discards both of earlier ones."""
    merged: Layer = {}
    for layer in layers:
        if any(key in layer and not layer[key].null for key in _LENGTH):
            merged = {key: entry for key, entry in merged.items() if key not in _LENGTH}
        merged |= layer
    return merged


def stored_config(merged: Layer) -> Path | None:
    """Return the configuration file of the run to resume, if that is asked for and there is one.

    Raises:
        CheckpointError: the system does not let one look, so that a new run could not be made there either.
    """
    resume, workdir = merged.get("resume"), merged.get("workdir")
    if resume is None or workdir is None or workdir.null:
        return None
    try:
        wanted = TypeAdapter(bool).validate_python(resume.value)
    except ValidationError:
        return None
    path = Path(str(workdir.value)) / STORED
    try:
        return path if wanted and path.is_file() else None
    except OSError as error:
        raise CheckpointError(
            f"{workdir.value} cannot be used ({error.strerror}): mend that or choose another --workdir."
        ) from None
