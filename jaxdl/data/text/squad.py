"""Question answering of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018): windows, answers and scores."""

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxdl.data.files import printable
from jaxdl.data.text.labelled import laid_out
from jaxdl.data.text.rows import has_half_character, kind_of, read_utf8
from jaxdl.data.text.wordpiece import WordPiece
from jaxdl.data.types import Batch
from jaxdl.errors import ConfigError, DataError

_AT_ONCE = 1000  # passages; their pieces take much memory until they are arrays
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Passage:
    """A text to find answers in.

    Attributes:
        text: as it was written.
        words: int32 [T], its tokens.
        places: int32 [T, 2]; the first character of each token, and the one after its last.
    """

    text: str = field(repr=False)
    words: NDArray[np.int32] = field(repr=False)
    places: NDArray[np.int32] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Question:
    """A question about a passage.

    Attributes:
        id: its name in the file.
        passage: number of the passage.
        words: int32 [T], the tokens, with [CLS] in front and [SEP] behind.
        answers: every text that is right; none where the passage has no answer.
    """

    id: str
    passage: int
    words: NDArray[np.int32] = field(repr=False)
    answers: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SquadSource:
    """Windows of a question and a part of its passage, and what answers are worth.

    Attributes:
        name: what messages call the file.
        length: tokens in a window, L.
        pad: number of [PAD].
        sep: number of [SEP].
        passages: the texts.
        questions: the questions, Q.
        windows: int32 [N, 5], those of a question one after the other: number of the question; the
            first token of the passage in this window, and the one after the last; the first and last
            token of the answer, counted in the window, or 0 and 0.
        skipped: how many questions have an answer that is nowhere in the passage, so that the answer is
            in no window.
    """

    name: str
    length: int
    pad: int
    sep: int
    passages: tuple[Passage, ...] = field(repr=False)
    questions: tuple[Question, ...] = field(repr=False)
    windows: NDArray[np.int32] = field(repr=False)
    skipped: int

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def unanswerable(self) -> bool:
        """Whether there are questions without an answer, as in SQuAD 2.0."""
        return not all(question.answers for question in self.questions)

    def example(self, index: int, epoch: int, seed: int) -> Batch:
        """Returns one window, [CLS] question [SEP] part of the passage [SEP].

        Args:
            index: in 0 ... len - 1.
            epoch: changes nothing.
            seed: changes nothing.

        Returns:
            `word`, `segment`, `type` and `position`, int32 [L] (see `labelled.laid_out`); `answerable`,
            float32 [L], 1 on tokens of the passage and otherwise 0; `start` and `end`, int32 [], the
            first and last token of the answer, both 0 (at [CLS]) where it is not wholly in this window
            or there is none.

        Raises:
            IndexError: there is no such window.
        """
        del epoch, seed
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        number, begin, stop, start, end = (int(value) for value in self.windows[index])
        question = self.questions[number]
        part = self.passages[question.passage].words[begin:stop]
        front = len(question.words)
        words = np.concatenate([question.words, part, np.array([self.sep], np.int32)])
        answerable = np.zeros(self.length, np.float32)
        answerable[front : front + len(part)] = 1
        return laid_out(words, front, self.length, self.pad) | {
            "answerable": answerable,
            "start": np.array(start, np.int32),
            "end": np.array(end, np.int32),
        }

    def predictions(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, str]:
        """Returns the answer to each question, by its id: the text of the passage as it was written.

        It is that of the window with the highest `span_score`, and of these the first. A span that is
        not wholly on the window's part of the passage gives "". With `unanswerable` so does a lowest
        `null_score` over the question's windows that is above the highest `span_score`.

        Args:
            columns: `start` and `end`, integers [N], the first and last token of the best span of each
                window; `span_score` and `null_score`, floats [N], of that span and of no answer.

        Raises:
            ValueError: there is not one value for each window.
        """
        for key in ("start", "end", "span_score", "null_score"):
            if columns[key].shape != (len(self),):
                raise ValueError(f"{key} has the shape {columns[key].shape}, and {len(self)} windows")
        bounds = np.searchsorted(self.windows[:, 0], np.arange(len(self.questions) + 1))
        unanswerable = self.unanswerable
        answers = {}
        for question, low, high in zip(self.questions, bounds[:-1], bounds[1:], strict=True):
            best = low + int(np.argmax(columns["span_score"][low:high]))
            null = unanswerable and columns["null_score"][low:high].min() > columns["span_score"][best]
            start, end = int(columns["start"][best]), int(columns["end"][best])
            answers[question.id] = "" if null else self._text(best, start, end)
        return answers

    def score(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, float]:
        """Returns `exact_match` and `f1` of SQuAD's official evaluation (of 2.0), in percent.

        Each is the mean over all questions of the best over the right answers.

        Args:
            columns: as for `predictions`.

        Raises:
            ValueError: there is not one value for each window.
        """
        answers = self.predictions(columns)
        exact = f1 = 0.0
        for question in self.questions:
            # As officially: an answer of which nothing is left ("the") does not count.
            right = [answer for answer in question.answers if normalized(answer)] or [""]
            exact += max(normalized(answer) == normalized(answers[question.id]) for answer in right)
            f1 += max(token_f1(answers[question.id], answer) for answer in right)
        count = len(self.questions)
        return {"exact_match": 100 * exact / count, "f1": 100 * f1 / count}

    def _text(self, index: int, start: int, end: int) -> str:
        number, begin, stop = (int(value) for value in self.windows[index, :3])
        question = self.questions[number]
        first, last = (token - len(question.words) + begin for token in (start, end))
        if not begin <= first <= last < stop:
            return ""
        passage = self.passages[question.passage]
        begin, stop = int(passage.places[first, 0]), int(passage.places[last, 1])
        return passage.text[begin:stop]


def normalized(answer: str) -> str:
    """Returns an answer as SQuAD compares it: no capitals, punctuation, articles or extra space."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def token_f1(predicted: str, right: str) -> float:
    """Returns the F1 of the words that two answers share; 1 where both are empty, 0 where one is."""
    ours, theirs = normalized(predicted).split(), normalized(right).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs))


def open_squad(
    path: Path, tokenizer: WordPiece, *, length: int = 384, stride: int = 128, question_length: int = 64
) -> SquadSource:
    """Reads and tokenises a file of SQuAD's JSON.

    The answer to be learned is the first that is in the passage, where its text is nearest to
    `answer_start`, as the smallest span of tokens that covers its characters.

    Args:
        path: the file.
        tokenizer: the vocabulary.
        length: tokens in a window.
        stride: tokens of the passage that a window shares with the one before it.
        question_length: tokens of a question; what is longer is cut off.

    Raises:
        ConfigError: a window has no room for more of the passage than `stride` tokens.
        DataError: the file cannot be read, is no SQuAD, or has no questions.
    """
    room = length - 3 - question_length
    if room <= stride:
        raise ConfigError(
            f"data.length {length} less data.question_length {question_length} and 3 special tokens "
            f"leaves {max(room, 0)} tokens for the passage, which must be more than data.stride {stride}: "
            f"set data.length to at least {stride + question_length + 4}, or make another smaller"
        )
    name = printable(path)
    try:
        contexts, entries = _parsed(read_utf8(path))
    except _SquadError as error:
        raise DataError(f"{name} is no SQuAD file: {error}") from error
    if not entries:
        raise DataError(f"{name} has no questions")
    passages = _passages(contexts, tokenizer)
    words = tokenizer.encode([entry.text for entry in entries])
    questions = []
    windows: list[tuple[int, ...]] = []
    skipped = 0
    for number, (entry, tokens) in enumerate(zip(entries, words, strict=True)):
        front = [tokenizer.cls, *tokens[:question_length], tokenizer.sep]
        answers = tuple(text for text, _ in entry.answers)
        questions.append(Question(entry.id, entry.passage, np.array(front, np.int32), answers))
        passage = passages[entry.passage]
        found = next((span for text, at in entry.answers if (span := _span(passage, text, at))), None)
        skipped += found is None and bool(answers)
        for begin, stop in _parts(len(passage.words), length - 1 - len(front), stride):
            is_inside = found is not None and begin <= found[0] and found[1] < stop
            target = [len(front) + token - begin for token in found] if found and is_inside else [0, 0]
            windows.append((number, begin, stop, *target))
    return SquadSource(
        name,
        length,
        tokenizer.pad,
        tokenizer.sep,
        passages,
        tuple(questions),
        np.array(windows, np.int32),
        skipped,
    )


def _passages(contexts: Sequence[str], tokenizer: WordPiece) -> tuple[Passage, ...]:
    passages = []
    for first in range(0, len(contexts), _AT_ONCE):
        texts = contexts[first : first + _AT_ONCE]
        for text, (words, places) in zip(texts, tokenizer.encode_with_offsets(texts), strict=True):
            array = np.array(places, np.int32).reshape(-1, 2)
            passages.append(Passage(text, np.array(words, np.int32), array))
    return tuple(passages)


def _span(passage: Passage, answer: str, at: int) -> tuple[int, int] | None:
    """Returns the first and last token of an answer; None where it is nowhere or without tokens."""
    if not answer:
        return None
    starts = (found.start() for found in re.finditer(f"(?={re.escape(answer)})", passage.text))
    start = min(starts, key=lambda start: abs(start - at), default=None)
    if start is None:
        return None
    covering = np.flatnonzero(
        (passage.places[:, 0] < start + len(answer)) & (passage.places[:, 1] > start)
    )  # fmt: skip
    return (int(covering[0]), int(covering[-1])) if len(covering) else None


def _parts(count: int, room: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yields the parts of a passage, at least one: the first token, and the one after the last."""
    begin = 0
    while begin + room < count:
        yield begin, begin + room
        begin += room - stride
    yield begin, count


class _SquadError(Exception):
    """What is wrong, and where in the JSON."""


@dataclass(frozen=True)
class _Entry:
    """A question as the file has it; `answers` are texts and the characters at which they should be."""

    id: str
    passage: int
    text: str
    answers: list[tuple[str, int]]


def _parsed(text: str) -> tuple[list[str], list[_Entry]]:
    """Returns the passages and the questions of a file."""
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _SquadError(f"not JSON ({error})") from error
    contexts: list[str] = []
    entries: list[_Entry] = []
    ids: set[str] = set()
    for article, at in _items(root, "data", ""):
        for paragraph, in_article in _items(article, "paragraphs", at):
            contexts.append(_get(paragraph, "context", str, in_article))
            for question, in_paragraph in _items(paragraph, "qas", in_article):
                entry = _entry(question, len(contexts) - 1, in_paragraph)
                if entry.id in ids:
                    raise _SquadError(f"{in_paragraph}.id {entry.id!r} is that of another question too")
                ids.add(entry.id)
                entries.append(entry)
    return contexts, entries


def _entry(question: object, passage: int, at: str) -> _Entry:
    answers = [
        (_get(answer, "text", str, where), _get(answer, "answer_start", int, where))
        for answer, where in _items(question, "answers", at)
    ]
    identifier = _get(question, "id", str, at)
    # SQuAD 1.1 has no such key.
    has_flag = "is_impossible" in _object(question, at)
    if has_flag and _get(question, "is_impossible", bool, at) and answers:
        raise _SquadError(f"{at} (id {identifier!r}) is_impossible, but has answers")
    return _Entry(identifier, passage, _get(question, "question", str, at), answers)


def _items(node: object, key: str, at: str) -> Iterator[tuple[object, str]]:
    """Yields what a list has, each with its place."""
    items: list[object] = _get(node, key, list, at)
    for index, item in enumerate(items):
        yield item, f"{_join(at, key)}[{index}]"


def _get(node: object, key: str, kind: type[_T], at: str) -> _T:
    """Returns a value of an object of the file, of this very kind."""
    place, values = _join(at, key), _object(node, at)
    if key not in values:
        raise _SquadError(f"{place} is missing")
    value = values[key]
    if type(value) is not kind:  # a boolean is no whole number here
        raise _SquadError(f"{place} is {kind_of(value)}, not {kind_of(kind())}")
    if isinstance(value, str) and has_half_character(value):
        raise _SquadError(f"{place} has half a character (a lone \\ud800 to \\udfff)")
    return value


def _object(node: object, at: str) -> dict[str, object]:
    if not isinstance(node, dict):
        raise _SquadError(f"{at or 'the whole'} is {kind_of(node)}, not an object")
    return node


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key
