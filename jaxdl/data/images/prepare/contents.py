"""What is in the shards, and the files that say so."""

import json
from dataclasses import dataclass
from pathlib import Path

SHARDS = "shards"
"""The directory of these files."""


@dataclass(frozen=True)
class Contents:
    """What is in a shard.

    Attributes:
        examples: their number.
        bytes: the file's length.
        sha256: the file's digest, in hexadecimal digits.
        skipped: for each example that was left out, why.
    """

    examples: int
    bytes: int
    sha256: str
    skipped: list[str]


def recorded(path: Path) -> Contents | None:
    """Returns what is said to be in the shard `path`; None where it has not been made."""
    try:
        return Contents(**json.loads(record_of(path).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def record_of(path: Path) -> Path:
    """Returns the file that says what is in the shard `path`."""
    return path.parent / SHARDS / f"{path.name}.json"
