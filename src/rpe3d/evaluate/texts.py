"""Texts to measure on: the user's files, or the language reference that ships with Python."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rpe3d.config import ConfigError
from rpe3d.text import encode, reading

PLAIN = "pass a UTF-8 text file, plain or .xz, .gz, .bz2"


@dataclass(frozen=True, kw_only=True)
class Text:
    """A named text."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        """Digest of the uncompressed text, so that a compressed copy counts as the same."""
        return hashlib.sha256(self.content.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A named text as token ids, without special tokens."""

    name: str
    ids: Tensor


def default_texts() -> list[Text]:
    """Return Python's language reference (`pydoc_data.topics`): long English prose on every machine."""
    from pydoc_data.topics import topics

    return [Text(name="python-topics", content="\n\n".join(topics[name] for name in sorted(topics)))]


def read_texts(paths: Sequence[str | Path]) -> list[Text]:
    """Read files as texts, or return the default texts if no path is given; refuse a file that is not text.

    A text is named after its file, or after its path if another file has the same name.
    """
    given = [Path(path) for path in paths]
    for number, path in enumerate(given):
        if path.resolve() in [before.resolve() for before in given[:number]]:
            raise ConfigError(f"the text {path} is given twice", "pass it once: its windows would count twice")
    names = [path.name for path in given]
    return [_read(path, path.name if names.count(path.name) == 1 else str(path)) for path in given] or default_texts()


def _read(path: Path, name: str) -> Text:
    with reading(path, PLAIN) as file:
        raw = file.read()
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start} is {raw[error.start]:#04x})", PLAIN) from None
    if "\0" in content:
        raise ConfigError(f"{path} is a binary file, not a text", PLAIN)
    if not content.strip():
        raise ConfigError(f"{path} is empty", PLAIN)
    return Text(name=name, content=content)


def check_bytes(texts: Sequence[Text], lengths: Sequence[int]) -> None:
    """Refuse lengths that no text can reach, without a tokenizer: a token is at least one byte."""
    _check_longest([(text.name, len(text.content.encode())) for text in texts], lengths, "bytes")


def check_tokens(texts: Sequence[Tokens], lengths: Sequence[int]) -> None:
    """Refuse lengths that no text reaches."""
    _check_longest([(text.name, len(text.ids)) for text in texts], lengths, "tokens")


def _check_longest(sizes: list[tuple[str, int]], lengths: Sequence[int], unit: str) -> None:
    name, most = max(sizes, key=lambda size: size[1])
    if most < max(lengths):
        raise ConfigError(
            f"no text is as long as a window of {max(lengths)} tokens: the longest, {name}, has {most} {unit}",
            "pass longer files to --texts, or lower --lengths",
        )


def tokenize(tokenizer: Any, text: Text) -> Tokens:
    """Tokenize a whole text, without special tokens."""
    return Tokens(name=text.name, ids=torch.tensor(encode(tokenizer, text.content)))
