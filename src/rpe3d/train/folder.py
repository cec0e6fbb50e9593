"""The folder of a run: one writer, checkpoints that are whole or absent, and what the run was asked for.

run.json             what was asked for; the same command resumes, another is refused once there is a checkpoint
checkpoint-N/        the last two, one in the end, with optimizer, scheduler, random numbers and the place in the data
damaged-.../         a checkpoint from which no run can resume
log.csv, loss.png    every step
adapter/ or model/   the result, with its law
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rpe3d import files
from rpe3d.config import ConfigError

ASKED = "run.json"
PLACE = "place.json"
UNFINISHED = ".unfinished"
KEPT = 2
FINISHED = "finished"
"""Key of run.json for the number of steps that the result was trained for."""
DATA = ("data_sha256", "documents")
"""Keys of run.json that may change as long as the changed data was not read."""
FINGERPRINTS = ("model_sha256", *DATA)
REPEAT = "repeat its command, or pass a new folder to --out"
HINT = "free some space or pass another path to --out; the same command resumes from the last checkpoint"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the right to write to a folder; refuse if another run holds it."""
    busy = f"another run is writing to {folder}", "wait for it, or pass another folder to --out"
    unwritable = f"cannot write to {folder}", "pass another folder to --out"
    with files.refusing(*unwritable):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with files.locked(folder / ".lock", busy=busy, unwritable=unwritable):
            yield
    finally:
        with suppress(OSError):
            folder.rmdir()  # where nothing came of it


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn every write error into one refusal: a full disk raises different errors in different libraries."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"cannot write {what} ({line})", HINT) from error


def asked_before(folder: Path) -> dict[str, Any] | None:
    """Return the settings that the run in a folder was started with; None in a folder without a run."""
    note = folder / ASKED
    try:
        before: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise ConfigError(f"{note} cannot be read", "pass a new folder to --out") from None
    return before


def finished_steps(folder: Path, result: Path) -> int:
    """Return the number of steps that the result in a folder was trained for; 0 without a result."""
    before = asked_before(folder)
    return int(before.get(FINISHED) or before["steps"]) if before is not None and result.exists() else 0


def check_run(folder: Path, asked: dict[str, Any], ignored: Collection[str] = ()) -> None:
    """Refuse a folder that holds another run, or unrelated files."""
    before = asked_before(folder)
    if before is None:
        if any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ConfigError(f"{folder} already exists, and holds no run", "pass a new folder to --out")
        return
    keys = (asked.keys() | before.keys()) - set(ignored)
    if differing := sorted(key for key in keys if asked.get(key) != before.get(key)):
        raise ConfigError(f"{folder} holds a run that differs in {', '.join(differing)}", REPEAT)


def check_training(folder: Path, asked: dict[str, Any], result: Path) -> None:
    """Refuse a folder in which a training run cannot start or resume.

    A run that left neither checkpoint nor result has nothing to lose: any command may start afresh in its folder.
    Another number of steps does not make it another run if the learning rate does not depend on it. A fingerprint of
    None is not known yet.
    """
    before = asked_before(folder)
    made = max([finished_steps(folder, result), *(step_of(path) for path in checkpoints(folder))])
    if before is None or not made:
        check_run(folder, before or asked)
        return
    unknown = {key for key in FINGERPRINTS if asked.get(key) is None or before.get(key) is None}
    check_run(folder, asked, ignored={"steps", FINISHED} | unknown)
    if asked["steps"] == before["steps"]:
        return
    if asked["schedule"] != "constant":
        raise ConfigError(
            f"{folder} holds a run whose {asked['schedule']} schedule ends at step {before['steps']}",
            f"{REPEAT}; only a constant schedule can have its number of steps changed",
        )
    if asked["steps"] < made:
        raise ConfigError(f"{folder} already holds {made} steps, but {asked['steps']} are asked for", REPEAT)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write(path, json.dumps(content, indent=2) + "\n")


def write(path: Path, text: str) -> None:
    """Replace a file atomically."""
    with writing(str(path)):
        files.write_text(path, text)


def step_of(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was made."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first; an unfinished one has another name."""
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := re.fullmatch(r"checkpoint-(\d+)", path.name))]
    return [path for _, path in sorted(found)]


def last_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that a run resumes from; None if there is none."""
    found = checkpoints(folder)
    return found[-1] if found else None


def sweep(folder: Path) -> None:
    """Remove what a killed run left half written."""
    for path in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(path)


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that no run finds it but a user can inspect it."""
    place = checkpoint.with_name(f"damaged-{checkpoint.name}")
    if place.exists():
        shutil.rmtree(place)
    os.rename(checkpoint, place)
    return place


def settle(made: Path, place: Path) -> None:
    """Give a finished folder its name: from then on it exists, and is complete even if the machine loses power.

    It replaces the result of a run that was given more steps.
    """
    files.replace_folder(made, place, gone=place.with_name(f"{UNFINISHED}-old-{place.name}"))


def forget_old(folder: Path, kept: int = KEPT) -> None:
    """Remove all checkpoints but the last ones, renaming each first."""
    for path in checkpoints(folder)[:-kept]:
        files.remove_folder(path, gone=folder / f"{UNFINISHED}-{path.name}")
