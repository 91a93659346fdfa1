"""Sequences of a corpus: nothing lost, nothing twice, documents apart, and pairs as BERT makes them."""

import numpy as np
import pytest

from jaxdl.data.text.examples import _truncated, check_pairs, chunks, full_sentences, packed, pair, units_of
from jaxdl.errors import DataError
from tests.data.text.corpora import numbered, random_sizes, vocabulary

TOKENIZER = vocabulary()
CASES = [
    [[1]],
    [[3, 4], [5]],
    [[100], [1, 200, 1], [16, 16]],  # longer than a sequence
    [[6], [6], [6], [6]],
    *(random_sizes(seed) for seed in range(4)),
]


def everything(corpus):
    return np.arange(len(corpus.documents) - 1)


def document_of(corpus):
    """The document of each token of a corpus that is `numbered`."""
    ends = corpus.sentences[corpus.documents[1:]]
    return lambda token: int(np.searchsorted(ends, token - 5, side="right"))


@pytest.mark.parametrize("sizes", CASES)
@pytest.mark.parametrize("length", [8, 16, 33])
def test_full_sentences_lose_and_repeat_nothing(sizes, length):
    corpus = numbered(sizes)
    units = units_of(corpus, everything(corpus), length - 2)
    document = document_of(corpus)
    seen = []
    for span in full_sentences(units, length):
        example = packed(corpus, units, span, length, TOKENIZER)
        assert {key: (value.dtype, value.shape) for key, value in example.items()} == dict.fromkeys(
            ("word", "segment", "type", "position"), (np.dtype(np.int32), (length,))
        )
        used = int((example["segment"] > 0).sum())
        assert not example["segment"][used:].any()
        assert (example["word"][used:] == TOKENIZER.pad).all()
        assert not example["position"][used:].any()
        numbers = range(1, example["segment"].max() + 1)
        assert sorted(set(example["segment"][:used].tolist())) == list(numbers)
        owners = []
        for number in numbers:
            (places,) = np.nonzero(example["segment"] == number)
            words = example["word"][places]
            assert (np.diff(places) == 1).all()
            assert example["position"][places].tolist() == list(range(len(places)))
            assert (words[0], words[-1]) == (TOKENIZER.cls, TOKENIZER.sep)
            owners.append({document(token) for token in words[1:-1]})
            assert len(owners[-1]) == 1
            seen += words[1:-1].tolist()
        assert len(set.union(*owners)) == len(owners)  # a segment is all of a document in the sequence
    assert seen == corpus.tokens.tolist()


def test_sequences_are_as_full_as_sentences_allow():
    corpus = numbered(random_sizes(7))
    length = 64
    units = units_of(corpus, everything(corpus), length - 2)
    spans = full_sentences(units, length)
    for begin, end in spans[:-1]:
        parts = len(set(units.document[begin : end + 1].tolist()))
        assert units.size(begin, end + 1) + 2 * parts > length


def test_some_documents_only():
    corpus = numbered([[3, 4], [5], [2, 20], [6]])
    units = units_of(corpus, np.array([0, 2]), 8)
    taken = [
        corpus.tokens[a : a + n].tolist() for a, n in zip(units.start, np.diff(units.total), strict=True)
    ]
    assert sum(taken, []) == [*range(5, 12), *range(17, 39)]  # noqa: RUF017
    assert [len(part) for part in taken] == [3, 4, 2, 8, 8, 4]
    assert units.first.tolist() == [0, 2, 6]


@pytest.mark.parametrize("sizes", CASES)
def test_spans_of_pairs_cover_each_document(sizes):
    length = 16
    corpus = numbered(sizes)
    units = units_of(corpus, everything(corpus), length - 3)
    spans = chunks(units, length)
    covered = np.zeros(len(units), int)
    for begin, end in spans:
        assert end - begin >= 2
        assert units.document[begin] == units.document[end - 1]
        assert units.size(begin, end - 1) < length - 3 or end - begin == 2
        covered[begin:end] += 1
    alone = (np.diff(units.first) == 1)[units.document]
    assert not covered[alone].any()
    assert (covered[~alone] >= 1).all()
    assert covered.max(initial=0) <= 2


@pytest.fixture(scope="module")
def pairs():
    corpus = numbered(random_sizes(3, documents=80))
    length = 64
    units = units_of(corpus, everything(corpus), length - 3)
    spans = chunks(units, length)
    made = [
        pair(corpus, units, spans[i % len(spans)], length, TOKENIZER, np.random.default_rng((0, i)))
        for i in range(4000)
    ]
    return corpus, made


def halves(example):
    word, kind = example["word"], example["type"]
    count = int((example["segment"] > 0).sum())
    split = int(np.argmax(kind)) if kind.any() else count
    assert word[0] == TOKENIZER.cls
    assert word[split - 1] == word[count - 1] == TOKENIZER.sep
    return word[1 : split - 1], word[split : count - 1]


def test_half_of_the_pairs_are_random(pairs):
    _, made = pairs
    share = np.mean([example["next"] for example in made])
    assert abs(share - 0.5) < 0.03
    assert made[0]["next"].dtype == np.int32


def test_next_is_next_and_random_is_of_another_document(pairs):
    corpus, made = pairs
    document = document_of(corpus)
    gaps = []
    for example in made:
        first, second = halves(example)
        assert len(first)
        assert len(second)
        assert (np.diff(first) == 1).all()
        assert (np.diff(second) == 1).all()
        if example["next"]:
            assert document(first[0]) != document(second[0])
        else:
            assert document(first[0]) == document(second[-1])
            assert second[0] > first[-1]
            gaps.append(second[0] - first[-1])
    assert np.mean(np.array(gaps) == 1) > 0.3  # more only where an end was cut off


def test_layout_of_pairs(pairs):
    _, made = pairs
    lengths = []
    for example in made:
        count = int((example["segment"] > 0).sum())
        lengths.append(count)
        assert (example["segment"][:count] == 1).all()
        assert (np.diff(example["type"][:count]) >= 0).all()
        assert example["position"].tolist() == [*range(count), *[0] * (64 - count)]
        assert (example["word"][count:] == TOKENIZER.pad).all()
    assert max(lengths) == 64
    assert np.mean(np.array(lengths) == 64) > 0.5
    assert min(lengths) < 16


def test_random_documents_are_all_of_the_others():
    corpus = numbered([[4, 4], [4, 4], [4, 4]])
    units = units_of(corpus, everything(corpus), 13)
    document = document_of(corpus)
    seen = set()
    for i in range(200):
        example = pair(corpus, units, chunks(units, 16)[1], 16, TOKENIZER, np.random.default_rng(i))
        if example["next"]:
            seen.add(document(halves(example)[1][0]))
    assert seen == {0, 2}


@pytest.mark.parametrize("room", [2, 3, 7, 8, 20])
def test_truncation_is_that_of_bert(room):
    rng = np.random.default_rng(0)
    for a in range(1, 12):
        for b in range(1, 12):
            first, second = _truncated(np.arange(a), np.arange(b), room, rng)
            left = [a, b]
            while sum(left) > room:  # its loop: from the longer one, and from the second of equals
                left[0 if left[0] > left[1] else 1] -= 1
            assert [len(first), len(second)] == left
            assert (np.diff(first) == 1).all()
            assert (np.diff(second) == 1).all()


@pytest.mark.parametrize("sizes", [[[3, 4]], [[3], [4], [5]]])
def test_a_corpus_without_pairs_is_refused(sizes):
    corpus = numbered(sizes)
    with pytest.raises(DataError, match="sentence pairs need two documents"):
        check_pairs(corpus, units_of(corpus, everything(corpus), 61), "train")
