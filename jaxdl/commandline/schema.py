"""What options there are, and how to speak of them: all of it read off `jaxdl.config`."""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import SequenceMatcher
from functools import cache
from typing import Any, cast

from pydantic import TypeAdapter

from jaxdl.config import Config

NULLS = ("null", "Null", "NULL", "None", "none", "~")
SECTIONS = tuple(f.name for f in fields(Config) if isinstance(f.type, type) and is_dataclass(f.type))
"""Names of the sections of every configuration."""


@dataclass(frozen=True)
class Entry:
    """What one layer says about one key: its text, and where it stands."""

    value: str | list[str]
    where: str
    quoted: bool = False

    @property
    def null(self) -> bool:
        """Whether the text is a null word that no YAML quotes protect."""
        return self.value in NULLS and not self.quoted


Layer = dict[str, Entry]


def sections(config: type[Config]) -> dict[str, Any]:
    """Return the dataclass of every section by its name."""
    types = {field.name: field.type for field in fields(config)}
    return {name: types[name] for name in SECTIONS}


def options(config: type[Config]) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of every option by its dotted key, in the order of the fields."""
    return _options(cast(Hashable, config))


@cache
def _options(config: Any) -> dict[str, dict[str, Any]]:
    top = _properties(config)
    inner = {name: _properties(section) for name, section in sections(config).items()}
    options = {f"{name}.{key}": schema for name, keys in inner.items() for key, schema in keys.items()}
    return options | {key: schema for key, schema in top.items() if key not in SECTIONS}


def _properties(dataclass: Any) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each field; a field that is inherited has its text below it in the base."""
    properties: dict[str, dict[str, Any]] = {}
    for base in reversed(dataclass.__mro__):
        if is_dataclass(base):
            for name, schema in TypeAdapter(base).json_schema()["properties"].items():
                properties[name] = {"description": properties.get(name, {}).get("description")} | schema
    return properties


def kind_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema without its `or null`."""
    return next(kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null")


def choices_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the words an option takes, if it takes a fixed set of them."""
    kind = kind_of(schema)
    return kind.get("enum") or ([kind["const"]] if "const" in kind else [])


def allowed_values(schema: Mapping[str, Any]) -> str:
    """Say in words which values an option takes."""
    kind = kind_of(schema)
    if choices := choices_of(schema):
        words = "one of " + ", ".join(choices)
    elif kind["type"] == "array":
        words = f"a list as 2,4 or [2, 4], each {allowed_values(kind['items'])}"
    else:
        names = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
        bounds = {"exclusiveMinimum": "above", "minimum": "of at least"}
        bounds |= {"exclusiveMaximum": "below", "maximum": "at most"}
        limits = [f"{word} {kind[bound]:.10g}" for bound, word in bounds.items() if bound in kind]
        words = f"{names.get(kind['type'], 'text')} {' and '.join(limits)}".strip()
    return f"{words}, or null" if "anyOf" in schema else words


def as_values(entry: Entry, schema: Mapping[str, Any]) -> object:
    """Make of text what pydantic converts: None for null, lists split, `1e3` whole where integers are due."""
    kind, value = kind_of(schema), entry.value
    # Examples of text may be null words, as `none` of precision.loss_scale.
    if entry.null and value not in [*choices_of(schema), *schema.get("examples", [])]:
        return None
    if kind["type"] == "array":
        items = _split(value) if isinstance(value, str) else value
        return [as_values(Entry(item, entry.where, quoted=True), kind["items"]) for item in items]
    exponent = re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\s*", str(value))
    if kind["type"] == "integer" and exponent:
        number = float(exponent[0])
        return int(number) if number.is_integer() and abs(number) < 2**53 else value
    return value


def _split(text: str) -> list[str]:
    """Read `[2,4]`, `2,4`, `(2,4)`, `(8,)` and `[]` as lists."""
    inner = text.strip()
    if inner[:1] + inner[-1:] in ("[]", "()"):
        inner = inner[1:-1].strip()
        if not inner:
            return []
    return [item.strip() for item in inner.removesuffix(",").split(",")]


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the dotted names that `name` may stand for, best first.

    The last part decides: it may be misspelt, cut short (`batch` for batch_size) or
    made of initials (`lr` for learning_rate). The section only breaks ties.
    """
    section, _, leaf = name.lower().replace("-", "_").rpartition(".")
    scores: dict[str, float] = {}
    for candidate in known:
        known_section, _, known_leaf = candidate.rpartition(".")
        initials = "".join(word[:1] for word in known_leaf.split("_"))
        abbreviated = len(leaf) > 1 and (leaf == initials or known_leaf.startswith(f"{leaf}_"))
        score = 0.95 if abbreviated else SequenceMatcher(None, leaf, known_leaf).ratio()
        if score >= 0.6:
            scores[candidate] = score + 0.2 * SequenceMatcher(None, section, known_section).ratio()
    best = max(scores.values(), default=0.0)
    return sorted((name for name in scores if scores[name] > best - 0.05), key=lambda name: -scores[name])[:3]


def did_you_mean(names: Sequence[str], prefix: str = "") -> str:
    """Write names as the question that ends a message; nothing where there are none."""
    return f"; did you mean {' or '.join(prefix + name for name in names)}?" if names else ""


def advice(config: type[Config], key: str, prefix: str = "", others: Iterable[str] = ()) -> str:
    """Name the options nearest to an unknown key, or else the keys of its section or the sections."""
    names = [] if key in SECTIONS else nearest(key, [*options(config), *others])
    if names:
        return did_you_mean(names, prefix)
    section = key if key in SECTIONS else key.rpartition(".")[0]
    if section in SECTIONS:
        return f"; {section} has {', '.join(field.name for field in fields(sections(config)[section]))}"
    return f"; the sections are {', '.join(SECTIONS)} (--help lists every option)"
