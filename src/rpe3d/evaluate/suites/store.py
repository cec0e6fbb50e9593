"""The results file of an evaluation and its predictions: row by row, taken up again by the same or a larger command.

Rows are found again by law, length and task, so that one file can collect laws and tasks over several commands; what
would change a row's number (model, settings, versions, data, law) must be the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rpe3d.config import ConfigError
from rpe3d.evaluate.origin import check_rows, check_same, made_from
from rpe3d.evaluate.results import read
from rpe3d.evaluate.suites.ask import title
from rpe3d.evaluate.suites.predictions import Predictions

Key = tuple[str, int, str, str]
"""Law, length, suite, task."""


def key_of(row: dict[str, Any]) -> Key:
    return row["law"], row["length"], row["suite"], row["task"]


def check_place(path: Path) -> None:
    """Refuse, before anything is loaded, a file that is not ours or a folder that is not there."""
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", "make it, or give --json another place")
    read(path, "eval")


def resumed(path: Path, now: dict[str, Any], keys: Iterable[Key]) -> dict[str, Any] | None:
    """Return the earlier results in `path`, None where there are none; refuse those of something else.

    Predictions of rows that are asked for and not finished must be from the same, too.
    """
    before = read(path, "eval")
    rows: dict[Key, dict[str, Any]] = {}
    if before is not None:
        check_same(path, before, now)
        rows = {key_of(row): row for row in before["rows"]}
        check_rows(path, [(row, origin(before, key)) for key, row in rows.items()])
    for key in keys:
        if key not in rows or rows[key]["status"] != "ok":
            predictions(path, now, key).check()
    return before


def origin(content: dict[str, Any], key: Key) -> str:
    """Return the digest of what a row of these results is made from."""
    law, length, *task = key
    shared = {part: content[part] for part in ("model", "versions", "settings")}
    data = content["data"].get(title((task[0], task[1])))
    return made_from({**shared, "data": data, "law": content["laws"].get(f"{law} at {length}"), "row": list(key)})


def remove_predictions(results: Path) -> None:
    """Remove the predictions of all rows, also of rows that are not asked for now."""
    folder = _folder(results)
    for path in list(folder.rglob("*.jsonl")):
        path.unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        with suppress(OSError):  # a folder with a file of somebody else's
            path.rmdir()


def predictions(results: Path, content: dict[str, Any], key: Key) -> Predictions:
    """Return where a row's predictions lie and what they are made from."""
    return Predictions(path=predictions_file(results, key), made_from=origin(content, key))


def predictions_file(results: Path, key: Key) -> Path:
    """Return `NAME.predictions/LAW-LENGTH/SUITE/TASK.jsonl` beside `NAME.json`; no two rows share a file.

    What a file's name cannot hold is written as %20 is. A suite with one nameless task is `LAW-LENGTH/SUITE.jsonl`.
    """
    law, length, suite, task = key
    place = _folder(results) / f"{_plain(law)}-{length}"
    return place / suite / f"{_plain(task)}.jsonl" if task else place / f"{suite}.jsonl"


def _folder(results: Path) -> Path:
    """Return the folder of predictions; a results file without the ending .json has another than its namesake."""
    ours = results.suffix == ".json"
    return results.with_name(f"{results.stem}.predictions" if ours else f"{results.name}-predictions")


def _plain(name: str) -> str:
    """Return a file's name for `name`, and another for every other name."""
    return quote(name, safe="=,+")
