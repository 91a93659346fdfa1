"""Labelled texts: three kinds of files, their damage, and the tokens of an example."""

import json

import numpy as np
import pytest

from jaxdl.data.text.labelled import fitting, open_labelled
from jaxdl.data.text.rows import read_rows
from jaxdl.errors import ConfigError, DataError
from tests.data.text.corpora import vocabulary

TOKENIZER = vocabulary()
PAD, CLS, SEP = TOKENIZER.pad, TOKENIZER.cls, TOKENIZER.sep


def number(*pieces):
    return [TOKENIZER.tokens.index(piece) for piece in pieces]


@pytest.fixture
def file(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def opened(file):
    def make(content, name="a.tsv", **settings):
        return open_labelled(file(name, content), TOKENIZER, **settings)

    return make


def columns(path):
    return [(row.line, dict(row.columns)) for row in read_rows(path)]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_tsv_has_no_quotes(file, mark, newline):
    lines = ["text\tlabel", '"ab\t1', "", 'a "b"\u2028\x0b\x85c,\t0', "  ", "\t2"]
    path = file("a.TSV", mark + newline.join(lines))
    assert columns(path) == [
        (2, {"text": '"ab', "label": "1"}),
        (4, {"text": 'a "b"\u2028\x0b\x85c,', "label": "0"}),
        (6, {"text": "", "label": "2"}),
    ]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_csv_has_quotes_and_lines_within_them(file, mark, newline):
    lines = ["text,label", '"a, ""b""', 'c",1', "", 'x " y\u2028,0', "  ", '"",2', ""]
    path = file("a.Csv", mark + newline.join(lines))
    assert columns(path) == [
        (2, {"text": f'a, "b"{newline}c', "label": "1"}),
        (5, {"text": 'x " y\u2028', "label": "0"}),
        (7, {"text": "", "label": "2"}),
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "JSONL"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_json_lines(file, suffix, newline):
    values = [
        {"text": "a\nb \u00e9", "label": True},
        {"text": "", "label": -3},
        {"label": "x", "text": "\U0001f600", "more": [1], "none": None, "share": 0.5, "tree": {}},
    ]
    lines = [json.dumps(values[0]), "", json.dumps(values[1]), json.dumps(values[2], ensure_ascii=False)]
    path = file(f"a.{suffix}", "\ufeff" + newline.join(lines))
    assert columns(path) == [
        (1, {"text": "a\nb \u00e9", "label": "true"}),
        (3, {"text": "", "label": "-3"}),
        (4, {"label": "x", "text": "\U0001f600"}),
    ]
    assert read_rows(path)[2].other == {
        "more": "a list", "none": "null", "share": "a fraction", "tree": "an object",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.tsv", b"text\tlabel\nab\t1\nb\xe9\t0\n", r"a\.tsv line 3 is not UTF-8"),
        ("a.jsonl", b"\n\xff", r"a\.jsonl line 2 is not UTF-8"),
        ("a.tsv", "a\tb\n1\t2\n1\t2\t3\n", r"a\.tsv line 3 has 3 fields, and line 1 names 2"),
        ("a.tsv", "\na\tb\n1\n", r"line 3 has 1 fields, and line 2 names 2"),
        ("a.csv", 'a,b\n"x\ny",2\n1\n', r"a\.csv line 4 has 1 fields"),
        ("a.csv", "a,b\n1,2,3\n", r"line 2 has 3 fields"),
        ("a.csv", 'a,b\nx,2\n"x,2\ny,3\n', r"a\.csv line 3 is not CSV"),
        ("a.csv", 'a,b\n"x" y,2\n', r"line 2 is not CSV"),
        ("a.csv", "a,b,a\n1,2,3\n", r"line 1 names the column 'a' twice"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a\.jsonl line 2 is not JSON"),
        ("a.jsonl", "[" * 100_000, r"line 1 is not JSON"),
        ("a.jsonl", '\n["a"]\n', r"line 2 is not a JSON object, as \{\.\.\.\}, but a list"),
        ("a.jsonl", "null", r"line 1 is not a JSON object.* but null"),
        ("a.jsonl", '{"a": "\\ud800"}', r"line 1 has half a character .* in 'a'"),
        ("a.tsv", "", r"a\.tsv is empty"),
        ("a.jsonl", " \n\ufeff\n".replace("\ufeff", ""), r"a\.jsonl is empty"),
        ("a.csv", "\ufeff\r\n", r"a\.csv is empty"),
        ("a.csv", "text,label\n\n", r"a\.csv has no rows"),
    ],
)
def test_damaged_files(file, name, content, match):
    with pytest.raises(DataError, match=match):
        read_rows(file(name, content))


def test_no_file(tmp_path):
    with pytest.raises(DataError, match=r"a\.tsv cannot be read: No such file"):
        read_rows(tmp_path / "a.tsv")
    (tmp_path / "b.csv").mkdir()
    for directory in (tmp_path, tmp_path / "b.csv"):
        with pytest.raises(DataError, match=r"is a directory: name a file"):
            read_rows(directory)
    with pytest.raises(ConfigError, match=r"a\.txt .* use \.tsv, \.csv, \.jsonl, \.ndjson"):
        read_rows(tmp_path / "a.txt")


def test_one_text(opened):
    source = opened("label\ttext\nno\tab cd\nyes\t\n", length=6)
    assert (source.classes, len(source), source.truncated) == (("no", "yes"), 2, 0)
    example = source.example(0, 3, 7)
    expected = {
        "word": [CLS, *number("ab", "cd"), SEP, PAD, PAD],
        "segment": [1, 1, 1, 1, 0, 0],
        "type": [0] * 6,
        "position": [0, 1, 2, 3, 0, 0],
        "label": 0,
    }
    assert example.keys() == expected.keys()
    for key, value in expected.items():
        assert example[key].dtype == np.int32
        np.testing.assert_array_equal(example[key], np.array(value), strict=False)
        assert example[key].shape == np.shape(value)
    empty = source.example(1, 0, 0)
    assert empty["word"].tolist() == [CLS, SEP, PAD, PAD, PAD, PAD]
    assert empty["label"] == 1
    for index in (-1, 2):
        with pytest.raises(IndexError, match=rf"example {index} of 2"):
            source.example(index, 0, 0)


def test_two_texts(opened):
    source = opened("q,a,label\nab,cd ef,x\n,,y\n", "a.csv", text="q", text_pair="a", length=8)
    example = source.example(0, 0, 0)
    assert example["word"].tolist() == [CLS, *number("ab"), SEP, *number("cd", "ef"), SEP, PAD, PAD]
    assert example["type"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert example["segment"].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert example["position"].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    empty = source.example(1, 0, 0)
    assert empty["word"].tolist() == [CLS, SEP, SEP, PAD, PAD, PAD, PAD, PAD]
    assert empty["type"].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


def test_padding_is_that_of_the_vocabulary(file):
    other = vocabulary(first=("zz",))
    source = open_labelled(file("a.tsv", "text\tlabel\nab\t0\nzz\t1\n"), other, length=5)
    assert other.pad == 1
    assert source.example(1, 0, 0)["word"].tolist() == [other.cls, 0, other.sep, 1, 1]


def test_tokens_are_cut_from_the_end_of_the_longer_text(opened):
    words = ["ab", "cd", "ef", "gh", "ij"]
    rows = [(5, 0), (5, 2), (2, 5), (4, 4), (2, 3), (5, 5)]
    lines = [f"{' '.join(words[:a])}\t{' '.join(words[:b])}\t{i % 2}" for i, (a, b) in enumerate(rows)]
    source = opened("\n".join(["text\tpair\tlabel", *lines]), text_pair="pair", length=8)
    kept = [(5, 0), (3, 2), (2, 3), (3, 2), (2, 3), (3, 2)]
    for index, (a, b) in enumerate(kept):
        used = [CLS, *number(*words[:a]), SEP, *number(*words[:b]), SEP]
        example = source.example(index, 0, 0)
        assert example["word"].tolist() == used + [PAD] * (8 - len(used))
        assert example["type"].sum() == b + 1
    assert source.truncated == 4
    single = opened(f"text\tlabel\n{' '.join(words)}\t0\nab cd ef\t1\n", length=5)
    assert single.example(0, 0, 0)["word"].tolist() == [CLS, *number("ab", "cd", "ef"), SEP]
    assert single.truncated == 1


def test_fitting_is_one_by_one():
    for a in range(9):
        for b in range(9):
            for room in range(2, 18):
                first, second = a, b
                while first + second > room:
                    first, second = (first - 1, second) if first > second else (first, second - 1)
                assert fitting(a, b, room) == (first, second)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["10", "9", "-1", "9"], ("-1", "9", "10")),
        (["10", "9", "x"], ("10", "9", "x")),
        (["b ", "a", " b"], ("a", "b")),
        (["1.5", "0.5"], ("0.5", "1.5")),
    ],
)
def test_classes_are_sorted(opened, labels, classes):
    source = opened("\n".join(["text\tlabel", *(f"ab\t{label}" for label in labels)]))
    assert source.classes == classes
    found = [source.classes[int(source.example(i, 0, 0)["label"])] for i in range(len(source))]
    assert found == [label.strip() for label in labels]


def test_labels_of_json(opened):
    rows = [{"text": "ab", "label": label} for label in (True, False)]
    source = opened("\n".join(map(json.dumps, rows)), "a.jsonl")
    assert source.classes == ("false", "true")
    assert [int(source.example(i, 0, 0)["label"]) for i in range(2)] == [1, 0]
    rows = [{"text": "ab", "label": label} for label in (10, 2)]
    assert opened("\n".join(map(json.dumps, rows)), "a.jsonl").classes == ("2", "10")


def test_classes_of_the_training_file(opened):
    source = opened("text\tlabel\nab\tb\n", classes=["c", "b", "a"])
    assert source.classes == ("c", "b", "a")
    assert source.example(0, 0, 0)["label"] == 1
    with pytest.raises(DataError, match=r"a\.tsv line 3: class 'd' is not one of: c, b"):
        opened("text\tlabel\nab\tb\nab\td\n", classes=["c", "b"])


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.tsv", "text\tlabel\nab\tx\nab\tx\n", r"a\.tsv has one class, 'x'.*data\.label_column"),
        ("a.tsv", "text\tlabel\nab\tx\nab\t \n", r"a\.tsv line 3 has no label"),
        ("a.tsv", "text\tlabel\nab\t\n", r"a\.tsv line 2 has no label"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "a"}', r"a\.jsonl line 2: 'label' is missing"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": null, "label": 2}', r"line 2: 'text' is null"),
        ("a.jsonl", '{"text": "a", "label": 0.5}', r"line 1: 'label' is a fraction, not a string"),
    ],
)
def test_rows_that_are_no_examples(opened, name, content, match):
    with pytest.raises(DataError, match=match):
        opened(content, name)


def test_missing_columns(opened):
    content = "Text\tsentence\tlabels\nab\tcd\t1\n"
    with pytest.raises(ConfigError, match=r"data\.text_column 'text' .*a\.tsv; .*'Text'\?"):
        opened(content)
    with pytest.raises(
        ConfigError, match=r"data\.label_column 'label' .* Text, sentence, labels.*'labels'\?"
    ):
        opened(content, text="Text")
    with pytest.raises(ConfigError, match=r"data\.text_pair_column 'sentense' .*'sentence'\?"):
        opened(content, text="Text", label="labels", text_pair="sentense")
    with pytest.raises(ConfigError, match=r"labels$"):  # nothing is near
        opened(content, text="zzzz")


def test_too_short(opened):
    content = "text\tlabel\nab cd\t0\ncd\t1\n"
    with pytest.raises(ConfigError, match=r"data\.length 2 is too short: set it to at least 3"):
        opened(content, length=2)
    assert opened(content, length=3).example(0, 0, 0)["word"].tolist() == [CLS, *number("ab"), SEP]
    with pytest.raises(ConfigError, match=r"data\.length 4 is too short: set it to at least 5"):
        opened(content, length=4, text_pair="label")


def test_split(opened):
    labels = ["x"] * 100 + ["y"] * 12 + ["z"] * 2
    names = [f"{a}{b}" for a in "abcdefghijkl" for b in "abcdefghij"]
    lines = [f"{name}\t{label}" for name, label in zip(names, labels, strict=False)]
    source = opened("\n".join(["text\tlabel", *lines]), length=5)

    def contents(part):
        examples = [part.example(i, 0, 0) for i in range(len(part))]
        return [(int(e["word"][1]), int(e["label"])) for e in examples]

    train, held = source.split(0.1)
    assert [np.bincount(part.labels).tolist() for part in (train, held)] == [[90, 11, 1], [10, 1, 1]]
    whole = contents(source)
    assert sorted(contents(train) + contents(held)) == sorted(whole)
    for part in (train, held):
        places = [whole.index(item) for item in contents(part)]
        assert places == sorted(places)
        assert (part.classes, part.length) == (source.classes, 5)
    gaps = np.diff([whole.index(item) for item in contents(held)][:10])
    assert set(gaps.tolist()) == {10}
    assert contents(source.split(0.1)[1]) == contents(held)
    assert [len(part) for part in source.split(0.99)] == [3, 111]
    assert [len(part) for part in source.split(0.001)] == [111, 3]


def test_split_keeps_what_belongs_to_an_example(opened):
    lines = [f"{'ab ' * (i + 1)}\tcd\t{i % 2}" for i in range(8)]
    source = opened("\n".join(["text\tpair\tlabel", *lines]), text_pair="pair", length=8)
    train, held = source.split(0.25)
    assert source.truncated == 4
    assert (train.truncated, held.truncated) == (2, 2)
    for part in (train, held):
        for i in range(len(part)):
            example = part.example(i, 0, 0)
            last = int(example["segment"].sum())
            assert example["type"].tolist() == [0] * (last - 2) + [1, 1] + [0] * (8 - last)


def test_a_class_of_one_cannot_be_split(opened):
    source = opened("text\tlabel\nab\tx\nab\tx\ncd\ty\n")
    with pytest.raises(DataError, match=r"a\.tsv: class 'y' has 1 examples"):
        source.split(0.5)


def test_a_text_may_be_long(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("text,label\n" + "a " * 100_000 + ",x\nb,y\n")
    assert [len(row.columns["text"]) for row in read_rows(path)] == [200_000, 1]
