"""Sequences of tokens out of a corpus: packed full sentences, or pairs of sentences.

Which sentences lie in which sequence is worked out once (`Units`, `full_sentences`, `chunks`); one
sequence is then a function of its index and, for pairs, of the generator passed in.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxdl.data.text.corpus import Corpus
from jaxdl.data.text.wordpiece import WordPiece
from jaxdl.data.types import Batch
from jaxdl.errors import DataError

_SHORT = 0.1  # share of pairs that are made shorter, so that the network learns short texts too


@dataclass(frozen=True, eq=False)
class Units:
    """The sentences of some documents, cut up where they are too long, so that each fits a sequence.

    Attributes:
        start: int64 [U]; where a unit starts in the corpus's tokens.
        total: int64 [U + 1]; tokens in all units before this one.
        first: int64 [D + 1]; document d has the units `first[d]` to `first[d + 1] - 1`.
        document: int64 [U]; the number of each unit's document.
    """

    start: NDArray[np.int64]
    total: NDArray[np.int64]
    first: NDArray[np.int64]
    document: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)

    def size(self, begin: int, end: int) -> int:
        """Returns the number of tokens in the units `begin` to `end` - 1."""
        return int(self.total[end] - self.total[begin])


def units_of(corpus: Corpus, documents: NDArray[np.int64], capacity: int) -> Units:
    """Cuts documents into units.

    Args:
        corpus: the corpus.
        documents: int64 [D], numbers of the documents to take, in this order.
        capacity: tokens in the longest unit.
    """
    begins, ends = corpus.documents[documents], corpus.documents[documents + 1]
    sentence = _ranges(begins, ends)
    owner = np.repeat(np.arange(len(documents)), ends - begins)
    start, end = corpus.sentences[sentence], corpus.sentences[sentence + 1]
    parts = -(-(end - start) // capacity)
    number = _ranges(np.zeros_like(parts), parts)  # of each part within its sentence
    start = np.repeat(start, parts) + number * capacity
    length = np.minimum(np.repeat(end, parts) - start, capacity)
    owner = np.repeat(owner, parts)
    first = np.searchsorted(owner, np.arange(len(documents) + 1))
    return Units(start, np.concatenate([[0], np.cumsum(length)]), first, owner)


def full_sentences(units: Units, length: int) -> NDArray[np.int64]:
    """Packs units into sequences, each as many as fit in order, over the ends of documents.

    The FULL-SENTENCES of RoBERTa (Liu et al. 2019); each document's part has a [CLS] and a [SEP] of its
    own.

    Args:
        units: the units, of at most `length` - 2 tokens.
        length: tokens in a sequence.

    Returns:
        int64 [N, 2], the first unit of each sequence and the one after its last.
    """
    # Each part costs two special tokens: `filled[u]` is what units up to u take, up to a constant.
    filled = units.total[1:] + 2 * units.document
    bounds = [0]
    while bounds[-1] < len(units):
        begin = bounds[-1]
        room = length - 2 + units.total[begin] + 2 * units.document[begin]
        window = filled[begin : begin + length]  # a unit has at least one token
        bounds.append(begin + int(np.searchsorted(window, room, side="right")))
    return np.stack([bounds[:-1], bounds[1:]], axis=1).astype(np.int64)


def packed(
    corpus: Corpus, units: Units, span: NDArray[np.int64], length: int, tokenizer: WordPiece
) -> Batch:  # fmt: skip
    """Lays the units of a span out as one sequence, [CLS] and [SEP] around each document's part.

    Args:
        corpus: the corpus.
        units: its units.
        span: int64 [2], the first unit and the one after the last.
        length: tokens in the sequence.
        tokenizer: has the numbers of special tokens.

    Returns:
        int32 [length] each: `word`, token numbers; `segment`, 0 on padding and otherwise 1, 2, ... by
        document, so that a token attends to those of its own segment only; `type`, 0; `position`,
        counted from 0 in each segment.
    """
    begin, end = int(span[0]), int(span[1])
    example = _empty(length, tokenizer)
    at = 0
    documents = range(int(units.document[begin]), int(units.document[end - 1]) + 1)
    for number, document in enumerate(documents, 1):
        low, high = max(begin, int(units.first[document])), min(end, int(units.first[document + 1]))
        count = units.size(low, high)
        example["word"][at] = tokenizer.cls
        example["word"][at + 1 : at + 1 + count] = _tokens(corpus, units, low, count)
        example["word"][at + 1 + count] = tokenizer.sep
        example["segment"][at : at + count + 2] = number
        example["position"][at : at + count + 2] = np.arange(count + 2)
        at += count + 2
    return example


def chunks(units: Units, length: int) -> NDArray[np.int64]:
    """Cuts documents into spans to make pairs of: at least two units, and enough to fill a pair.

    A span goes on until it fills a pair, as in Devlin et al.; the pair is truncated. A last unit that is
    left alone takes the one before it along, so that unit is in two spans.

    Args:
        units: the units.
        length: tokens in a sequence, three of which are [CLS] and two [SEP].

    Returns:
        int64 [N, 2], the first unit of each span and the one after its last; documents of one unit have
        none.
    """
    spans: list[tuple[int, int]] = []
    for low, high in zip(units.first[:-1].tolist(), units.first[1:].tolist(), strict=True):
        begin = low
        while high - low >= 2 and begin < high:
            begin = min(begin, high - 2)
            end = max(begin + 2, _filled(units, begin, high, length - 3))
            spans.append((begin, end))
            begin = end
    return np.array(spans, np.int64).reshape(-1, 2)


def pair(
    corpus: Corpus,
    units: Units,
    span: NDArray[np.int64],
    length: int,
    tokenizer: WordPiece,
    rng: np.random.Generator,
) -> Batch:
    """Makes [CLS] A [SEP] B [SEP] of a span, for next-sentence prediction (Devlin et al. 2018).

    A is the span up to a random sentence. Half the time B is what follows in it; otherwise it is as
    much of another document, from a random sentence on. One pair in ten is of a random shorter length.

    Returns:
        As `packed` (one segment; `type` is 1 on B and its [SEP]), and `next`, int32 []: 1 where B is
        random, the label of Devlin et al.
    """
    begin, end = int(span[0]), int(span[1])
    room = length - 3
    if rng.random() < _SHORT:
        room = int(rng.integers(2, room, endpoint=True))
        begin = int(rng.integers(begin, end - 1))  # two units are left
        end = max(begin + 2, _filled(units, begin, end, room))
    middle = int(rng.integers(begin + 1, end))
    random = bool(rng.random() < 0.5)
    first = _tokens(corpus, units, begin, units.size(begin, middle))
    if random:
        other = int(rng.integers(len(units.first) - 2))
        other += other >= units.document[begin]  # every document but this one
        low, high = int(units.first[other]), int(units.first[other + 1])
        low = int(rng.integers(low, high))
        high = _filled(units, low, high, room - len(first))
        second = _tokens(corpus, units, low, units.size(low, high))
    else:
        second = _tokens(corpus, units, middle, units.size(middle, end))
    first, second = _truncated(first, second, room, rng)

    example = _empty(length, tokenizer)
    split, whole = len(first) + 2, len(first) + len(second) + 3
    sep = [tokenizer.sep]
    example["word"][:whole] = np.concatenate([[tokenizer.cls], first, sep, second, sep])
    example["segment"][:whole] = 1
    example["type"][split:whole] = 1
    example["position"][:whole] = np.arange(whole)
    return example | {"next": np.array(random, np.int32)}


def check_pairs(corpus: Corpus, units: Units, split: str) -> None:
    """Refuses a corpus of which no pairs can be made.

    Raises:
        DataError: there are not two documents, or none of two sentences.
    """
    if len(units.first) < 3 or len(units) < len(units.first):
        raise DataError(
            f"{corpus.name}: sentence pairs need two documents, one of them with two sentences, and for "
            f"{split} it has {len(units)} sentences in {len(units.first) - 1} documents (see data.held_out)"
        )


def _truncated(
    first: NDArray[Any], second: NDArray[Any], room: int, rng: np.random.Generator
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Takes tokens from the longer one, at a random end each, until both fit into `room`."""
    excess = len(first) + len(second) - room
    if excess <= 0:
        return first, second
    # One by one from the longer one: both end up equally long, unless the shorter one is short enough.
    half = room // 2
    size_a = min(len(first), max(half + room % 2, room - len(second)))
    size_b = room - size_a

    def cut(tokens: NDArray[Any], size: int) -> NDArray[Any]:
        front = int(rng.binomial(len(tokens) - size, 0.5))
        return tokens[front : front + size]

    return cut(first, size_a), cut(second, size_b)


def _filled(units: Units, begin: int, end: int, room: int) -> int:
    """Returns where units from `begin` on have filled `room` tokens: after `begin`, at most `end`."""
    inner = units.total[begin + 1 : min(end, begin + max(room, 1)) + 1]  # a unit has at least one token
    return min(begin + 1 + int(np.searchsorted(inner, units.total[begin] + room)), end)


def _tokens(corpus: Corpus, units: Units, begin: int, count: int) -> NDArray[np.unsignedinteger[Any]]:
    """Returns `count` tokens from a unit on; the units of a document lie one after the other."""
    start = int(units.start[begin])
    return corpus.tokens[start : start + count]


def _empty(length: int, tokenizer: WordPiece) -> Batch:
    example: Batch = {key: np.zeros(length, np.int32) for key in ("word", "segment", "type", "position")}
    example["word"][:] = tokenizer.pad
    return example


def _ranges(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the numbers from each begin to its end, one range after the other."""
    sizes = ends - begins
    before = np.cumsum(sizes) - sizes
    return np.repeat(begins - before, sizes) + np.arange(int(sizes.sum()))
