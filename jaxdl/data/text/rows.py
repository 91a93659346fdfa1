"""Rows of TSV, CSV and JSON lines files, with the line that each stands on."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxdl.data.files import printable
from jaxdl.errors import ConfigError, DataError

# JSON can spell half of a surrogate pair, which is no character and which the tokenizer does not take.
_HALF = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
        line: in the file, from 1; of a row over several lines, the first.
        columns: the text of each column; of JSON also whole numbers and booleans, as JSON spells them.
        other: of JSON, the columns with something else, and what that is.
    """

    line: int
    columns: Mapping[str, str]
    other: Mapping[str, str] = field(default_factory=dict)


def read_rows(path: Path) -> list[Row]:
    """Reads a file of UTF-8, of the kind that its suffix says.

    `.tsv` is as in GLUE: a row a line, and quotes are ordinary characters. In `.csv` a field may be in
    quotes, and then hold line ends. The first line of both names the columns. `.jsonl` and `.ndjson`
    have an object a line. Blank lines do not count.

    Raises:
        ConfigError: another suffix.
        DataError: the file cannot be read, is damaged or has no rows.
    """
    readers: dict[str, Callable[[str], list[Row]]] = {
        ".tsv": lambda text: _table(_tsv(text)),
        ".csv": lambda text: _table(_csv(text)),
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
    }
    name = printable(path)
    if path.is_dir():
        raise DataError(f"{name} is a directory: name a file, of {', '.join(readers)}")
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{name} is no file of labelled texts that is known: use {', '.join(readers)}")
    text = read_utf8(path)
    try:
        rows = reader(text)
    except DataError as error:
        raise DataError(f"{name} {error}") from error
    if not rows:
        raise DataError(f"{name} has no rows")
    return rows


def read_utf8(path: Path) -> str:
    """Reads a file of UTF-8, without the byte order mark that it may start with.

    Raises:
        DataError: it is missing, no file, blank or not UTF-8.
    """
    name = printable(path)
    try:
        content = path.read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name} line {line} is not UTF-8 ({error.reason}): convert the file") from error
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise DataError(f"{name} is empty")
    return text


def has_half_character(text: str) -> bool:
    """Says whether a text of JSON has half of a surrogate pair, so that it is no valid Unicode."""
    return _HALF.search(text) is not None


def _tsv(text: str) -> Iterator[tuple[int, list[str]]]:
    # Not splitlines: it takes characters of the text for the end of a line.
    for number, line in enumerate(text.split("\n"), 1):
        yield number, line.removesuffix("\r").split("\t")


def _csv(text: str) -> Iterator[tuple[int, list[str]]]:
    # Strict: otherwise a quote that nothing closes takes in the rest of the file without a word.
    csv.field_size_limit(2**31 - 1)  # a text may be longer than 131,072 characters
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"line {line} is not CSV ({error}): close quotes and double inner ones"
            ) from error
        if fields is None:
            return
        yield line, fields


def _table(records: Iterator[tuple[int, list[str]]]) -> list[Row]:
    filled = (record for record in records if len(record[1]) > 1 or "".join(record[1]).strip())
    first, header = next(filled)
    if len(set(header)) < len(header):
        twice = next(column for column in header if header.count(column) > 1)
        raise DataError(f"line {first} names the column {twice!r} twice")
    rows = []
    for line, fields in filled:
        if len(fields) != len(header):
            raise DataError(
                f"line {line} has {len(fields)} fields, and line {first} names {len(header)} columns"
            )
        rows.append(Row(line, dict(zip(header, fields, strict=True))))
    return rows


def _json_lines(text: str) -> list[Row]:
    rows = []
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:  # ValueError also for numbers of too many digits
            raise DataError(f"line {line} is not JSON ({error})") from error
        if not isinstance(value, dict):
            raise DataError(f"line {line} is not a JSON object, as {{...}}, but {kind_of(value)}")
        columns = {key: _spelled(item) for key, item in value.items() if isinstance(item, str | int)}
        half = next((key for key, item in columns.items() if has_half_character(item)), None)
        if half is not None:
            raise DataError(f"line {line} has half a character (a lone \\ud800 to \\udfff) in {half!r}")
        other = {key: kind_of(item) for key, item in value.items() if key not in columns}
        rows.append(Row(line, columns, other))
    return rows


def kind_of(value: object) -> str:
    """Names the kind of a value of JSON, with its article."""
    kinds = {bool: "a boolean", int: "a whole number", float: "a fraction", str: "a string"}
    kinds |= {list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")


def _spelled(value: str | int) -> str:
    return value if isinstance(value, str) else json.dumps(value)
