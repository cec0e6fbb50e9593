"""Read and write files of records, one JSON object per line (or CSV): lines are checked, a kill loses at most one."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rpe3d.config import ConfigError
from rpe3d.evaluate.origin import START_OVER
from rpe3d.text import reading

Record = Mapping[str, Any]
KINDS = {str: "a string", list: "a list", int: "a number", bool: "true or false"}
Parts = dict[str, dict[str, tuple[float, int]]]
"""Scores of some of a task's samples with their number, such as {"difficulty": {"easy": (25.0, 4)}}."""
NOT_AVAILABLE = {"", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>",
                 "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"}  # fmt: skip
"""Cells that pandas reads as missing, and BABILong's scripts therefore as empty, including an answer "None"."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of a task's predictions, in percent, and how many there are."""

    score: float
    n: int
    metric: str
    empty: int = 0
    """Predictions without a word."""
    pace: float | None = None
    """Samples generated per minute in this run."""
    parts: Parts = field(default_factory=dict)


def read_records(path: Path) -> list[Record]:
    """Read the objects of a JSONL or CSV file, plain or .xz, .gz, .bz2; blank lines are skipped."""
    hint = "pass a JSONL file: UTF-8, one object per line"
    with reading(path, hint) as file:
        raw = file.read()
    if ".csv" in path.suffixes[-2:]:
        return _table(raw, path)
    lines = raw.split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            records.append(_parsed(line, f"line {number} of {path}", hint))
    if not records:
        raise ConfigError(f"{path} is empty", hint)
    return records


def _parsed(line: bytes, where: str, hint: str) -> Record:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 (byte {error.start} is {line[error.start]:#04x})", hint) from None
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error})", hint) from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is not a JSON object", hint)
    return record


def _table(raw: bytes, path: Path) -> list[Record]:
    """Return the rows of a CSV file by column name, all strings; missing cells are empty, as in pandas."""
    hint = "pass a CSV file: UTF-8, with the names of its columns in the first line"
    try:
        read = list(csv.DictReader(io.StringIO(raw.decode("utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a CSV file ({error})", hint) from None
    rows: list[Record] = []
    for number, row in enumerate(read, 1):
        if None in row:
            raise ConfigError(f"row {number} of {path} has more cells than columns", hint)
        rows.append({name: "" if cell is None or cell in NOT_AVAILABLE else cell for name, cell in row.items()})
    if not rows:
        raise ConfigError(f"{path} is empty", hint)
    return rows


def parts_of(records: Sequence[Record], scores: Sequence[float], kinds: Sequence[str], digits: int = 2) -> Parts:
    """Return the mean score in percent for each value of the fields `kinds`, if all records have them."""
    parts: Parts = {}
    for kind in kinds:
        if all(kind in record for record in records):
            groups: dict[str, list[float]] = {}
            for record, score in zip(records, scores, strict=True):
                groups.setdefault(str(record[kind]), []).append(score)
            parts[kind] = {
                name: (round(100 * sum(some) / len(some), digits), len(some)) for name, some in groups.items()
            }
    return parts


def check_fields(records: Sequence[Record], fields: Mapping[str, type], hint: str) -> None:
    """Refuse the first record that lacks one of `fields`, or has another type in it."""
    for number, record in enumerate(records, 1):
        for name, kind in fields.items():
            if name not in record:
                has = ", ".join(map(repr, record)) or "nothing"
                raise ConfigError(f"record {number} has no field {name!r}, but {has}", hint)
            if not isinstance(record[name], kind):
                raise ConfigError(f"{name!r} of record {number} is not {KINDS[kind]}", hint)


def append(path: Path, records: Sequence[Record]) -> None:
    """Append lines to a file, which is created if needed."""
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(lines.encode("utf-8", "surrogatepass"))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "pass a writable path to --json") from None


def kept(path: Path) -> list[Record]:
    """Read what an earlier run left, and remove a last line that a kill cut short."""
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        os.truncate(path, whole)
    return read_records(path) if raw[:whole].strip() else []


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """A row's predictions on disk: every line records what it was made from, and lines of other origin are refused."""

    path: Path
    made_from: str

    def check(self) -> None:
        """Refuse a file with lines that were made from something else, and leave it unchanged."""
        if not self.path.exists():
            return
        *whole, _ = self.path.read_bytes().split(b"\n")  # a kill may have cut the last line short
        for number, line in enumerate(whole, 1):
            where = f"line {number} of {self.path}"
            record = _parsed(line, where, START_OVER) if line.strip() else {"made_from": self.made_from, "index": 0}
            if record.get("made_from") != self.made_from:
                raise ConfigError(f"{where} was predicted from another model, other settings or other data", START_OVER)
            if type(record.get("index")) is not int:
                raise ConfigError(f"{where} is damaged: it has no 'index'", START_OVER)

    def kept(self) -> list[Record]:
        """Return the records that an earlier run made from the same inputs."""
        self.check()
        return kept(self.path)

    def append(self, records: Sequence[Record]) -> None:
        """Add records, each with the digest of what it was made from."""
        append(self.path, [{**record, "made_from": self.made_from} for record in records])


def remove_predictions(results: Path) -> None:
    """Remove the predictions of all rows, including rows that are not requested now."""
    folder = _folder(results)
    for path in list(folder.rglob("*.jsonl")):
        path.unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        with suppress(OSError):  # a folder with a file of somebody else's
            path.rmdir()


def predictions_file(results: Path, key: Sequence[Any]) -> Path:
    """Return `NAME.predictions/LAW-LENGTH/SUITE/TASK.jsonl` next to `NAME.json`; no two rows share a file.

    Characters that a file name cannot hold are percent-encoded. A suite with one nameless task is
    `LAW-LENGTH/SUITE.jsonl`.
    """
    law, length, suite, task = key
    place = _folder(results) / f"{_plain(law)}-{length}"
    return place / suite / f"{_plain(task)}.jsonl" if task else place / f"{suite}.jsonl"


def _folder(results: Path) -> Path:
    """Return the folder of predictions; a results file without the suffix .json has another than its namesake."""
    ours = results.suffix == ".json"
    return results.with_name(f"{results.stem}.predictions" if ours else f"{results.name}-predictions")


def _plain(name: str) -> str:
    """Return a file name for `name`, different for every name."""
    return quote(name, safe="=,+")
