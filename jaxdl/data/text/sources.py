"""The corpus of a configuration, and what guessing without reading would score on it."""

import os.path
from pathlib import Path
from typing import Any

import numpy as np

from jaxdl.config import LabelledDataConfig, TextDataConfig
from jaxdl.data.files import printable
from jaxdl.data.text.documents import Documents, open_files, open_tfds_text
from jaxdl.data.text.embedded import open_embedded
from jaxdl.data.text.labelled import LabelledSource, open_labelled
from jaxdl.data.text.pretraining import PretrainingSource, open_tokenizer, pretraining_source
from jaxdl.data.text.squad import SquadSource, open_squad
from jaxdl.data.text.wordpiece import WordPiece, load
from jaxdl.errors import ConfigError, DataError

_AT_ONCE = 1 << 20  # units of text whose words are counted at once


def open_documents(config: TextDataConfig) -> Documents:
    """Opens the documents that `data.name` names.

    Raises:
        ConfigError: there is no such TFDS split or feature.
        DataError: they are missing or cannot be read.
    """
    if config.name == "english":
        return open_embedded()
    directory = Path(config.dir or "").expanduser()
    if config.name == "text_tfds":
        return open_tfds_text(directory, config.dataset or "", config.split, config.feature)
    return open_files(directory, config.documents)


def open_pretraining(
    config: TextDataConfig, known: Path | None = None
) -> tuple[PretrainingSource, PretrainingSource]:
    """Opens a corpus for pre-training: what is learnt from, and what is held out.

    Args:
        config: the section `data`.
        known: vocabulary of the weights that training starts from: no other will do, and none is made.

    Raises:
        ConfigError: the settings do not fit together or the data.
        DataError: the corpus or the vocabulary cannot be read, or the cache not written.
    """
    try:
        documents = open_documents(config)
        cache = None if config.cache is None else Path(config.cache).expanduser()
        tokenizer = open_tokenizer(
            documents,
            known if config.vocabulary is None else Path(config.vocabulary).expanduser(),
            vocabulary_size=config.vocabulary_size,
            lowercase=config.lowercase,
            cache=cache,
            processes=config.processes,
        )
        # Where none is named, the known one is what was loaded.
        if known is not None and config.vocabulary is not None:
            _require_same(known, tokenizer, config.vocabulary)
        train, evaluation = (
            pretraining_source(
                documents,
                tokenizer,
                split,
                mode=config.sequences,
                length=config.length,
                held_out=config.held_out,
                mask_share=config.mask_share,
                max_predictions=config.max_predictions,
                whole_words=config.whole_words,
                cache=cache,
                processes=config.processes,
            )
            for split in ("train", "eval")
        )
    except (OSError, RuntimeError) as error:  # an impossible path: too long, no such user, not permitted
        raise DataError(f"data.dir {config.dir}: {printable(str(error))}") from error
    return train, evaluation


def _require_same(known: Path, tokenizer: WordPiece, name: str) -> None:
    if load(known, lowercase=tokenizer.lowercase).tokens != tokenizer.tokens:
        raise ConfigError(
            f"data.vocabulary {name} is not that of the weights, {printable(known)}: leave it out"
        )


def unigram_baseline(train: PretrainingSource, evaluation: PretrainingSource) -> dict[str, float]:
    """Scores what knows only how frequent each word is, on the hidden words of an evaluation.

    Returns:
        `unigram_accuracy`, of the training text's most frequent word as the answer to everything, and
        `unigram_perplexity`, of the words' frequencies there plus one.
    """
    units, tokens = train.units, train.corpus.tokens
    counts = np.ones(len(train.tokenizer), np.int64)
    for first in range(0, len(units), _AT_ONCE):
        starts = units.start[first : first + _AT_ONCE]
        sizes = np.diff(units.total[first : first + len(starts) + 1])
        # The units of a document lie one after the other, so few pieces of the corpus hold them all.
        edges = np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1
        for low, high in zip([0, *edges], [*edges, len(starts)], strict=True):
            piece = tokens[starts[low] : starts[high - 1] + sizes[high - 1]]
            counts += np.bincount(piece, minlength=len(counts))
    # What is never hidden is no answer.
    counts[train.tokenizer.special] = 0
    logarithm = np.log(np.maximum(counts, 1)) - np.log(counts.sum())
    commonest, right, losses, words = int(counts.argmax()), 0, 0.0, 0
    for index in range(len(evaluation)):
        example = evaluation.example(index, 0, 0)
        hidden = example["masked_word"][example["masked_weight"] > 0]
        right += int((hidden == commonest).sum())
        losses -= float(logarithm[hidden].sum())
        words += len(hidden)
    words = max(words, 1)
    return {"unigram_accuracy": right / words, "unigram_perplexity": float(np.exp(losses / words))}


def _expanded(name: str) -> Path:
    return Path(os.path.expanduser(name))  # noqa: PTH111 - leaves a ~user that does not exist


def open_labelled_texts(
    config: LabelledDataConfig, tokenizer: WordPiece
) -> tuple[LabelledSource, LabelledSource] | tuple[SquadSource, SquadSource]:
    """Opens labelled texts, or questions with answers: what is learnt from, and what it is evaluated on.

    Raises:
        ConfigError: there is no such column or kind of file, or the lengths do not fit together.
        DataError: a file cannot be read, or is not what it should be.
    """
    path = _expanded(config.train_file or "")
    other = None if config.eval_file is None else _expanded(config.eval_file)
    if config.name == "squad":
        lengths = {
            "length": config.length,
            "stride": config.stride,
            "question_length": config.question_length,
        }
        return open_squad(path, tokenizer, **lengths), open_squad(other or path, tokenizer, **lengths)
    columns: dict[str, Any] = {
        "text": config.text_column, "text_pair": config.text_pair_column, "label": config.label_column,
    }  # fmt: skip
    source = open_labelled(path, tokenizer, length=config.length, **columns)
    if other is None:
        return source.split(config.held_out)
    classes = source.classes
    return source, open_labelled(other, tokenizer, length=config.length, classes=classes, **columns)
