"""Examples for the pre-training of BERT, by index and epoch."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jaxdl.data.parallel import process_map
from jaxdl.data.text.corpus import Corpus, default_directory, open_corpus
from jaxdl.data.text.documents import Documents
from jaxdl.data.text.examples import Units, check_pairs, chunks, full_sentences, packed, pair, units_of
from jaxdl.data.text.masking import Masking
from jaxdl.data.text.training import trained
from jaxdl.data.text.wordpiece import WordPiece, load
from jaxdl.data.types import Batch, Split
from jaxdl.errors import ConfigError, DataError

Mode = Literal["full_sentences", "sentence_pairs"]


@dataclass(frozen=True, eq=False)
class PretrainingSource:
    """Sequences with hidden tokens; a function of seed, epoch and index, whatever was asked for before.

    Attributes:
        corpus: the tokens.
        split: which documents of the corpus these are.
        tokenizer: their vocabulary.
        length: tokens in a sequence, L.
        mode: how sequences are made.
        masking: what is hidden; its `limit` is the number of predictions, P.
        units: the sentences of this split.
        spans: int64 [N, 2], the first unit of each sequence, and the one after its last.
    """

    corpus: Corpus
    split: Split
    tokenizer: WordPiece
    length: int
    mode: Mode
    masking: Masking = field(repr=False)
    units: Units = field(repr=False)
    spans: NDArray[np.int64] = field(repr=False)

    def __len__(self) -> int:
        return len(self.spans)

    def example(self, index: int, epoch: int, seed: int) -> Batch:
        """Returns one example.

        Args:
            index: of the sequence, in 0 ... len - 1.
            epoch: from 0; another has other tokens hidden, and other pairs.
            seed: at least 0.

        Returns:
            `word`, `segment`, `type` and `position`, int32 [L] (see `examples.packed`);
            `masked_position` and `masked_word`, int32 [P], and `masked_weight`, float32 [P] (see
            `masking.Masking`); for sentence pairs also `next`, int32 [].

        Raises:
            IndexError: there is no such example.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        rng = np.random.default_rng((seed, epoch, index))
        span = self.spans[index]
        if self.mode == "sentence_pairs":
            sequence = pair(self.corpus, self.units, span, self.length, self.tokenizer, rng)
        else:
            sequence = packed(self.corpus, self.units, span, self.length, self.tokenizer)
        return self.masking(sequence, rng)


def open_tokenizer(
    documents: Documents,
    vocabulary: Path | None = None,
    *,
    vocabulary_size: int = 8192,
    lowercase: bool = True,
    cache: Path | None = None,
    processes: int | None = None,
) -> WordPiece:
    """Loads a vocabulary, or makes one of a corpus and keeps it.

    Args:
        documents: the corpus, for training and evaluation the same.
        vocabulary: vocab.txt or tokenizer.json; None: make one.
        vocabulary_size: pieces in one that is made.
        lowercase: lower-case the text; tokenizer.json says so itself.
        cache: directory; by default `corpus.default_directory()`.
        processes: how many read the corpus; by default one for each core.

    Raises:
        DataError: the vocabulary or the corpus cannot be read, or the cache cannot be written.
    """
    if vocabulary is not None:
        return load(vocabulary, lowercase=lowercase)
    with process_map(_processes(processes)) as over:
        directory = cache or default_directory()
        return trained(documents, directory, over, size=vocabulary_size, lowercase=lowercase)


def pretraining_source(
    documents: Documents,
    tokenizer: WordPiece,
    split: Split = "train",
    *,
    mode: Mode = "full_sentences",
    length: int = 128,
    held_out: float = 0.01,
    mask_share: float = 0.15,
    max_predictions: int | None = None,
    whole_words: bool = False,
    cache: Path | None = None,
    processes: int | None = None,
) -> PretrainingSource:
    """Opens a corpus for pre-training; the first time its text is tokenised, which may take long.

    Args:
        documents: the corpus.
        tokenizer: the vocabulary.
        split: `train`, or `eval` for the documents that are held out.
        mode: `full_sentences` packs each sequence full; `sentence_pairs` is for next-sentence prediction
            too.
        length: tokens in a sequence.
        held_out: share of the documents that are for evaluation, evenly spread; 0: all are for either
            split.
        mask_share: share of the tokens to predict.
        max_predictions: the most predictions in a sequence; by default the share of the length,
            rounded up to a multiple of 4.
        whole_words: hide all pieces of a word or none.
        cache: directory; by default `corpus.default_directory()`.
        processes: how many tokenise; by default one for each core.

    Raises:
        ConfigError: `length` is too short for the mode.
        DataError: the corpus cannot be read, is empty or too small, or the cache cannot be written.
    """
    extra = 2 if mode == "full_sentences" else 3
    if length < extra + 5:
        raise ConfigError(f"data.length {length} is too short: set it to at least {extra + 5}")
    with process_map(_processes(processes)) as over:
        corpus = open_corpus(documents, tokenizer, cache or default_directory(), over)
    chosen = chosen_documents(len(corpus.documents) - 1, split, held_out)
    if not len(chosen):
        raise DataError(
            f"{corpus.name} has {len(corpus.documents) - 1} documents, of which none is for {split}: "
            "add more, separate them by blank lines, or change data.held_out"
        )
    units = units_of(corpus, chosen, length - extra)
    if mode == "sentence_pairs":
        check_pairs(corpus, units, split)
        spans = chunks(units, length)
    else:
        spans = full_sentences(units, length)
    # Published for 128 and 512 tokens: 20 and 80.
    limit = max_predictions or 4 * max(math.ceil(round(mask_share * length, 6) / 4), 1)
    if tokenizer.special.all():
        raise DataError("the vocabulary has special tokens only, so there is no word to hide")
    masking = Masking.of(tokenizer, share=mask_share, limit=limit, whole_words=whole_words)
    return PretrainingSource(corpus, split, tokenizer, length, mode, masking, units, spans)


def chosen_documents(count: int, split: Split, held_out: float) -> NDArray[np.int64]:
    """Returns the numbers of a split's documents, ascending: int64 [D].

    Those held out are evenly spread over the corpus and depend on nothing random.
    """
    number = np.arange(count)
    if not held_out:
        return number
    is_held = np.floor((number + 1) * held_out) > np.floor(number * held_out)
    return np.flatnonzero(is_held if split == "eval" else ~is_held)


def _processes(count: int | None) -> int:
    return len(os.sched_getaffinity(0)) if count is None else count
