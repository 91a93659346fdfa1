"""What guessing scores, and what of a vocabulary or a share cannot be."""

import numpy as np
import pytest

from jaxdl.config import TextDataConfig
from jaxdl.data.text.sources import open_pretraining, unigram_baseline
from jaxdl.data.text.wordpiece import SPECIAL
from jaxdl.errors import DataError


def opened(tmp_path, words, documents, **settings):
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join([*SPECIAL, *words]))
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    return open_pretraining(
        TextDataConfig(
            name="text", dir=str(tmp_path / "text.txt"), documents="blank_line", vocabulary=str(vocabulary),
            length=16, cache=str(tmp_path / "cache"), processes=1, **settings,
        )
    )  # fmt: skip


def test_the_baseline_guesses_the_commonest_word_that_can_be_hidden(tmp_path):
    # Of 10 words in each document 5 are unknown, 3 are "a" and 2 are "b"; unknown ones are never hidden.
    train, evaluation = opened(tmp_path, "ab", ["a b x y z a x b a y"] * 8, held_out=0.25)
    baseline = unigram_baseline(train, evaluation)
    hidden = [
        word
        for index in range(len(evaluation))
        for example in [evaluation.example(index, 0, 0)]
        for word in example["masked_word"][example["masked_weight"] > 0]
    ]
    commonest = train.tokenizer.tokens.index("a")
    assert set(hidden) <= {commonest, train.tokenizer.tokens.index("b")}
    assert baseline["unigram_accuracy"] == np.mean(np.array(hidden) == commonest)
    counts = {commonest: 3 * 6 + 1, train.tokenizer.tokens.index("b"): 2 * 6 + 1}
    losses = [-np.log(counts[word] / sum(counts.values())) for word in hidden]
    assert baseline["unigram_perplexity"] == pytest.approx(np.exp(np.mean(losses)))


def test_a_vocabulary_without_words_is_refused(tmp_path):
    with pytest.raises(DataError, match="no word to hide"):
        opened(tmp_path, "", ["a b c"] * 8, held_out=0.25)


def test_however_small_the_share_a_word_is_hidden_in_each_sequence(tmp_path):
    _, evaluation = opened(tmp_path, "abc", ["a b c"] * 8, held_out=0.25, mask_share=1e-9)
    assert all(evaluation.example(i, 0, 0)["masked_weight"].sum() == 1 for i in range(len(evaluation)))
