"""The whole: examples by (seed, epoch, index), and batches that nothing but these decides."""

import itertools

import numpy as np
import pytest

from jaxdl.config import DataConfig
from jaxdl.data.text.batches import EvalBatches, TextFeed, train_batches
from jaxdl.data.text.pretraining import chosen_documents, open_tokenizer, pretraining_source
from jaxdl.errors import ConfigError, DataError
from tests.data.text.corpora import documents_of, texts

MODES = ["full_sentences", "sentence_pairs"]
DOCUMENTS = documents_of(texts(documents=60))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tokenizer(cache):
    return open_tokenizer(DOCUMENTS, vocabulary_size=300, cache=cache, processes=1)


@pytest.fixture
def source(cache, tokenizer):
    def make(mode="full_sentences", split="train", **other):
        settings = {"length": 32, "held_out": 0.1, **other}
        return pretraining_source(
            DOCUMENTS, tokenizer, split, mode=mode, cache=cache, processes=1, **settings
        )

    return make


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_array_equal(left[key], right[key])


def differ(left, right):
    return any(not np.array_equal(left[key], right[key]) for key in left)


def take(batches, count):
    try:
        return list(itertools.islice(batches, count))
    finally:
        batches.close()


@pytest.mark.parametrize("mode", MODES)
def test_an_example_is_a_function_of_seed_epoch_and_index(source, mode):
    one, other = source(mode), source(mode)
    order = np.random.default_rng(0).permutation(len(one))
    shuffled = {int(i): other.example(int(i), 3, 7) for i in order}
    for i in range(len(one)):
        assert_same(one.example(i, 3, 7), shuffled[i])
    # A few of so short ones may be the same by chance.
    for other in ((4, 7), (3, 8)):
        changed = [differ(one.example(i, 3, 7), one.example(i, *other)) for i in range(len(one))]
        assert np.mean(changed) > 0.95
    with pytest.raises(IndexError):
        one.example(len(one), 0, 0)


def test_vocabulary_and_limits(source, tokenizer):
    assert len(tokenizer) == 300
    limits = {length: source(length=length).masking.limit for length in (32, 128, 512)}
    assert limits == {32: 8, 128: 20, 512: 80}
    assert source(max_predictions=3).masking.limit == 3


@pytest.mark.parametrize("mode", MODES)
def test_splits_are_apart_and_complete(source, mode):
    train, held = source(mode), source(mode, "eval")
    assert len(train.units.first) + len(held.units.first) - 2 == 60
    assert len(held.units.first) - 1 == 6
    assert not set(train.units.start.tolist()) & set(held.units.start.tolist())
    both = source(mode, held_out=0)
    assert len(both.units) == len(train.units) + len(held.units)


def test_held_out_documents_are_spread():
    assert chosen_documents(10, "eval", 0.2).tolist() == [4, 9]
    assert chosen_documents(10, "train", 0.2).tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert len(chosen_documents(10_000, "eval", 0.01)) == 100


def test_what_cannot_be(source):
    with pytest.raises(ConfigError, match="length 7 is too short: set it to at least 8"):
        source("sentence_pairs", length=7)
    with pytest.raises(DataError, match="60 documents, of which none is for eval"):
        source(split="eval", held_out=0.001)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_batch_size_and_start_change_nothing(source, mode, workers):
    examples = source(mode)
    whole = take(train_batches(examples, batch_size=6, seed=1, workers=0), 50)
    assert len(whole) * 6 > len(examples)
    resumed = take(train_batches(examples, batch_size=6, seed=1, workers=workers, start=11), 39)
    for one, other in zip(whole[11:], resumed, strict=True):
        assert_same(one, other)
    single = take(train_batches(examples, batch_size=1, seed=1, workers=workers), 300)
    for key in single[0]:
        joined = [np.concatenate([batch[key] for batch in batches]) for batches in (single, whole)]
        np.testing.assert_array_equal(*joined)
    parts = [
        take(train_batches(examples, batch_size=6, seed=1, process_index=i, process_count=2), 9)
        for i in (0, 1)
    ]
    for one, other, both in zip(*parts, whole, strict=False):
        assert_same({key: np.concatenate([one[key], other[key]]) for key in one}, both)


def test_epochs_are_permutations_with_other_tokens_hidden(source):
    examples = source()
    batches = take(train_batches(examples, batch_size=1, seed=0), 3 * len(examples))

    def original(batch):
        word = batch["word"][0].copy()
        count = int(batch["masked_weight"].sum())
        word[batch["masked_position"][0, :count]] = batch["masked_word"][0, :count]
        return word.tobytes()

    epochs = [batches[i * len(examples) : (i + 1) * len(examples)] for i in range(3)]
    orders = [[original(batch) for batch in epoch] for epoch in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2]
    first, second = ({original(batch): batch for batch in epoch} for epoch in epochs[:2])
    assert len(first) == len(examples)
    assert np.mean([differ(first[key], second[key]) for key in first]) > 0.95


def test_processes_that_cannot_share(source):
    with pytest.raises(ConfigError, match="does not divide over 4 processes: use 8"):
        train_batches(source(), batch_size=6, seed=0, process_count=4).send(None)


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_sees_every_example_once(source, mode):
    examples = source(mode)
    batches = TextFeed(DataConfig(eval_batch_size=7), examples, examples).eval_batches(multiple_of=8)
    assert (batches.batch_size, len(batches)) == (8, -(-len(examples) // 8))
    seen, again = list(batches), list(batches)
    assert len(seen) == len(batches)
    for one, other in zip(seen, again, strict=True):
        assert_same(one, other)
    joined = {key: np.concatenate([batch[key] for batch in seen]) for key in seen[0]}
    assert joined["mask"].dtype == np.float32
    assert joined["mask"].tolist() == [1] * len(examples) + [0] * (len(joined["mask"]) - len(examples))
    assert not joined["masked_weight"][len(examples) :].any()
    for i in range(len(examples)):
        expected = examples.example(i, 0, 0)
        assert_same({key: joined[key][i] for key in expected}, expected)


def test_a_batch_whose_part_is_all_padding(source):
    examples = source()
    last = list(EvalBatches(examples, 2 * len(examples), workers=0, process_index=1, process_count=2))
    assert len(last) == 1
    assert not any(value.any() for value in last[0].values())
