"""Documents: what is read from where, piece by piece, and what is damaged is named."""

from __future__ import annotations

import gzip
import json
import lzma
import sys

import pytest

from rpe3d.config import ConfigError
from rpe3d.train import corpus as module
from rpe3d.train.corpus import TextFile, open_corpus


def text_of(source, index, start=0):
    return "".join(piece.text for piece in source.pieces(index, start, "text"))


def read_all(name):
    found = open_corpus([name])
    return [text_of(*found[i]) for i in range(len(found))]


@pytest.mark.parametrize("text", ["one\ntwo three\nfour " * 40, "word " * 100, "unbroken" * 40, "äöü€𝄞" * 60])
def test_a_text_longer_than_a_piece_comes_whole_and_from_any_piece_on(tmp_path, monkeypatch, text):
    """A document may be longer than memory: only pieces of it are read."""
    monkeypatch.setattr(module, "PIECE", 64)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    source = TextFile(tmp_path / "a.txt")
    pieces = list(source.pieces(0, 0, ""))
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) > 3
    assert all(len(piece.text.encode()) <= 128 for piece in pieces)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    for i, piece in enumerate(pieces):
        assert list(source.pieces(0, piece.start, "")) == pieces[i:]


def test_files_folders_and_records_are_numbered_through(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt.gz").write_bytes(gzip.compress(b"third"))
    (tmp_path / "b" / "d.txt.xz").write_bytes(lzma.compress(b"fourth"))
    (tmp_path / "b" / ".hidden").write_text("not this")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n\n{"text": "second"}\n')
    (tmp_path / "e.json").write_text(json.dumps([{"text": "fifth"}]))
    found = open_corpus([str(tmp_path / name) for name in ("a.jsonl", "b", "e.json")])
    assert len(found) == 5
    assert [text_of(*found[i]) for i in range(5)] == ["first", "second", "third", "fourth", "fifth"]
    source, index = found[1]
    assert source.name(index) == f"line 3 of {tmp_path / 'a.jsonl'}"


def test_a_long_record_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 10)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some words here and there"}))
    source, index = open_corpus([str(tmp_path / "a.jsonl")])[0]
    pieces = list(source.pieces(index, 0, "text"))
    assert [piece.text for piece in pieces] == ["some ", "words ", "here and ", "there"]
    assert list(source.pieces(index, pieces[2].start, "text")) == pieces[2:]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2 of .*a.jsonl is not JSON"),
        ("a.jsonl", b"\n[1]\n", "line 2 of .*a.jsonl is not an object"),
        ("a.jsonl", b'{"content": "x"}\n', "line 1 of .*a.jsonl has no text in 'text'"),
        ("a.json", b"{", "a.json is not JSON"),
        ("a.json", b"{}", "a.json is not a list"),
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", b"ab\xff", r"a.txt is not UTF-8 text \(byte 2 is 0xff\)"),
        ("a.txt.xz", b"not xz", "is not a complete .xz file"),
        ("a.jsonl", b"\n\n", "there are no documents"),
    ],
)
def test_what_is_damaged_is_named(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        read_all(str(tmp_path / name))


def test_a_line_that_is_too_long_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 2**20)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "' + "x" * 2**20 + '"}\n')
    with pytest.raises(ConfigError, match=r"line 2 of .* is longer than 1 MiB"):
        open_corpus([str(tmp_path / "a.jsonl")])


def test_an_empty_folder_and_a_name_that_is_nothing_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is empty"):
        open_corpus([str(tmp_path)])
    with pytest.raises(ConfigError, match="there is no file or folder /nowhere"):
        open_corpus(["/nowhere"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="there is no file or folder some/set") as caught:
        open_corpus(["some/set"])
    assert "pip install datasets" in caught.value.hint


def test_a_dataset_comes_by_its_name(tmp_path, monkeypatch):
    """A folder of the current directory stands in for the hub: the library loads both alike."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "first"}, {"text": "second"}])
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)) or rows)
    found = open_corpus(["owner/name"], split="train[:2]")
    assert asked == [("owner/name", "train[:2]")]
    assert [text_of(*found[i]) for i in range(len(found))] == ["first", "second"]
    assert found[1][0].name(1) == "row 2 of owner/name"
