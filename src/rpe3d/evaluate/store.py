"""The results file of any command: rewritten after each row, resumed by the same command, one writer at a time.

Rows are identified by their keys: law and length, and in an evaluation also suite and task. Everything that would
change a row's number (model, settings, versions, data, law) must be the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpe3d import files
from rpe3d.config import ConfigError
from rpe3d.evaluate.origin import COLLECTED, START_OVER, check_rows, check_same, commit

SCHEMA = 1
Key = tuple[Any, ...]
Row = dict[str, Any]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file atomically: readers see the old content or the new, even after a kill."""
    with files.refusing(*_unwritable(path)):
        files.write_json(path, content)


def _unwritable(path: Path) -> files.Refusal:
    return f"cannot write {path}", "pass a writable path to --json"


def _check_place(path: Path) -> None:
    """Refuse a file that could not be written, before anything is measured."""
    place = (Path(os.path.realpath(path)) if path.is_symlink() else path).parent
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file", "pass a file that can be replaced to --json")
    if not place.is_dir():
        raise ConfigError(f"there is no folder {place}", "create it, or pass another path to --json")
    if not os.access(place, os.W_OK):
        raise ConfigError(f"the folder {place} is not writable", "pass another path to --json")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the right to write to `path`; refuse if another run holds it."""
    _check_place(path)
    target = Path(os.path.realpath(path))
    busy = f"another run is writing to {path}", "wait for it, or pass another file to --json"
    with files.locked(target.with_name(f".{target.name}.lock"), busy=busy, unwritable=_unwritable(path)):
        yield


def read(path: Path, kind: str = "compare", option: str = "--json") -> dict[str, Any] | None:
    """Read the results of an earlier run; None if there is no file. Refuse a file that does not hold results."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", f"pass another file to {option}") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or (content.get("kind"), content.get("schema")) != (kind, SCHEMA):
        raise ConfigError(f"{path} exists but holds no results of `rpe3d {kind}`", f"pass another file to {option}")
    rows = content.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path} is damaged: it has no list of rows", f"pass another file to {option}")
    for row in rows:
        if "longppl" in row:  # its name in files of 0.2
            row["long_ppl"] = row.pop("longppl")
    return content


def check(path: Path, now: Mapping[str, Any], kind: str = "compare") -> dict[str, Any] | None:
    """Return the earlier results in `path`, or None without any.

    Refuse results made from anything other than `now`, part by part; the command may differ.
    """
    _check_place(path)
    kept = read(path, kind)
    if kept is not None:
        check_same(path, kept, now)
    return kept


@dataclass(kw_only=True)
class Store:
    """The results of a run and its rows by their keys; only a run that writes them has a file."""

    file: Path | None
    content: dict[str, Any]
    parts: tuple[str, ...]
    """Entries of a row that form its key."""
    keys: Sequence[Key]
    """Keys of the requested rows, in order."""
    origin: Callable[[Mapping[str, Any], Key], str]
    """Returns the digest of what a row of these results is made from."""
    collects: bool = False
    """Whether the file keeps rows of other commands, in the order in which they came."""
    rows: dict[Key, Row] = field(default_factory=dict)

    def key_of(self, row: Row) -> Key:
        return tuple(row[part] for part in self.parts)

    def earlier(self, overwrite: bool) -> dict[str, Any] | None:
        """Return the results already in the file; None if there are none or they are to be replaced."""
        if self.file is None:
            return None
        if overwrite:
            read(self.file, self.content["kind"])  # what is no results file is refused all the same
            return None
        before = check(self.file, self.content, self.content["kind"])
        if before is not None:
            for name in (*self.parts, "status"):
                if not all(name in row for row in before["rows"]):
                    raise ConfigError(f"{self.file} is damaged: a row has no {name!r}", START_OVER)
            whole = _joined(self.content, before)
            check_rows(self.file, [(row, self.origin(whole, self.key_of(row))) for row in before["rows"]])
        return before

    def take(self, before: Mapping[str, Any] | None) -> list[Key]:
        """Take over the rows of earlier results, and return the keys of those that are still to be measured."""
        rows = [] if before is None else before["rows"]
        if before is not None:
            self.content |= _joined(self.content, before)
        self.rows = {self.key_of(row): row for row in rows if self.collects or row["status"] == "ok"}
        waiting = [key for key in self.keys if key not in self.rows or self.rows[key]["status"] != "ok"]
        if self.collects:
            self.keys = list(dict.fromkeys([*self.rows, *self.keys]))
        self._order()
        return waiting

    def add(self, key: Key, row: Row) -> None:
        """Add a row with the digest of what it is made from, and the commit that measured it."""
        self.rows[key] = row | {"made_from": self.origin(self.content, key), "commit": commit()}
        self._order()

    def _order(self) -> None:
        self.content["rows"] = [self.rows[key] for key in self.keys if key in self.rows]

    def write(self) -> None:
        if self.file is not None:
            write_json(self.file, self.content)


def _joined(content: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with the entries that earlier commands collected."""
    return {**content, **{part: before[part] | content[part] for part in COLLECTED if part in content}}
