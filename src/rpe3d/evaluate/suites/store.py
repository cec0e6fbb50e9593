"""The results file of an evaluation and its predictions: row by row, taken up again by the same or a larger command.

Rows are found again by law, length and task, so that one file can collect laws and tasks over several commands; what
would change a row's number (model, settings, data) must be the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.evaluate.results import read

Key = tuple[str, int, str, str]
"""Law, length, suite, task."""


def key_of(row: dict[str, Any]) -> Key:
    return row["law"], row["length"], row["suite"], row["task"]


def check_place(path: Path) -> None:
    """Refuse, before anything is loaded, a file that is not ours or a folder that is not there."""
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", "make it, or give --json another place")
    read(path, "eval")


def check(path: Path, now: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The earlier results, if they are of the same model, settings, data and laws; None to start anew."""
    before = read(path, "eval")
    if before is None or overwrite:
        return None
    now = json.loads(json.dumps(now))  # as it reads in a file
    for part in ("model", "settings", "versions", "data", "laws"):
        shared = now[part].keys() & before[part].keys() if part in ("data", "laws") else now[part].keys()
        if any(before[part].get(name) != now[part][name] for name in shared):
            raise ConfigError(
                f"{path} holds results of other {part}", "give --json another file, or --overwrite to start over"
            )
    return before


def start_over(results: Path, keys: Sequence[Key], overwrite: bool) -> None:
    """Remove predictions that an earlier run left, if asked to; else refuse to mix them with new ones."""
    for path in (predictions_file(results, key) for key in keys):
        if path.exists() and not overwrite:
            raise ConfigError(
                f"there are predictions in {path} without results in {results}",
                "give --json another file, or --overwrite to start over",
            )
        path.unlink(missing_ok=True)


def predictions_file(results: Path, key: Key) -> Path:
    """Where a row's predictions lie: `NAME.predictions/LAW-LENGTH/SUITE/TASK.jsonl` beside `NAME.json`."""
    law, length, suite, task = key
    folder = results.with_name(f"{results.stem}.predictions") / f"{_plain(law)}-{length}"
    return folder / suite / f"{_plain(task or suite)}.jsonl"


def _plain(name: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", name)
