"""Write files and folders atomically, and lock them for one writer at a time.

Content is written next to its place under another name and renamed at the end: readers see the old content or the new,
even after a kill. File system errors are left to the caller, who knows which option to name: see `refusing`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rpe3d.config import ConfigError

Refusal = tuple[str, str]
"""The problem and the hint of a ConfigError."""


@contextmanager
def refusing(problem: str, hint: str) -> Iterator[None]:
    """Turn a file system error into a ConfigError: the problem with the system's reason, and the hint."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{problem}: {error.strerror or error}", hint) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path next to `path` to write to; the file replaces `path` at the end. A link stays a link."""
    target = Path(os.path.realpath(path))
    unfinished = _beside(target)
    try:
        yield unfinished
        os.replace(unfinished, target)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def write_text(path: Path, text: str) -> None:
    """Replace a file with this text, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file with this content."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file with JSON. NaN and infinity, which JSON does not have, raise ValueError."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_all(contents: dict[str, bytes], folder: Path) -> list[Path]:
    """Write files into a folder, created if needed: all reach the disk before the first takes its name."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as waiting:
        for name in reversed(contents):  # the stack renames the last first
            waiting.enter_context(replacing(folder / name)).write_bytes(contents[name])
    return [folder / name for name in contents]


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder next to `path` to fill, which gets that name at the end; `path` may be an empty folder."""
    unfinished = _beside(path)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        if path.exists():
            path.rmdir()
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def replace_folder(made: Path, place: Path, gone: Path) -> None:
    """Give a finished folder its name once it is on disk; an older folder is removed via the name `gone`."""
    for path in [*made.rglob("*"), made]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    if place.exists():
        os.rename(place, gone)
    os.rename(made, place)
    shutil.rmtree(gone, ignore_errors=True)


def remove_folder(folder: Path, gone: Path) -> None:
    """Remove a folder after renaming it, so that nobody finds half of it."""
    os.rename(folder, gone)
    shutil.rmtree(gone)


@contextmanager
def locked(lock_file: Path, *, busy: Refusal, unwritable: Refusal) -> Iterator[None]:
    """Hold `lock_file`; refuse with `busy` if another process does, with `unwritable` if it cannot be created.

    The system frees the lock of a process that dies, so a file left behind by a kill is not in the way.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(lock_file)
    with refusing(*unwritable):
        try:
            lock.acquire(blocking=False)
        except Timeout:
            # Where no file can be made, as in /proc, the lock looks like one that is held.
            raise ConfigError(*(busy if lock_file.exists() else unwritable)) from None
    try:
        yield
    finally:
        with suppress(OSError):
            lock_file.unlink()
        lock.release()


@contextmanager
def turn(lock_file: Path) -> Iterator[None]:
    """Hold `lock_file`, after waiting for the process that does. The file stays for those who wait."""
    from filelock import FileLock

    with FileLock(lock_file):
        yield


def _beside(path: Path) -> Path:
    return path.with_name(f".{os.getpid()}-{path.name}")
