"""Texts as files, plain or compressed, and as tokens: what training and evaluation share.

Not fsspec, which would also unpack .zip archives and needs a package for what the standard library does.
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
"""What a compressed file raises that was cut short, or is of another kind than its name says."""


def opened(path: Path) -> Any:
    """Open a file for reading bytes, unpacked as its ending says."""
    return OPENERS.get(path.suffix.lower(), open)(path, "rb")


@contextmanager
def reading(path: Path, hint: str) -> Iterator[Any]:
    """Yield an open file, as `opened`; refuse what cannot be read, in one sentence."""
    try:
        with opened(path) as file:
            yield file
    except DAMAGED as error:
        raise ConfigError(f"{path} is not a whole {path.suffix} file ({error})", "copy it again") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint) from None


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of `text` alone.

    Not verbose: a tokenizer would warn of texts that are longer than the pretrained length.
    """
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def opening(tokenizer: Any) -> tuple[int, ...]:
    """Return what the tokenizer puts in front of a text by default: its BOS token, or nothing."""
    first = tokenizer("a").input_ids[0]
    return (first,) if first == tokenizer.bos_token_id else ()
