"""The folder of a run: one writer, checkpoints that are whole or absent, and what the run was asked for.

run.json             what was asked for; the same command goes on, another is refused
checkpoint-N/        the last two, one in the end, with optimizer, scheduler, random numbers and the place in the data
log.csv, loss.png    every step
adapter/ or model/   the result, with its law
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rpe3d.config import ConfigError

ASKED = "run.json"
PLACE = "place.json"
UNFINISHED = ".unfinished"
KEPT = 2
HINT = "make room or give --out another place; the same command goes on from the last checkpoint"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The right to write to the folder, or a refusal where another run has it."""
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(f"another run is writing to {folder}", "wait for it, or give --out another folder") from None
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", "give --out another folder") from None
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / ".lock").unlink()
            folder.rmdir()  # where nothing came of it
        lock.release()


@contextmanager
def writing(what: str) -> Iterator[None]:
    """One sentence for whatever keeps a file from being written: a full disk is each of these, by who writes."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"cannot write {what} ({line})", HINT) from error


def check_run(folder: Path, asked: dict[str, Any]) -> None:
    """Refuse a folder that holds another run's, or files of something else."""
    note = folder / ASKED
    if not note.exists():
        if any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ConfigError(f"{folder} is there already, and holds no run", "give --out a new folder")
        return
    try:
        before = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{note} cannot be read", "give --out a new folder") from None
    if differing := sorted(key for key in asked.keys() | before.keys() if asked.get(key) != before.get(key)):
        raise ConfigError(
            f"{folder} holds a run that differs in {', '.join(differing)}",
            "repeat its command, or give --out a new folder",
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    write(path, json.dumps(content, indent=2) + "\n")


def write(path: Path, text: str) -> None:
    """Replace a file at once."""
    unfinished = path.with_name(f".{os.getpid()}-{path.name}")
    with writing(str(path)):
        try:
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def checkpoints(folder: Path) -> list[Path]:
    """Whole ones, oldest first: an unfinished one has another name."""
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := re.fullmatch(r"checkpoint-(\d+)", path.name))]
    return [path for _, path in sorted(found)]


def last_checkpoint(folder: Path) -> Path | None:
    """Where a run goes on, if anywhere."""
    found = checkpoints(folder)
    return found[-1] if found else None


def sweep(folder: Path) -> None:
    """Remove what a run that was killed left half written."""
    for path in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(path)


def settle(made: Path, place: Path) -> None:
    """Give a finished folder its name: from now on it is there, and whole even if the machine loses power."""
    for path in [*made.rglob("*"), made]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    os.rename(made, place)


def forget_old(folder: Path, kept: int = KEPT) -> None:
    """Remove all checkpoints but the last ones, each under another name first."""
    for path in checkpoints(folder)[:-kept]:
        gone = folder / f"{UNFINISHED}-{path.name}"
        os.rename(path, gone)
        shutil.rmtree(gone)
