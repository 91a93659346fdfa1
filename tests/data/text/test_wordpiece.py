"""Text to numbers: BERT's rules, the same vocabulary from the same corpus, and files of others."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from jaxdl.data.text.training import train
from jaxdl.data.text.wordpiece import SPECIAL, from_vocabulary, load, sentences
from jaxdl.errors import DataError
from tests.data.text.corpora import texts, vocabulary

ROOT = Path(__file__).parents[3]


def pieces(tokenizer, text):
    return [tokenizer.tokens[number] for number in tokenizer.encode([text])[0]]


def test_bert_splits():
    tokenizer = from_vocabulary(
        [*SPECIAL, "un", "##aff", "##able", "caf", "##e", ",", "\u4e2d", "[", "]", "sep"], lowercase=True
    )
    assert pieces(tokenizer, "Unaffable,\u4e2d CAF\u00c9 zzz") == [
        "un", "##aff", "##able", ",", "\u4e2d", "caf", "##e", "[UNK]",
    ]  # fmt: skip
    assert [tokenizer.tokens[i] for i in np.flatnonzero(~tokenizer.starts)] == ["##aff", "##able", "##e"]
    assert np.flatnonzero(tokenizer.special).tolist() == [0, 1, 2, 3, 4]


def test_special_tokens_in_the_text_are_text(tmp_path):
    tokenizer = from_vocabulary([*SPECIAL, "[", "]", "sep"], lowercase=True)
    assert pieces(tokenizer, "[SEP]") == ["[", "sep", "]"]
    described = json.loads(tokenizer.serialized)
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    described["added_tokens"] = [
        {"id": i, "content": token, "special": True, **dict.fromkeys(flags, False)}
        for i, token in enumerate(SPECIAL)
    ]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(described))
    assert pieces(load(path, lowercase=True), "[SEP]") == ["[", "sep", "]"]


def test_truncation_and_padding_of_a_json_are_off(tmp_path):
    tokenizer = vocabulary()
    other = Tokenizer.from_str(tokenizer.serialized)
    other.enable_truncation(4)
    other.enable_padding(length=4)
    other.save(str(tmp_path / "tokenizer.json"))
    loaded = load(tmp_path / "tokenizer.json", lowercase=False)
    assert loaded.encode(["aa " * 9, "ab"]) == tokenizer.encode(["aa " * 9, "ab"])
    assert [len(ids) for ids in loaded.encode(["aa " * 9, "ab"])] == [9, 1]


def test_vocab_txt(tmp_path):
    path = tmp_path / "vocab.txt"
    tokens = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ab", "\u2028"]
    path.write_bytes("\r\n".join([*tokens, ""]).encode())
    tokenizer = load(path, lowercase=True)
    assert list(tokenizer.tokens) == tokens
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 3, 4, 5)
    assert tokenizer.digest != load(path, lowercase=False).digest
    assert tokenizer.digest == load(path, lowercase=True).digest


def test_a_vocabulary_of_the_other_case_is_refused(tmp_path):
    path = tmp_path / "vocab.txt"
    lower = [f"{word}{i}" for word in ("ab", "##cd") for i in range(600)]
    path.write_text("\n".join([*SPECIAL, *lower, *(word.upper() for word in lower[:90])]))
    assert len(load(path, lowercase=False)) == 1295
    with pytest.raises(DataError, match=r"vocab\.txt: 7% .* set data\.lowercase false"):
        load(path, lowercase=True)
    path.write_text("\n".join([*SPECIAL, *lower]))
    assert len(load(path, lowercase=True)) == 1205
    with pytest.raises(DataError, match=r"no piece has a capital letter: set data\.lowercase true"):
        load(path, lowercase=False)


def test_files_that_are_no_vocabulary(tmp_path):
    def refused(name, content, match):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=match):
            load(tmp_path / name, lowercase=True)

    refused("a.txt", b"[PAD]\n[UNK]\nab\n", r"a\.txt: the vocabulary lacks \[CLS\] \[SEP\] \[MASK\]")
    refused("a.txt", b"ab\nab\n", r"a\.txt: .* 'ab' twice")
    refused("a.txt", b"ab\n\xff\n", r"a\.txt is not UTF-8 at byte 3")
    refused("a.json", b"{}", r"a\.json: not a tokenizer")
    refused("a.json", Tokenizer(models.BPE()).to_str().encode(), r"a\.json: a tokenizer of kind BPE")
    with pytest.raises(DataError, match="cannot be read"):
        load(tmp_path / "absent.txt", lowercase=True)


def test_training_is_deterministic():
    corpus = [*texts(1), "\u00dcber caf\u00e9 \u4e2d"]
    tokenizer = train(lambda: corpus, size=400, lowercase=True)
    assert tokenizer.tokens[:5] == SPECIAL
    assert len(tokenizer) == 400
    assert np.flatnonzero(tokenizer.special).tolist() == [0, 1, 2, 3, 4]
    assert not any(number == 1 for ids in tokenizer.encode(corpus) for number in ids)
    # In another process too, where hash tables have another order.
    code = (
        "from jaxdl.data.text.training import train; from tests.data.text.corpora import texts; "
        "print(train(lambda: [*texts(1), '\u00dcber caf\u00e9 \u4e2d'], size=400, lowercase=True).digest)"
    )
    again = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert again.stdout.strip() == tokenizer.digest
    assert {train(lambda: corpus, size=400, lowercase=True).digest for _ in range(3)} == {tokenizer.digest}


def test_training_refuses():
    with pytest.raises(DataError, match="no text"):
        train(list, size=100, lowercase=True)
    with pytest.raises(DataError, match=r"26 characters: set data.vocabulary_size to at least 57"):
        train(lambda: ["abcdefghijklmnopqrstuvwxyz"], size=56, lowercase=True)


def test_sentences():
    text = 'One is 3.5 long. Two, e.g. this\nwraps! "Three?" (Four.) five.\n\nSix\n\n\n'
    assert sentences(text) == [
        "One is 3.5 long.",
        "Two, e.g. this wraps!",
        '"Three?"',
        "(Four.) five.",
        "Six",
    ]
    assert sentences("\u4e00\u3002\u4e8c\u3002") == ["\u4e00\u3002", "\u4e8c\u3002"]
    assert sentences(" \n ") == []
