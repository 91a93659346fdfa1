"""Runs that train a BERT on text: pre-training and fine-tuning."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from jaxdl.config.fields import STRICT, Fraction, Positive, refuse
from jaxdl.config.run import Config, DataConfig, ModelConfig

_SIZES = ("depth", "width", "heads", "mlp", "positions")


@dataclass(frozen=True, config=STRICT)
class BertModelConfig(ModelConfig):
    """The network."""

    name: Literal[
        "bert_tiny", "bert_mini", "bert_small", "bert_medium", "bert_base", "bert_large", "pretrained"
    ] = "bert_mini"
    """Architecture (Devlin et al. 2018; Turc et al. 2019 for the small ones); `pretrained` is that of
    `weights`."""

    weights: str | None = None
    """Weights to start from: a directory with config.json and model.safetensors in Hugging Face's layout, or
    that of a run of ours. Heads that it has not start at random."""

    depth: Positive | None = None
    """Encoder layers (null: those of the architecture, and so for the next three)."""

    width: Positive | None = None
    """Width of the hidden states, a multiple of `heads`."""

    heads: Positive | None = None
    """Attention heads of each layer."""

    mlp: Positive | None = None
    """Width of the hidden layer of each perceptron."""

    positions: Positive | None = None
    """The longest sequence, which is the number of position vectors (null: 512)."""

    words_multiple: Positive = 1
    """Round the table of words up to a multiple of this with words that never occur, so that
    `parallel.tensor` devices can share it."""

    dropout: Fraction = 0.1
    """Share of the embeddings and of each branch's result that is dropped in training."""

    attention_dropout: Fraction = 0.1
    """Share of the attention weights that is dropped in training; 0 lets GPUs use cuDNN's fused kernel."""

    pre_norm: bool = False
    """Normalise the input of each branch of a layer, rather than the sum after it (Xiong et al. 2020): it
    learns faster early on and with less warm-up, but is not the published network."""

    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Who computes attention where no weights are dropped: the compiler, or cuDNN's fused kernel, which does
    not store them; `auto` takes cuDNN on GPUs with 16-bit dtypes."""

    scan: bool = True
    """Compile one layer and loop over it: faster to compile; false needs less memory."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.name == "pretrained":
            given = [f"model.{field}" for field in _SIZES if getattr(self, field)]
            if given:
                problems.append(f"model.name pretrained leaves {', '.join(given)} to the weights")
            if not self.weights:
                problems.append("model.name pretrained is what the weights are of: set model.weights")
        if self.width and self.heads and self.width % self.heads:
            problems.append(f"model.width {self.width} is not a multiple of model.heads {self.heads}")
        if self.attention == "cudnn" and self.attention_dropout:
            problems.append(
                "model.attention cudnn drops no weights: set model.attention_dropout to 0, or take auto"
            )
        refuse(problems)
        return self


@dataclass(frozen=True, config=STRICT)
class TextDataConfig(DataConfig):
    """The corpus and how sequences are made of it."""

    name: Literal["english", "text", "text_tfds"] = "english"
    """Corpus: `english` (Python's documentation and the docstrings of installed packages, some 3 million
    tokens), `text` (the file `dir`, or all .txt files in it), `text_tfds` (a text set prepared as
    array_record files in `dir`)."""

    documents: Literal["file", "blank_line"] = "file"
    """Text only: what ends a document, the end of the file, or a blank line too."""

    dataset: str | None = None
    """TFDS only: the data set's name, as `lm1b` or `wikipedia/20230601.en:1.0.0`."""

    split: str = "train"
    """TFDS only: split to read."""

    feature: str = "text"
    """TFDS only: feature with the text."""

    vocabulary: str | None = None
    """Vocabulary of word pieces: vocab.txt or tokenizer.json (null: made of the corpus)."""

    vocabulary_size: Annotated[int, Field(ge=256, le=2**20)] = 8192
    """Pieces in a vocabulary that is made."""

    lowercase: bool = True
    """Lower-case the text and strip accents; tokenizer.json says so itself."""

    sequences: Literal["full_sentences", "sentence_pairs"] = "full_sentences"
    """`full_sentences` packs sequences full, with attention within each document only (Liu et al. 2019);
    `sentence_pairs` is for next-sentence prediction too (Devlin et al. 2018)."""

    length: Positive = 128
    """Tokens in a sequence."""

    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Share of the documents that are kept for evaluation, evenly spread."""

    mask_share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens to predict."""

    max_predictions: Positive | None = None
    """The most predictions in a sequence (null: the share of the length, rounded up to a multiple of 4)."""

    whole_words: bool = False
    """Hide all pieces of a word or none."""

    cache: str | None = None
    """Directory for vocabularies and tokenised corpora (null: jaxdl/text in the user's cache)."""

    processes: Positive | None = None
    """Processes that tokenise (null: one for each core)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.name in ("text", "text_tfds") and not self.dir:
            problems.append(f"data.name {self.name} is read from files: set data.dir")
        if self.name == "text_tfds" and not self.dataset:
            problems.append("data.name text_tfds needs a data set: set data.dataset, as lm1b")
        if self.max_predictions and self.max_predictions > self.length:
            problems.append(
                f"data.max_predictions {self.max_predictions} is more than data.length {self.length} tokens"
            )
        refuse(problems)
        return self


@dataclass(frozen=True, config=STRICT)
class BertConfig(Config):
    """A whole run that pre-trains a BERT."""

    model: BertModelConfig = BertModelConfig()
    data: TextDataConfig = TextDataConfig()

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        _refuse_long(self.data.length, self.model)
        _refuse_smoothing(self)
        return self


@dataclass(frozen=True, config=STRICT)
class LabelledDataConfig(DataConfig):
    """Labelled texts."""

    name: Literal["classification", "squad"] = "classification"
    """Task: `classification` of texts or pairs of texts (.tsv, .csv or .jsonl files), or answers to questions
    as passages of a text (`squad`: JSON of SQuAD 1.1 or 2.0)."""

    train_file: str | None = None
    """File to learn from."""

    eval_file: str | None = None
    """File to evaluate on (null: `held_out` of the other)."""

    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of `train_file` to evaluate on where there is no `eval_file` (classification only)."""

    text_column: str = "text"
    """Classification only: column of the text."""

    text_pair_column: str | None = None
    """Classification only: column of the second text, for pairs."""

    label_column: str = "label"
    """Classification only: column of the class."""

    vocabulary: str | None = None
    """Vocabulary of word pieces, vocab.txt or tokenizer.json (null: that of `model.weights`)."""

    lowercase: bool = True
    """Lower-case the text and strip accents; tokenizer.json says so itself."""

    length: Positive = 128
    """Tokens in a sequence; longer texts are cut, longer passages divided into windows."""

    stride: Positive = 64
    """Squad only: tokens that a window shares with the one before."""

    question_length: Positive = 64
    """Squad only: tokens of a question that are kept."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.name == "squad" and not self.eval_file:
            problems.append("data.name squad is evaluated on a file of its own: set data.eval_file")
        refuse(problems)
        return self


@dataclass(frozen=True, config=STRICT)
class FinetuneConfig(Config):
    """A whole run that fine-tunes a BERT."""

    model: BertModelConfig = BertModelConfig()
    data: LabelledDataConfig = LabelledDataConfig()

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if not self.data.train_file:
            refuse(["the file to learn from is missing: set data.train_file"])
        if self.data.name == "squad":
            _refuse_smoothing(self)
        _refuse_long(self.data.length, self.model)
        return self


def _refuse_smoothing(config: Config) -> None:
    if config.optimizer.label_smoothing:
        smoothing = config.optimizer.label_smoothing
        refuse([f"optimizer.label_smoothing {smoothing:g} is for classes, not for words: leave it at 0"])


def _refuse_long(length: int, model: BertModelConfig) -> None:
    positions = model.positions or 512
    if length > positions and model.name != "pretrained":
        refuse([f"data.length {length} is more than model.positions {positions}: raise that"])
