"""The results file of any command: written whole after each row, resumed by the same command, one writer at a time.

Rows are found again by their keys: law and length, in an evaluation suite and task as well. What would change a row's
number (model, settings, versions, data, law) must be the same.
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
from rpe3d.evaluate.origin import COLLECTED, check_rows, check_same, commit

SCHEMA = 1
Key = tuple[Any, ...]
Row = dict[str, Any]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file in one step: readers see the old content or the new, also after a kill."""
    with files.refusing(*_unwritable(path)):
        files.write_json(path, content)


def _unwritable(path: Path) -> files.Refusal:
    return f"cannot write {path}", "give --json a place to write to"


def _check_place(path: Path) -> None:
    """Refuse what could not be written in the end, before anything is measured."""
    place = (Path(os.path.realpath(path)) if path.is_symlink() else path).parent
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file", "give --json a name that can be replaced")
    if not place.is_dir():
        raise ConfigError(f"there is no folder {place}", "make it, or give --json another place")
    if not os.access(place, os.W_OK):
        raise ConfigError(f"the folder {place} cannot be written to", "give --json another place")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the right to write to `path`; refuse where another run holds it."""
    _check_place(path)
    target = Path(os.path.realpath(path))
    busy = f"another run is writing to {path}", "wait for it, or give --json another file"
    with files.locked(target.with_name(f".{target.name}.lock"), busy=busy, unwritable=_unwritable(path)):
        yield


def read(path: Path, kind: str = "compare", option: str = "--json") -> dict[str, Any] | None:
    """Read the results of an earlier run; None for no file. Refuse a file that does not hold results."""
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
    for row in content.get("rows", []):
        if "longppl" in row:  # its name in files of 0.2
            row["long_ppl"] = row.pop("longppl")
    return content


def check(path: Path, now: Mapping[str, Any], kind: str = "compare") -> dict[str, Any] | None:
    """Return the earlier results in `path`, None without any.

    Refuse results of something else than `now`, part by part; the command may differ.
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
    """The entries of a row that are its key."""
    keys: Sequence[Key]
    """The rows that are asked for, in their order."""
    origin: Callable[[Mapping[str, Any], Key], str]
    """Returns the digest of what a row of these results is made from."""
    collects: bool = False
    """Whether the file keeps rows of other commands, and in the order in which they came."""
    rows: dict[Key, Row] = field(default_factory=dict)

    def key_of(self, row: Row) -> Key:
        return tuple(row[part] for part in self.parts)

    def earlier(self, overwrite: bool) -> dict[str, Any] | None:
        """Return the results that the file has already, None where there are none or they are to be replaced."""
        if self.file is None:
            return None
        if overwrite:
            read(self.file, self.content["kind"])  # what is no results file is refused all the same
            return None
        before = check(self.file, self.content, self.content["kind"])
        if before is not None:
            whole = _joined(self.content, before)
            check_rows(self.file, [(row, self.origin(whole, self.key_of(row))) for row in before["rows"]])
        return before

    def take(self, before: Mapping[str, Any] | None) -> list[Key]:
        """Take up the rows of earlier results; return the keys of those that are still to be measured."""
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
