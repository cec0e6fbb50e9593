"""Read texts from plain or compressed files, and tokenize them: shared by training and evaluation.

fsspec is not used: it would also unpack .zip archives, and needs a package for what the standard library does.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rpe3d.config import ConfigError

OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
DAMAGED = (lzma.LZMAError, EOFError, gzip.BadGzipFile)
"""Exceptions of a compressed file that was cut short, or is of another type than its name says."""


def opened(path: Path) -> Any:
    """Open a file for reading bytes, decompressed according to its suffix."""
    return OPENERS.get(path.suffix.lower(), open)(path, "rb")


@contextmanager
def reading(path: Path, hint: str) -> Iterator[Any]:
    """Yield an open file, as `opened` does; refuse a file that cannot be read, in one sentence."""
    try:
        with opened(path) as file:
            yield file
    except DAMAGED as error:
        raise ConfigError(f"{path} is not a complete {path.suffix} file ({error})", "copy it again") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint) from None


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of `text`, without special tokens.

    It is not verbose, since a tokenizer would warn about texts longer than the pretrained length.
    """
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def opening(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that the tokenizer puts before a text by default: BOS, or nothing."""
    first = tokenizer("a").input_ids[0]
    return (first,) if first == tokenizer.bos_token_id else ()
