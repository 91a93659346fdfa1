"""Small corpora and vocabularies for the tests of text."""

import numpy as np

from jaxdl.data.text.corpus import Corpus
from jaxdl.data.text.documents import Documents, digest_of
from jaxdl.data.text.wordpiece import SPECIAL, from_vocabulary

LETTERS = [chr(ord("a") + i) for i in range(26)]
WORDS = [f"{a}{b}" for a in LETTERS for b in LETTERS]
TAILS = [f"##{word}" for word in WORDS]


def vocabulary(*, first=()):
    """Words of two letters and pieces of two letters; `first`: pieces before the special tokens."""
    tokens = [*first, *SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), ".", *WORDS, *TAILS]
    return from_vocabulary(
        [token for i, token in enumerate(tokens) if token not in tokens[:i]], lowercase=True
    )


def corpus_of(documents):
    """A corpus of lists of sentences, each a list of token numbers."""
    sentences = [sentence for document in documents for sentence in document]
    return Corpus(
        "lists",
        np.array([token for sentence in sentences for token in sentence], np.uint16),
        np.cumsum([0, *map(len, sentences)]),
        np.cumsum([0, *map(len, documents)]),
    )


def numbered(sizes, *, start=5):
    """A corpus whose tokens count up from `start`; `sizes`: for each document those of its sentences."""
    count = start
    documents = []
    for lengths in sizes:
        documents.append([])
        for length in lengths:
            documents[-1].append(list(range(count, count + length)))
            count += length
    return corpus_of(documents)


def random_sizes(seed, documents=60, longest=40):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, longest, size=rng.integers(1, 12)).tolist() for _ in range(documents)]


def texts(seed=0, documents=40):
    """Documents of random sentences of words of one or two pieces."""
    rng = np.random.default_rng(seed)

    def sentence():
        return " ".join("".join(rng.choice(WORDS, rng.integers(1, 3))) for _ in range(rng.integers(3, 12)))

    return [" ".join(f"{sentence()}. X" for _ in range(rng.integers(2, 9))) for _ in range(documents)]


def documents_of(content, name="memory"):
    return Documents(name, digest_of(content), lambda over: iter(content))
