"""Text to the numbers of word pieces (Wu et al. 2016), as BERT splits it (Devlin et al. 2018)."""

import functools
import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from jaxdl.data.files import printable
from jaxdl.data.text.documents import digest_of
from jaxdl.errors import DataError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Tokens that are no text; in a vocabulary trained here their numbers are 0 to 4."""

CONTINUES = "##"
"""What a piece that does not start a word begins with."""

_CAPITAL = 0.05  # share of pieces with capitals that a vocabulary of lower-cased text has not
_MANY = 1000  # pieces among which some of a cased vocabulary have capitals

# An end of a sentence: its sign, closing quotes or brackets, and a space before what is no small letter.
_END = re.compile(r"""([.!?]["'”’)\]]*) +(?=\W{0,3}[^\Wa-z_])|(?<=[。！？])""")
_PARAGRAPH = re.compile(r"\n\s*\n")


@dataclass(frozen=True, eq=False)
class WordPiece:
    """A vocabulary and the way from text to it.

    Attributes:
        serialized: the tokenizer as the JSON of the `tokenizers` library.
        tokens: the piece of each number; empty where a number has none.
        special: bool [V]; True for numbers that stand for no text: special tokens, and those without
            piece.
        starts: bool [V]; True for pieces with which a word starts.
        digest: hexadecimal; another for a tokenizer that gives other numbers.
    """

    serialized: str = field(repr=False)
    tokens: tuple[str, ...] = field(repr=False)
    special: NDArray[np.bool_] = field(repr=False)
    starts: NDArray[np.bool_] = field(repr=False)
    digest: str
    _tokenizer: Tokenizer = field(repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def pad(self) -> int:
        """Number of [PAD]."""
        return self.tokens.index("[PAD]")

    @functools.cached_property
    def cls(self) -> int:
        """Number of [CLS]."""
        return self.tokens.index("[CLS]")

    @functools.cached_property
    def sep(self) -> int:
        """Number of [SEP]."""
        return self.tokens.index("[SEP]")

    @functools.cached_property
    def mask(self) -> int:
        """Number of [MASK]."""
        return self.tokens.index("[MASK]")

    @functools.cached_property
    def lowercase(self) -> bool:
        """Whether text is lower-cased."""
        return bool((json.loads(self.serialized).get("normalizer") or {}).get("lowercase", False))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the numbers of each text's pieces, without [CLS] and [SEP].

        The text "[SEP]" is three pieces of text, never the special token.
        """
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Returns the numbers of each text's pieces, as `encode`, and where they are in the text.

        A place is the piece's first character and the one after its last, in the text as it was before
        lower-casing and the like: `text[first:last]` reads a piece back as it was written. Combining
        accents are a part of the piece before them, also where the vocabulary has none.
        """
        # Not the fast way of `encode`: all its places are 0.
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            (encoding.ids, _with_accents(text, encoding.offsets))
            for text, encoding in zip(texts, encodings, strict=True)
        ]


def _with_accents(text: str, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extends places over the combining accents that follow them, which stripping left in none."""
    extended = []
    limits = [*(start for start, _ in places), len(text)][1:]
    for (start, end), limit in zip(places, limits, strict=True):
        after = end
        while after < limit and unicodedata.category(text[after]) == "Mn":
            after += 1
        extended.append((start, after))
    return extended


def sentences(document: str) -> list[str]:
    """Splits a document at blank lines and after the signs that end sentences; a rule, good for prose.

    An abbreviation before a capital ("Dr. Who") ends a sentence too: sentences here are where sequences
    may be cut, and such a cut does no harm.
    """
    joined = (" ".join(paragraph.split()) for paragraph in _PARAGRAPH.split(document))
    return [part for paragraph in joined for part in _END.sub(r"\1\n", paragraph).split("\n") if part]


def from_vocabulary(tokens: Sequence[str], *, lowercase: bool) -> WordPiece:
    """Makes BERT's tokenizer of a vocabulary.

    Args:
        tokens: the piece of each number, `SPECIAL` among them.
        lowercase: lower-case text and strip its accents, as BERT's uncased models do.

    Raises:
        DataError: a piece is there twice, or a special token is not.
    """
    numbers = {token: number for number, token in enumerate(tokens)}
    if len(numbers) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if numbers[token] != number)
        raise DataError(f"the vocabulary has the piece {twice!r} twice")
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _wordpiece(tokenizer)


def normalizer(*, lowercase: bool) -> normalizers.BertNormalizer:
    """Returns BERT's clean-up: no control characters, spaces around Chinese ones, maybe lower case."""
    return normalizers.BertNormalizer(lowercase=lowercase)


def load(path: Path, *, lowercase: bool) -> WordPiece:
    """Loads a vocabulary: `*.json` of the `tokenizers` library, otherwise a piece a line (vocab.txt).

    Args:
        path: the file.
        lowercase: as for `from_vocabulary`; a JSON file says so itself.

    Raises:
        DataError: the file is missing, damaged, no word-piece vocabulary with BERT's special tokens, or
            of another case than `lowercase` says.
    """
    name = printable(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 at byte {error.start} ({error.reason})") from error
    try:
        if path.suffix == ".json":
            return from_json(text)
        # Not splitlines: a piece may be a character that it takes for the end of a line.
        lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
        _check_case(lines, lowercase=lowercase)
        return from_vocabulary(lines, lowercase=lowercase)
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def _check_case(tokens: Sequence[str], *, lowercase: bool) -> None:
    """Refuses the wrong case: training would go on, with much text as [UNK] or many pieces idle."""
    pieces = [token for token in tokens if token.lower() != token.upper() and not token.startswith("[")]
    capital = sum(token != token.lower() for token in pieces) / max(1, len(pieces))
    if lowercase and capital > _CAPITAL:
        raise DataError(f"{capital:.0%} of the pieces have capital letters: set data.lowercase false")
    if not lowercase and not capital and len(pieces) >= _MANY:
        raise DataError("no piece has a capital letter: set data.lowercase true")


def from_json(text: str) -> WordPiece:
    """Makes a tokenizer of the JSON of the `tokenizers` library.

    Truncation, padding and special tokens that it would add are switched off: examples add their own.

    Raises:
        DataError: it is damaged, another kind of tokenizer, or lacks a special token.
    """
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"not a tokenizer ({error})") from error
    if not isinstance(tokenizer.model, models.WordPiece):
        raise DataError(f"a tokenizer of kind {type(tokenizer.model).__name__}, not WordPiece")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _wordpiece(tokenizer)


def _wordpiece(tokenizer: Tokenizer) -> WordPiece:
    tokenizer.encode_special_tokens = True  # a "[MASK]" in the text is text
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    missing = [token for token in SPECIAL if token not in vocabulary]
    if missing:
        raise DataError(f"the vocabulary lacks {' '.join(missing)}")
    tokens = [""] * (max(vocabulary.values()) + 1)
    for token, number in vocabulary.items():
        tokens[number] = token
    serialized = tokenizer.to_str()
    described: dict[str, Any] = json.loads(serialized)
    special = {
        "",
        *SPECIAL,
        *(token["content"] for token in described["added_tokens"] if token["special"]),
    }
    prefix = described["model"]["continuing_subword_prefix"]
    return WordPiece(
        serialized=serialized,
        tokens=tuple(tokens),
        special=np.array([token in special for token in tokens]),
        starts=np.array([not token.startswith(prefix) or token == prefix for token in tokens]),
        digest=digest_of([json.dumps(described, sort_keys=True), *tokens]),
        _tokenizer=tokenizer,
    )
