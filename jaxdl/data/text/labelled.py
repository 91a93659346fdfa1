"""Labelled texts for sequence classification."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxdl.data.files import printable
from jaxdl.data.text.rows import Row, read_rows
from jaxdl.data.text.wordpiece import WordPiece
from jaxdl.data.types import Batch
from jaxdl.errors import ConfigError, DataError

_WHOLE = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, eq=False)
class LabelledSource:
    """Texts, or pairs of texts, each with a class.

    Attributes:
        name: what messages call the file.
        classes: their names; the label of a text is the number of its class in this order.
        length: tokens in a sequence, L.
        pad: number of [PAD].
        words: int32 [T] for each example, its tokens with [CLS] and [SEP].
        second: int64 [N]; where the second text starts in `words`, or their end where there is none.
        labels: int32 [N].
        cut: bool [N]; True for examples that were too long.
    """

    name: str
    classes: tuple[str, ...]
    length: int
    pad: int
    words: tuple[NDArray[np.int32], ...] = field(repr=False)
    second: NDArray[np.int64] = field(repr=False)
    labels: NDArray[np.int32] = field(repr=False)
    cut: NDArray[np.bool_] = field(repr=False)

    def __len__(self) -> int:
        return len(self.words)

    @property
    def truncated(self) -> int:
        """How many examples were too long, so that tokens were cut from them."""
        return int(self.cut.sum())

    def example(self, index: int, epoch: int, seed: int) -> Batch:
        """Returns one example.

        Args:
            index: in 0 ... len - 1.
            epoch: changes nothing.
            seed: changes nothing.

        Returns:
            `word`, `segment`, `type` and `position`, int32 [L] (see `laid_out`), and `label`, int32 [].

        Raises:
            IndexError: there is no such example.
        """
        del epoch, seed
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        example = laid_out(self.words[index], int(self.second[index]), self.length, self.pad)
        return example | {"label": np.array(self.labels[index], np.int32)}

    def split(self, held_out_share: float) -> tuple["LabelledSource", "LabelledSource"]:
        """Divides the examples into those for training and those for evaluation.

        Of each class the share is held out, rounded, but at least one example and not all; they are
        evenly spread over the class and depend on nothing random. Both parts keep the order.

        Args:
            held_out_share: more than 0, less than 1.

        Raises:
            DataError: a class has fewer than two examples.
        """
        is_held = np.zeros(len(self), np.bool_)
        for label, name in enumerate(self.classes):
            members = np.flatnonzero(self.labels == label)
            if len(members) < 2:
                raise DataError(
                    f"{self.name}: class {name!r} has {len(members)} examples, and one is needed for "
                    "training and one for evaluation: add more, or give a file for evaluation"
                )
            count = min(max(round(held_out_share * len(members)), 1), len(members) - 1)
            is_held[members[(2 * np.arange(count) + 1) * len(members) // (2 * count)]] = True
        return self._part(np.flatnonzero(~is_held)), self._part(np.flatnonzero(is_held))

    def _part(self, index: NDArray[np.int64]) -> "LabelledSource":
        return replace(
            self,
            words=tuple(self.words[i] for i in index),
            second=self.second[index],
            labels=self.labels[index],
            cut=self.cut[index],
        )


def laid_out(words: NDArray[np.int32], second: int, length: int, pad: int) -> Batch:
    """Lays tokens out as one padded sequence.

    Args:
        words: int32 [T], with [CLS] and [SEP].
        second: where the second text starts; T where there is none.
        length: tokens in the sequence, at least T.
        pad: number of [PAD].

    Returns:
        int32 [length] each: `word`; `segment`, 1 and on padding 0; `type`, 1 from `second` on and
        otherwise 0; `position`, counted from 0, and on padding 0.
    """
    example: Batch = {key: np.zeros(length, np.int32) for key in ("word", "segment", "type", "position")}
    count = len(words)
    example["word"][:] = pad
    example["word"][:count] = words
    example["segment"][:count] = 1
    example["type"][second:count] = 1
    example["position"][:count] = np.arange(count)
    return example


def open_labelled(
    path: Path,
    tokenizer: WordPiece,
    *,
    text: str = "text",
    text_pair: str | None = None,
    label: str = "label",
    length: int = 128,
    classes: Sequence[str] | None = None,
) -> LabelledSource:
    """Reads and tokenises a file of labelled texts.

    An example is [CLS] A [SEP], or [CLS] A [SEP] B [SEP]. One that is too long loses tokens from the end
    of its longer text (of the second, where both are equally long) until it fits.

    Args:
        path: the file, see `read_rows`.
        tokenizer: the vocabulary.
        text: column of the text; it may be empty.
        text_pair: column of the second text; None: there is one text.
        label: column of the class's name; white space around it does not count.
        length: tokens in a sequence.
        classes: their names, for evaluation those of training; by default those of the file, sorted (as
            numbers where all are whole numbers).

    Raises:
        ConfigError: there is no such column, `length` is too short, or the file's kind is unknown.
        DataError: the file cannot be read, a row lacks a value, a class is not one of `classes`, or
            there are fewer than two classes.
    """
    extra = 2 if text_pair is None else 3
    if length < 2 * extra - 1:
        raise ConfigError(f"data.length {length} is too short: set it to at least {2 * extra - 1}")
    rows, name = read_rows(path), printable(path)
    options = {"data.text_column": text, "data.text_pair_column": text_pair, "data.label_column": label}
    for option, column in options.items():
        if column is not None:
            _require_column(rows, column, option, name)
    names = [_value(row, label, name).strip() for row in rows]
    classes = _sorted(set(names) - {""}) if classes is None else classes
    labels = _numbers(rows, names, classes, name)
    first = tokenizer.encode([_value(row, text, name) for row in rows])
    pairs: Iterator[tuple[list[int], list[int] | None]]
    if text_pair is None:
        pairs = ((tokens, None) for tokens in first)
    else:
        pairs = zip(first, tokenizer.encode([_value(row, text_pair, name) for row in rows]), strict=True)
    words, second, cut = [], [], []
    for one, two in pairs:
        sizes = fitting(len(one), len(two or ()), length - extra)
        sequence = [tokenizer.cls, *one[: sizes[0]], tokenizer.sep]
        second.append(len(sequence))
        if two is not None:
            sequence += [*two[: sizes[1]], tokenizer.sep]
        words.append(np.array(sequence, np.int32))
        cut.append(sum(sizes) < len(one) + len(two or ()))
    return LabelledSource(
        name,
        tuple(classes),
        length,
        tokenizer.pad,
        tuple(words),
        np.array(second),
        labels,
        np.array(cut),
    )


def fitting(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns the lengths of two texts once the longer has lost tokens, one by one, until they fit."""
    if first + second <= room:
        return first, second
    kept = min(first, max(room - room // 2, room - second))
    return kept, room - kept


def _require_column(rows: Sequence[Row], column: str, option: str, name: str) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in (*row.columns, *row.other)))
    if column in columns:
        return
    by_lower = {key.lower(): key for key in columns}
    near = [by_lower[key] for key in get_close_matches(column.lower(), by_lower, 1, cutoff=0.5)]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"{option} {column!r} is no column of {name}; it has: {printable(', '.join(columns))}{hint}"
    )


def _value(row: Row, column: str, name: str) -> str:
    if column in row.columns:
        return row.columns[column]
    found = f"is {row.other[column]}, not a string" if column in row.other else "is missing"
    raise DataError(f"{name} line {row.line}: {column!r} {found}")


def _sorted(names: set[str]) -> list[str]:
    if all(_WHOLE.fullmatch(name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def _numbers(
    rows: Sequence[Row], names: Sequence[str], classes: Sequence[str], name: str
) -> NDArray[np.int32]:
    """Returns the number of each row's class: int32 [N]."""
    number = {known: i for i, known in enumerate(classes)}
    for row, label in zip(rows, names, strict=True):
        if not label:
            raise DataError(f"{name} line {row.line} has no label: add it or remove the row")
        if label not in number:
            known = printable(", ".join(classes))
            raise DataError(f"{name} line {row.line}: class {label!r} is not one of: {known}")
    if len(classes) < 2:
        raise DataError(
            f"{name} has one class, {classes[0]!r}: classification needs two, see data.label_column"
        )
    return np.array([number[label] for label in names], np.int32)
