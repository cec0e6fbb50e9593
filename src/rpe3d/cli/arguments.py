"""What verbs share: sizes as people write them, files that are whole or absent, extras that may be missing."""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from rpe3d.config import ConfigError

UNITS = {"": 1, "k": 1024, "m": 1024**2}


def size(text: str) -> int:
    """A number of tokens: 65536, 64k or 1M, with k = 1024 and M = 1024 k. The `type` of an argument."""
    match = re.fullmatch(r"([0-9]{1,12})([km]?)", text.strip().lower())
    if not match:
        raise ArgumentTypeError(f"{text!r} is not a size: write it as 65536 or 64k (k = 1024)")
    return int(match[1]) * UNITS[match[2]]


def need(extra: str, *modules: str) -> None:
    """Refuse to start without the packages of an extra, before any work is done."""
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(f"{module} is not installed", f"pip install 'rpe3d[{extra}]'")


def folder(option: str, path: Path) -> Path:
    """`path` as a folder that exists, made if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path} is a file, not a folder", f"give {option} a folder") from None
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}", f"give {option} another one") from None
    return path


@contextmanager
def replacing(option: str, path: Path) -> Iterator[Path]:
    """A path to write to beside `path`, which takes its place at the end: readers see the old file or the new."""
    target = Path(os.path.realpath(path))  # a link stays a link
    unfinished = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        if target.exists() and not target.is_file():  # a folder, or /dev/null, which root could replace
            raise ConfigError(f"{path} is not a regular file", f"give {option} a name that can be replaced")
        yield unfinished
        os.replace(unfinished, target)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", f"give {option} a place to write to") from None
    finally:
        with suppress(OSError):
            unfinished.unlink()
