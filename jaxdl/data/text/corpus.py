"""The tokens of a corpus on disk: made once, by several processes, and then mapped into memory.

A corpus is a directory with three arrays and a description. It is made under
another name and renamed when it is complete, so there is no half of one under
its own name; its name holds a digest of all that it depends on, so it is
never that of another text or tokenizer.
"""

import contextlib
import errno
import fcntl
import functools
import itertools
import json
import logging
import multiprocessing
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxdl.data.files import cache_directory, printable
from jaxdl.data.parallel import OrderedMap
from jaxdl.data.text.documents import Documents, digest_of
from jaxdl.data.text.growing import GrowingArray
from jaxdl.data.text.wordpiece import WordPiece, from_json, sentences
from jaxdl.errors import DataError

_log = logging.getLogger(__name__)

_FORMAT = 1  # counts changes of the files and of the way to split text into sentences
_ARRAYS = ("tokens", "sentences", "documents")
_DESCRIPTION = "corpus.json"
_CHUNK = 200_000  # characters of a task: some tenths of a second
_ABANDONED = 24 * 3600  # seconds after which an unfinished directory is removed


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents as numbers of word pieces; no sentence and no document is empty.

    Attributes:
        name: what messages call it.
        tokens: uint16 or uint32 [T], all documents one after the other, without special tokens.
        sentences: int64 [S + 1]; sentence s is `tokens[sentences[s] : sentences[s + 1]]`.
        documents: int64 [D + 1]; document d has the sentences `documents[d]` to `documents[d + 1] - 1`.
    """

    name: str
    tokens: NDArray[np.unsignedinteger[Any]] = field(repr=False)
    sentences: NDArray[np.int64] = field(repr=False)
    documents: NDArray[np.int64] = field(repr=False)


def default_directory() -> Path:
    """Returns where corpora lie: `jaxdl/text` within `XDG_CACHE_HOME` or ~/.cache."""
    return cache_directory("text")


def open_corpus(documents: Documents, tokenizer: WordPiece, directory: Path, over: OrderedMap) -> Corpus:
    """Opens the tokens of a corpus; makes them first where `directory` lacks them or they are damaged.

    Several processes may do so at once: one's work is kept, the others' is thrown away.

    Raises:
        DataError: the corpus cannot be read or has no text; the directory cannot be written.
    """
    key = digest_of(["corpus", _FORMAT, documents.digest, tokenizer.digest])
    place = directory / f"corpus-{key}"
    corpus = _load(place, documents.name)
    if corpus is not None:
        return corpus
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(directory)
        # Within the same directory, since a rename does not cross file systems.
        with tempfile.TemporaryDirectory(dir=directory, prefix=".building-") as scratch:
            built = Path(scratch, "corpus")
            built.mkdir()
            _build(built, documents, tokenizer, over)
            corpus = _publish(built, place, documents.name)
    except OSError as error:
        raise DataError(f"{printable(directory)} cannot be written ({error}): set data.cache") from error
    if corpus is None:
        raise DataError(f"{printable(place)} was damaged as soon as it was made: is the disk sound?")
    return corpus


def encode_documents(tokenizer: str, texts: list[str]) -> tuple[NDArray[np.uint32], list[list[int]]]:
    """Tokenises some documents.

    Args:
        tokenizer: path of the tokenizer's JSON.
        texts: the documents.

    Returns:
        uint32 [tokens], those of all documents, and for each document the lengths of its sentences;
        sentences and documents without tokens are left out.
    """
    if multiprocessing.parent_process() is not None:
        # There is a process for every core already.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    split = [sentences(text) for text in texts]
    encoded = iter(_tokenizer(tokenizer).encode([sentence for parts in split for sentence in parts]))
    numbers = [list(filter(None, itertools.islice(encoded, len(parts)))) for parts in split]
    flat = itertools.chain.from_iterable(itertools.chain.from_iterable(numbers))
    lengths = [[len(sentence) for sentence in document] for document in numbers if document]
    return np.fromiter(flat, np.uint32), lengths


@functools.lru_cache(maxsize=1)
def _tokenizer(path: str) -> WordPiece:
    return from_json(Path(path).read_text("utf-8"))


def _chunks(documents: Iterator[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _build(place: Path, documents: Documents, tokenizer: WordPiece, over: OrderedMap) -> None:
    started = time.monotonic()
    written = place.parent / "tokenizer.json"
    written.write_text(tokenizer.serialized, "utf-8")
    small = len(tokenizer) <= np.iinfo(np.uint16).max + 1
    with (
        GrowingArray(place / "tokens.npy", np.uint16 if small else np.uint32) as tokens,
        GrowingArray(place / "sentences.npy", np.int64) as sentence_ends,
        GrowingArray(place / "documents.npy", np.int64) as document_ends,
    ):
        sentence_ends.append(np.zeros(1, np.int64))
        document_ends.append(np.zeros(1, np.int64))
        encode = functools.partial(encode_documents, str(written))
        for numbers, lengths in over(encode, _chunks(documents.read(over))):
            flat = np.fromiter(itertools.chain.from_iterable(lengths), np.int64)
            counts = np.fromiter(map(len, lengths), np.int64)
            sentence_ends.append(len(tokens) + np.cumsum(flat))
            document_ends.append(len(sentence_ends) - 1 - len(flat) + np.cumsum(counts))
            tokens.append(numbers)
    if not len(tokens):
        raise DataError(f"{documents.name} has no text")
    files = {name: _checksum(place / f"{name}.npy") for name in _ARRAYS}
    (place / _DESCRIPTION).write_text(json.dumps({"name": documents.name, "files": files}), "utf-8")
    counted = (len(tokens), len(sentence_ends) - 1, len(document_ends) - 1)
    took = time.monotonic() - started
    _log.info(
        "%s: %d tokens, %d sentences, %d documents, tokenised in %.1f s", documents.name, *counted, took
    )


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Lets one process at a time publish in a directory, or what it publishes might be moved away as
    damaged."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        # Some network file systems have no locks; a lost race there is an error, and no wrong corpus.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _publish(built: Path, place: Path, name: str) -> Corpus | None:
    """Gives a complete directory its name, unless an equal one has it; a damaged one makes way."""
    with _alone(place.parent):
        for attempt in range(5):
            try:
                built.rename(place)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            corpus = _load(place, name)
            if corpus is not None:
                return corpus
            try:
                place.rename(built.with_name(f"damaged-{attempt}"))  # removed with the scratch directory
            except FileNotFoundError:  # another process was faster
                continue
            _log.warning("%s was damaged and is made anew", printable(place))
    return None


def _load(place: Path, name: str) -> Corpus | None:
    """Opens a corpus if it is there and exactly what was written."""
    try:
        description = json.loads((place / _DESCRIPTION).read_text("utf-8"))
        if any(_checksum(place / f"{array}.npy") != description["files"][array] for array in _ARRAYS):
            return None
        arrays = {array: np.load(place / f"{array}.npy", mmap_mode="r") for array in _ARRAYS}
    except (OSError, ValueError, KeyError, TypeError):  # absent, cut off, or no description of ours
        return None
    # The small ones lie in memory: reading a mapped array element by element is slow.
    return Corpus(name, arrays["tokens"], np.array(arrays["sentences"]), np.array(arrays["documents"]))


def _checksum(path: Path) -> list[int]:
    """Returns the size of a file and its CRC-32, which reads a gigabyte or more a second."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return [size, checksum]


def _remove_abandoned(directory: Path) -> None:
    """Removes what processes that were killed have left, a day later: they might still be at work."""
    for path in directory.glob(".building-*"):
        try:
            old = time.time() - path.stat().st_mtime > _ABANDONED
        except FileNotFoundError:
            continue
        if old:
            shutil.rmtree(path, ignore_errors=True)
