"""The results file: written whole after each row, taken up again by the same command, one writer at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rpe3d import files
from rpe3d.config import ConfigError
from rpe3d.evaluate.origin import check_rows, check_same, made_from

SCHEMA = 1


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace the file at once: readers see the old content or the new, and so does who comes after a kill."""
    with files.refusing(*_unwritable(path)):
        files.write_json(path, content)


def _unwritable(path: Path) -> files.Refusal:
    return f"cannot write {path}", "give --json a place to write to"


def _check_place(path: Path) -> None:
    """Refuse what could not be written in the end, before anything is measured."""
    place = Path(os.path.realpath(path)).parent
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file", "give --json a name that can be replaced")
    if not place.is_dir():
        raise ConfigError(f"there is no folder {place}", "make it, or give --json another place")
    if not os.access(place, os.W_OK):
        raise ConfigError(f"the folder {place} cannot be written to", "give --json another place")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """The right to write to `path`, or a refusal where another run has it."""
    _check_place(path)
    target = Path(os.path.realpath(path))
    busy = f"another run is writing to {path}", "wait for it, or give --json another file"
    with files.locked(target.with_name(f".{target.name}.lock"), busy=busy, unwritable=_unwritable(path)):
        yield


def read(path: Path, kind: str = "compare", option: str = "--json") -> dict[str, Any] | None:
    """What an earlier run of a verb left; None for no file. A file that is no results file is not ours to touch."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", f"give {option} another file") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or (content.get("kind"), content.get("schema")) != (kind, SCHEMA):
        raise ConfigError(f"{path} is there and holds no results of `rpe3d {kind}`", f"give {option} another file")
    return content


def check(path: Path, now: dict[str, Any]) -> None:
    """Refuse a file whose results are of something else than `now`, part by part; the command may differ."""
    _check_place(path)
    kept = read(path)
    if kept is not None:
        check_same(path, kept, now)


def rows_of(path: Path, now: dict[str, Any], overwrite: bool) -> dict[tuple[str, int], dict[str, Any]]:
    """The finished rows of an earlier run of the same, by law and length; none where it is to start over."""
    if overwrite:
        read(path)  # what is no results file is refused all the same
        return {}
    check(path, now)
    kept = read(path) or {"rows": []}
    check_rows(path, [(row, made_from(now)) for row in kept["rows"]])
    return {(row["law"], row["length"]): row for row in kept["rows"] if row["status"] == "ok"}
