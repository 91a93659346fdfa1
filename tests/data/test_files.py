from pathlib import Path

import pytest

from jaxdl.data.files import cache_directory, replacing


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory("images") == tmp_path / "jaxdl/images"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_directory("images") == Path("/home/someone/.cache/jaxdl/images")


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "new/file.txt"
    for content in ("one", "another"):
        with replacing(path) as written:
            written.write_text(content)
        assert path.read_text() == content


def test_a_file_stays_if_writing_fails(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("another")

    def fail():
        with replacing(path) as written:
            written.write_text("half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert path.read_text() == "another"
    assert list(path.parent.iterdir()) == [path]
