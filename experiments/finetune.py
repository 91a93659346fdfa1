"""Fine-tunes a BERT on labelled texts or questions: `python -m experiments.finetune --help`."""

import json
import os.path
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.bert import build_network
from jaxdl import commandline, environment
from jaxdl.config import FinetuneConfig
from jaxdl.errors import ConfigError

if TYPE_CHECKING:
    from jaxdl.data.text.wordpiece import WordPiece
    from jaxdl.train.finetuning import QuestionAnswering, SequenceClassification

PRESETS = Path(__file__).resolve().parents[1] / "configs" / "finetune"


def run(config: FinetuneConfig) -> int:
    """Opens the texts, builds the network and its head, and trains them."""
    environment.prepare(config.memory.allocator)
    # JAX is imported only now: it reads the environment, and `--help` should not wait for it.
    from jaxdl.data.text.batches import TextFeed
    from jaxdl.data.text.labelled import LabelledSource
    from jaxdl.data.text.sources import open_labelled_texts
    from jaxdl.parallel.processes import joined
    from jaxdl.train.loop import train
    from jaxdl.train.pretrained import NETWORK, TOKENIZER, description, initial_values

    environment.compilation_cache()
    with joined(config.parallel):
        tokenizer = load_tokenizer(config)
        learnt, held_out = open_labelled_texts(config.data, tokenizer)
        for text in remarks(learnt):
            print(text, file=sys.stderr)
        task = build_task(config, held_out, words=len(tokenizer))
        files = {TOKENIZER: tokenizer.serialized, NETWORK: description(task.bert)}
        if isinstance(held_out, LabelledSource):
            files["classes.json"] = json.dumps(held_out.classes, indent=1)
        return train(
            config,
            task,
            TextFeed(config.data, learnt, held_out),
            experiment="finetune",
            initial=initial_values(config.model, task),
            files=files,
        )


def remarks(learnt: Any) -> list[str]:
    """Says what a person should know of the texts to learn from."""
    from jaxdl.data.text.labelled import LabelledSource

    if isinstance(learnt, LabelledSource):
        cut = learnt.truncated
        return [f"{cut:,} of {len(learnt):,} texts are longer than data.length and cut"] * (cut > 0)
    skipped = learnt.skipped
    return [f"{skipped:,} questions have answers that are not in their text: learnt as without"] * (
        skipped > 0
    )


def load_tokenizer(config: FinetuneConfig) -> "WordPiece":
    """Loads the vocabulary that the weights were trained with, or the one that is named.

    Raises:
        ConfigError: there is none.
        DataError: it cannot be read.
    """
    from jaxdl.data.text.wordpiece import load
    from jaxdl.train.pretrained import vocabulary_of

    if config.data.vocabulary is not None:
        path = Path(os.path.expanduser(config.data.vocabulary))  # noqa: PTH111 - leaves a ~user that is not there
        return load(path, lowercase=config.data.lowercase)
    if not config.model.weights:
        raise ConfigError(
            "data.vocabulary is missing: set it, or set model.weights to a directory with weights and their "
            "vocabulary"
        )
    known = vocabulary_of(config.model)
    if known is None:
        raise ConfigError(
            f"model.weights: {config.model.weights} has neither tokenizer.json nor vocab.txt: set "
            "data.vocabulary"
        )
    return load(known, lowercase=config.data.lowercase)


def build_task(
    config: FinetuneConfig, held_out: Any, *, words: int
) -> "QuestionAnswering | SequenceClassification":
    """Builds the network with the head for what the texts ask.

    Args:
        config: the whole run.
        held_out: the texts to evaluate on, which know the classes or how answers are scored.
        words: pieces in the vocabulary.

    Raises:
        ConfigError: the network cannot be run as configured.
    """
    from jaxdl.precision import parse_policy
    from jaxdl.train.finetuning import QuestionAnswering, SequenceClassification

    bert = build_network(config, config.model, words=words)
    shared: dict[str, Any] = {"output_dtype": parse_policy(config.precision.policy).output}
    if config.data.length > bert.sizes.positions:
        raise ConfigError(
            f"data.length {config.data.length}: the network has {bert.sizes.positions} positions, so take at "
            "most that"
        )
    if config.data.name == "squad":
        return QuestionAnswering(bert, config.data.length, score=held_out.score, **shared)
    return SequenceClassification(
        bert,
        config.data.length,
        classes=len(held_out.classes),
        dropout=config.model.dropout,
        label_smoothing=config.optimizer.label_smoothing,
        **shared,
    )


if __name__ == "__main__":
    commandline.main(
        run,
        program="python -m experiments.finetune",
        config=FinetuneConfig,
        default_preset=PRESETS / "classification.yaml",
        description="Fine-tune a BERT to tell classes of texts or to answer questions.",
    )
