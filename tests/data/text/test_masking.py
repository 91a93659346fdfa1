"""What is hidden: the right share, of text only, in the right ways."""

import numpy as np
import pytest

from jaxdl.data.text.masking import Masking
from tests.data.text.corpora import WORDS, vocabulary

TOKENIZER = vocabulary(first=["aa"])  # number 0 is a word, and the special tokens are 1 to 5
LENGTH = 128
SPECIALS = np.flatnonzero(TOKENIZER.special)


def masking(*, share=0.15, limit=20, whole_words=False):
    return Masking.of(TOKENIZER, share=share, limit=limit, whole_words=whole_words)


def sequence(rng, *, words=None, length=LENGTH):
    """A sequence of words of one to three pieces, with [UNK] among them, and padding."""
    tokens = [TOKENIZER.cls]
    count = int(rng.integers(length // 2, length)) if words is None else words
    starts = np.flatnonzero(TOKENIZER.starts & ~TOKENIZER.special)
    tails = np.flatnonzero(~TOKENIZER.starts)
    while len(tokens) < count:
        tokens += [rng.choice(starts), *rng.choice(tails, rng.integers(0, 3))] if rng.random() < 0.9 else [2]
    tokens = [*tokens[: length - 1], TOKENIZER.sep]
    word = np.full(length, TOKENIZER.pad, np.int32)
    word[: len(tokens)] = tokens
    return {"word": word, "segment": (np.arange(length) < len(tokens)).astype(np.int32)}


def used(masked):
    count = int(masked["masked_weight"].sum())
    assert masked["masked_weight"].tolist() == [1] * count + [0] * (len(masked["masked_weight"]) - count)
    assert not masked["masked_position"][count:].any()
    assert not masked["masked_word"][count:].any()
    return masked["masked_position"][:count], masked["masked_word"][:count]


@pytest.fixture(scope="module", params=[False, True], ids=["tokens", "whole_words"])
def many(request):
    hide = masking(whole_words=request.param)
    made = []
    for i in range(10_000):
        rng = np.random.default_rng((0, i))
        # The slow part, a sequence, is one of a hundred.
        example = many_sequences[i % 100]
        made.append((example, hide(example, rng)))
    return made


many_sequences = [sequence(np.random.default_rng((1, i))) for i in range(100)]


def test_specials_and_padding_are_never_chosen_nor_put_in(many):
    for example, masked in many:
        places, labels = used(masked)
        assert len(set(places.tolist())) == len(places)
        assert (np.diff(places) > 0).all()
        assert (example["segment"][places] > 0).all()
        assert not np.isin(labels, SPECIALS).any()
        np.testing.assert_array_equal(example["word"][places], labels)
        inserted = masked["word"][places]
        assert not np.isin(inserted[inserted != TOKENIZER.mask], SPECIALS).any()
        rest = np.delete(np.arange(LENGTH), places)
        np.testing.assert_array_equal(masked["word"][rest], example["word"][rest])


def test_shares(many):
    text = sum(((e["segment"] > 0) & ~np.isin(e["word"], SPECIALS)).sum() for e, _ in many)
    chosen = sum(m["masked_weight"].sum() for _, m in many)
    assert abs(chosen / text - 0.15) < 0.005
    kinds = np.zeros(3)
    for _, masked in many:
        places, labels = used(masked)
        now = masked["word"][places]
        kinds += [(now == TOKENIZER.mask).sum(), (now == labels).sum(), 0]
        kinds[2] += len(places)
    masked_share, kept_share = kinds[:2] / kinds[2]
    assert abs(masked_share - 0.8) < 0.01
    assert abs(kept_share - 0.1) < 0.01


def test_every_place_is_chosen_equally_often():
    example = many_sequences[0]
    (text,) = np.nonzero((example["segment"] > 0) & ~np.isin(example["word"], SPECIALS))
    counts = np.zeros(LENGTH)
    hide = masking()
    for i in range(4000):
        counts[used(hide(example, np.random.default_rng(i)))[0]] += 1
    frequency = counts[text] / 4000
    assert np.abs(frequency - frequency.mean()).max() < 0.03


def test_types_and_limit():
    rng = np.random.default_rng(0)
    masked = masking(limit=5)(sequence(rng, words=100), rng)
    assert {key: (value.dtype.name, value.shape) for key, value in masked.items()} == {
        "word": ("int32", (LENGTH,)),
        "segment": ("int32", (LENGTH,)),
        "masked_position": ("int32", (5,)),
        "masked_word": ("int32", (5,)),
        "masked_weight": ("float32", (5,)),
    }
    assert masked["masked_weight"].tolist() == [1] * 5


@pytest.mark.parametrize("whole_words", [False, True])
def test_one_token_is_chosen(whole_words):
    example = {"word": np.array([3, 0, 4, 1], np.int32), "segment": np.array([1, 1, 1, 0], np.int32)}
    before = example["word"].copy()
    masked = masking(whole_words=whole_words)(example, np.random.default_rng(0))
    places, labels = used(masked)
    assert places.tolist() == [1]
    assert labels.tolist() == [0]  # the number 0 is a label like others
    np.testing.assert_array_equal(example["word"], before)


@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("tokens", [[3, 4, 1, 1], [3, 2, 2, 4], [1, 1, 1, 1]])
def test_without_text_all_weights_are_0(whole_words, tokens):
    word = np.array(tokens, np.int32)
    example = {"word": word, "segment": (word != TOKENIZER.pad).astype(np.int32)}
    masked = masking(whole_words=whole_words)(example, np.random.default_rng(0))
    assert len(used(masked)[0]) == 0
    np.testing.assert_array_equal(masked["word"], word)


def test_whole_words_are_whole():
    hide = masking(whole_words=True)
    starts = TOKENIZER.starts | TOKENIZER.special
    for i, example in enumerate(many_sequences):
        groups = np.cumsum(starts[example["word"]])
        text = (example["segment"] > 0) & ~np.isin(example["word"], SPECIALS)
        places, _ = used(hide(example, np.random.default_rng(i)))
        chosen = np.zeros(LENGTH, bool)
        chosen[places] = True
        for group in set(groups[places].tolist()):
            # A tail after [UNK] belongs to no word before it.
            assert chosen[(groups == group) & text].all()
        assert len(places) <= 20


def test_a_word_longer_than_the_share_is_chosen_whole_or_not_at_all():
    tails = TOKENIZER.encode(["".join(WORDS[i] for i in range(6))])[0]
    assert len(tails) == 6
    word = np.array([3, *tails, 4], np.int32)
    example = {"word": word, "segment": np.ones(8, np.int32)}
    assert used(masking(whole_words=True)(example, np.random.default_rng(0)))[0].tolist() == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert len(used(masking(whole_words=True, limit=5)(example, np.random.default_rng(0)))[0]) == 0
