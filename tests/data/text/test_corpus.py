"""The tokens on disk: right, made once, whole or not there, and never those of something else."""

import itertools
import multiprocessing
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxdl.data.parallel import in_turn, process_map
from jaxdl.data.text import corpus as corpora
from jaxdl.data.text.corpus import default_directory, open_corpus
from jaxdl.data.text.documents import open_files
from jaxdl.data.text.growing import GrowingArray
from jaxdl.data.text.training import trained
from jaxdl.data.text.wordpiece import sentences
from jaxdl.errors import DataError
from tests.data.text.corpora import documents_of, texts, vocabulary

TEXTS = ["", *texts(), " . "]


@pytest.fixture
def builds(monkeypatch):
    """Counts how often a corpus is made."""
    made = []
    build = corpora._build
    monkeypatch.setattr(corpora, "_build", lambda *arguments: (made.append(1), build(*arguments)))
    return made


def contents(corpus):
    return [
        [corpus.tokens[a:b].tolist() for a, b in itertools.pairwise(corpus.sentences[low : high + 1])]
        for low, high in itertools.pairwise(corpus.documents)
    ]


def test_tokens_are_those_of_the_documents(tmp_path, builds):
    tokenizer = vocabulary()
    corpus = open_corpus(documents_of(TEXTS), tokenizer, tmp_path, in_turn)
    expected = [tokenizer.encode(sentences(text)) for text in TEXTS if text]
    assert contents(corpus) == expected
    assert corpus.tokens.dtype == np.uint16
    assert contents(open_corpus(documents_of(TEXTS), tokenizer, tmp_path, in_turn)) == expected
    assert len(builds) == 1
    assert [path.name for path in tmp_path.iterdir()] == [next(tmp_path.glob("corpus-*")).name]


@pytest.mark.slow
def test_processes_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "_CHUNK", 500)
    alone = open_corpus(documents_of(TEXTS), vocabulary(), tmp_path / "a", in_turn)
    with process_map(2) as over:
        shared = open_corpus(documents_of(TEXTS), vocabulary(), tmp_path / "b", over)
    assert contents(shared) == contents(alone)
    for name in corpora._ARRAYS:
        one, other = (next((tmp_path / side).glob(f"*/{name}.npy")).read_bytes() for side in "ab")
        assert one == other


def test_a_change_of_text_or_tokenizer_is_another_corpus(tmp_path, builds):
    path = tmp_path / "text"
    path.mkdir()
    (path / "a.txt").write_text("aa ab. Ac")
    cache = tmp_path / "cache"
    first = contents(open_corpus(open_files(path), vocabulary(), cache, in_turn))
    (path / "a.txt").write_text("aa ab. Ad ae")
    second = contents(open_corpus(open_files(path), vocabulary(), cache, in_turn))
    third = contents(open_corpus(open_files(path), vocabulary(first=["zz"]), cache, in_turn))
    assert len(builds) == 3
    assert first != second != third


def damage_nothing(place):
    """The corpus is sound."""


def cut(place):
    path = place / "tokens.npy"
    path.write_bytes(path.read_bytes()[:-2])


def flip(place):
    path = place / "tokens.npy"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def remove(place):
    (place / "sentences.npy").unlink()


def scribble(place):
    (place / "corpus.json").write_text("[]")


def empty(place):
    for path in place.iterdir():
        path.unlink()


@pytest.mark.parametrize("damage", [damage_nothing, cut, flip, remove, scribble, empty])
def test_damage_is_repaired(tmp_path, builds, damage):
    expected = contents(open_corpus(documents_of(TEXTS), vocabulary(), tmp_path, in_turn))
    (place,) = tmp_path.iterdir()
    damage(place)
    assert contents(open_corpus(documents_of(TEXTS), vocabulary(), tmp_path, in_turn)) == expected
    assert len(builds) == (1 if damage is damage_nothing else 2)
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("damaged", [False, True])
def test_made_twice_at_once(tmp_path, monkeypatch, damaged):
    """Both start before either has finished."""
    tokenizer = vocabulary()
    if damaged:
        open_corpus(documents_of(TEXTS), tokenizer, tmp_path, in_turn)
        cut(next(tmp_path.iterdir()))
    barrier = threading.Barrier(2)
    publish = corpora._publish

    def together(*arguments):
        barrier.wait()
        return publish(*arguments)

    monkeypatch.setattr(corpora, "_publish", together)
    found = [None, None]

    def make(i):
        found[i] = contents(open_corpus(documents_of(TEXTS), tokenizer, tmp_path, in_turn))

    threads = [threading.Thread(target=make, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is not None
    assert found[0] == found[1]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failure_leaves_nothing(tmp_path):
    def fail(over):
        yield "aa"
        raise DataError("the disk is gone")

    documents = documents_of(TEXTS)
    object.__setattr__(documents, "read", fail)
    with pytest.raises(DataError, match="the disk is gone"):
        open_corpus(documents, vocabulary(), tmp_path, in_turn)
    assert list(tmp_path.iterdir()) == []


def test_what_was_killed_is_removed_a_day_later(tmp_path):
    for name, age in (("old", 1), ("new", None)):
        (tmp_path / f".building-{name}").mkdir()
        (tmp_path / f".building-{name}" / "part").touch()
        if age:
            os.utime(tmp_path / f".building-{name}", (age, age))
    open_corpus(documents_of(TEXTS), vocabulary(), tmp_path, in_turn)
    assert [path.name for path in tmp_path.glob(".building-*")] == [".building-new"]


def test_an_empty_corpus_is_refused(tmp_path):
    for content in ([], [" \n"], ["\x01"]):
        with pytest.raises(DataError, match="memory has no text"):
            open_corpus(documents_of(content), vocabulary(), tmp_path, in_turn)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be written .* set data\.cache"):
        open_corpus(documents_of(TEXTS), vocabulary(), tmp_path / "file" / "cache", in_turn)


def test_default_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "jaxdl" / "text"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(default_directory()) == "/home/someone/.cache/jaxdl/text"


def test_a_vocabulary_is_kept_and_made_anew_where_damaged(tmp_path):
    def get():
        return trained(documents_of(TEXTS), tmp_path, in_turn, size=200, lowercase=True)

    first = get()
    (path,) = tmp_path.iterdir()
    written = path.stat().st_mtime_ns
    assert get().digest == first.digest
    assert path.stat().st_mtime_ns == written
    path.write_bytes(path.read_bytes()[:-9])
    assert get().digest == first.digest
    assert get().digest == first.digest
    assert trained(documents_of(TEXTS), tmp_path, in_turn, size=190, lowercase=True).digest != first.digest


def test_an_array_grows(tmp_path):
    with GrowingArray(tmp_path / "a.npy", np.uint16) as array:
        for i in range(300):
            array.append(np.full(i, i))
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.repeat(np.arange(300), np.arange(300)))


def _fail(item):
    raise DataError(f"item {item}")


def _kill(item):
    os._exit(1)


@pytest.mark.slow
def test_failures_in_processes():
    with process_map(2) as over, pytest.raises(DataError, match="item 1"):
        list(over(_fail, itertools.count(1)))
    with process_map(2) as over, pytest.raises(DataError, match="was lost"):
        list(over(_kill, [1]))
    assert multiprocessing.active_children() == []


def test_tokenising_needs_no_jax():
    code = "import sys, jaxdl.data.text.corpus; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
