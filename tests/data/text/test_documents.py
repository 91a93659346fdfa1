"""Documents of files, directories, TFDS sets and of the embedded English."""

import os
import re

import numpy as np
import pytest
import tensorflow_datasets as tfds

from jaxdl.data.text import embedded
from jaxdl.data.text.documents import open_files, open_tfds_text
from jaxdl.errors import ConfigError, DataError

tfds.disable_progress_bar()


def test_a_directory_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in {
        "b.txt": "two",
        "a.txt": "one",
        "sub/c.txt": "three",
        "x.md": "no",
        ".h.txt": "no",
    }.items():
        (tmp_path / name).write_text(text)
    assert list(open_files(tmp_path)) == ["one", "two", "three"]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_blank_lines_separate(tmp_path, newline):
    path = tmp_path / "a.txt"
    path.write_bytes(newline.join(["\ufeffOne.", "More.", "", "  ", "", "Two.", ""]).encode())
    assert list(open_files(path, "blank_line")) == ["One.\nMore.\n", "Two.\n"]
    assert len(list(open_files(path, "file"))) == 1


def test_a_byte_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("Stra\u00dfe.\nna".encode() + b"\xefve")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8 at byte 11 "):
        list(open_files(path))


def test_nothing_to_read(tmp_path):
    with pytest.raises(DataError, match=r"has no \.txt files"):
        open_files(tmp_path)
    with pytest.raises(DataError, match="is no file or directory"):
        open_files(tmp_path / "absent")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"gone\.txt cannot be read"):
        open_files(tmp_path)


def test_the_digest_follows_names_content_and_separation(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = open_files(tmp_path)
    assert open_files(tmp_path).digest == first.digest
    assert open_files(tmp_path, "blank_line").digest != first.digest
    os.utime(path, (1, 1))
    touched = open_files(tmp_path)
    assert touched.digest != first.digest
    path.rename(tmp_path / "b.txt")
    assert open_files(tmp_path).digest != touched.digest


@pytest.fixture(scope="module")
def tfds_root(tmp_path_factory):
    def info(self):
        features = tfds.features.FeaturesDict(
            {"text": tfds.features.Text(), "label": tfds.features.Scalar(np.int64)}
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def examples(self, count):
        for i in range(count):
            yield i, {"text": f"Number {i} is na\u00efve." if i != 2 else " ", "label": i}

    attributes = {
        "__module__": "__main__",  # of any other TFDS wants the file's path
        "VERSION": tfds.core.Version("1.0.0"),
        "_info": info,
        "_split_generators": lambda self, manager: {"train": examples(self, 4)},
        "_generate_examples": examples,
    }
    root = tmp_path_factory.mktemp("tfds")
    builder = type("Prose", (tfds.core.GeneratorBasedBuilder,), attributes)
    builder(data_dir=str(root), file_format="array_record").download_and_prepare()
    return root


def test_tfds(tfds_root):
    documents = open_tfds_text(tfds_root, "prose", "train")
    found = list(documents)
    assert sorted(found) == [f"Number {i} is na\u00efve." for i in (0, 1, 3)]
    assert list(documents) == found
    assert len(list(open_tfds_text(tfds_root, "prose", "train[:2]"))) <= 2
    assert open_tfds_text(tfds_root, "prose", "train[:2]").digest != documents.digest
    with pytest.raises(ConfigError, match=r"'test' is not one of .* it has: train"):
        open_tfds_text(tfds_root, "prose", "test")
    with pytest.raises(ConfigError, match="'label' is not a text"):
        open_tfds_text(tfds_root, "prose", "train", "label")
    with pytest.raises(DataError, match="no data set poetry"):
        open_tfds_text(tfds_root, "poetry", "train")


def test_docstrings_are_found_without_import(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""This module has a docstring of many words."""\nraise SystemExit\nclass A:\n'
        '    """Heading\n\n    A class that\n    does nothing whatsoever.\n\n'
        '    >>> print(one two three four five)\n    """\n'
    )
    (text,) = embedded.texts_of(path)
    assert embedded.paragraphs(text) == [
        "This module has a docstring of many words.",
        "A class that does nothing whatsoever.",
    ]
    path.write_text("not Python")
    assert embedded.texts_of(path) == []


def test_embedded_english(monkeypatch):
    """With one small package and Python's topics only, for speed."""
    monkeypatch.setattr(embedded, "PACKAGES", ("tokenizers", "no_such_package"))
    found = embedded._modules
    monkeypatch.setattr(
        embedded,
        "_modules",
        lambda root: [pair for pair in found(root) if re.match("pydoc_data|models", pair[0])],
    )
    documents = embedded.open_embedded()
    first = list(documents)
    assert len(first) > 50
    assert sum(map(len, first)) > 100_000
    parts = [paragraph for document in first for paragraph in document.split("\n\n")]
    repeated = len(parts) - len(set(parts))
    assert repeated == 0
    again = embedded.open_embedded()
    same = list(again) == first  # apart, because pytest would compare megabytes line by line
    assert same
    assert again.digest == documents.digest
    monkeypatch.setattr(embedded, "PACKAGES", ())
    assert embedded.open_embedded().digest != documents.digest
