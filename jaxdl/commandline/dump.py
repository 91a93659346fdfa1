"""From a configuration back to text."""

from dataclasses import asdict
from operator import attrgetter

import yaml

from jaxdl.commandline.schema import NULLS, options
from jaxdl.config import Config


class _Dumper(yaml.SafeDumper):
    """Writes lists in one line, and quotes text that would be read as null."""


def _quote_null(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if value in NULLS else None)


def _one_line(dumper: yaml.SafeDumper, value: tuple[object, ...]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(str, _quote_null)
_Dumper.add_representer(tuple, _one_line)


def run_yaml(config: Config) -> str:
    """Write a configuration as the YAML that repeats the run.

    `workdir` and `resume` are left out: they say where a run lives, not what it
    is, and a repetition must not write into the first run's directory. The text is
    ASCII, so that it survives any locale.
    """
    values = asdict(config)
    del values["workdir"], values["resume"]
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=10**6)


def config_diff(old: Config, new: Config) -> list[tuple[str, object, object]]:
    """List what differs between two configurations of a kind as (dotted key, old value, new value)."""
    pairs = ((key, attrgetter(key)(old), attrgetter(key)(new)) for key in options(type(new)))
    return [(key, before, after) for key, before, after in pairs if before != after]
