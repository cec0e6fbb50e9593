"""Texts: what is read, what is refused, and what a tokenizer makes of them."""

from __future__ import annotations

import bz2
import gzip
import lzma

import pytest
import torch

import tiny_lm
from rpe3d.config import ConfigError
from rpe3d.evaluate import Text, Tokens, default_texts, read_texts, tokenize
from rpe3d.evaluate.texts import check_bytes, check_tokens
from rpe3d.text import opening


def test_without_files_the_text_is_pythons_language_reference():
    (text,) = read_texts([])
    assert text == default_texts()[0]
    assert len(text.content) > 300_000
    assert text.name == "python-topics"


def test_a_compressed_copy_is_the_same_text(tmp_path):
    content = "Ünïcode text.\n" * 10
    openers = {"a.txt": open, "b.txt.xz": lzma.open, "c.txt.gz": gzip.open, "d.bz2": bz2.open}
    for name, opener in openers.items():
        with opener(tmp_path / name, "wb") as file:
            file.write(content.encode())
    read = read_texts([tmp_path / name for name in openers])
    assert [text.name for text in read] == list(openers)
    assert {(text.content, text.sha256) for text in read} == {(content, read[0].sha256)}


@pytest.mark.parametrize(
    ("name", "raw", "problem"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b" \n\t", "is empty"),
        ("a.txt", b"abc\xff\xfe", "is not UTF-8 text .byte 3 is 0xff"),
        ("a.bin", b"abc\0def", "is a binary file"),
        ("a.xz", b"no xz at all", "is not a complete .xz file"),
        ("a.xz", lzma.compress(b"text" * 1000)[:-20], "is not a complete .xz file"),
        ("a.gz", b"no gz at all", "is not a complete .gz file"),
        ("a.gz", gzip.compress(b"text" * 1000, mtime=0)[:-20], "is not a complete .gz file"),
        ("a.bz2", bz2.compress(b"text" * 1000)[:-20], "is not a complete .bz2 file"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, raw, problem):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ConfigError, match=problem):
        read_texts([tmp_path / name])


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        read_texts([tmp_path / "none"])
    with pytest.raises(ConfigError, match=r"cannot read .*Is a directory"):
        read_texts([tmp_path])


def test_a_window_longer_than_every_text_is_refused_before_and_after_the_tokenizer():
    short, long = Text(name="short", content="a" * 300), Text(name="long", content="ä" * 300)
    check_bytes([short, long], [256, 600])
    with pytest.raises(ConfigError, match="window of 601 tokens: the longest, long, has 600 bytes"):
        check_bytes([short, long], [256, 601])
    tokens = [Tokens(name="short", ids=torch.zeros(300))]
    check_tokens(tokens, [300])
    with pytest.raises(ConfigError, match="window of 301 tokens: the longest, short, has 300 tokens"):
        check_tokens(tokens, [301])


@pytest.mark.parametrize("bos", [False, True])
def test_a_text_is_tokenized_without_special_tokens_and_opens_as_the_tokenizer_does(bos):
    tokenizer = tiny_lm.tokenizer(bos)
    assert tokenizer.decode(tokenize(tokenizer, Text(name="a", content="some text")).ids) == "some text"
    assert opening(tokenizer) == ((0,) if bos else ())


def test_files_are_named_by_text_or_path(tmp_path):
    """`read_texts` is called from Python as well, for `tune`."""
    (tmp_path / "a.txt").write_text("one")
    assert read_texts([str(tmp_path / "a.txt")]) == read_texts([tmp_path / "a.txt"])


def test_texts_of_one_name_are_told_apart_and_none_is_read_twice(tmp_path):
    """Their windows looked as if they overlapped, so that differences had no interval."""
    files = [tmp_path / folder / "book.txt" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(file.parent.name)
    assert [text.name for text in read_texts(files)] == [str(file) for file in files]
    assert [text.name for text in read_texts(files[:1])] == ["book.txt"]
    with pytest.raises(ConfigError, match=r"book\.txt is given twice"):
        read_texts([files[0], tmp_path / "b" / ".." / "a" / "book.txt"])
