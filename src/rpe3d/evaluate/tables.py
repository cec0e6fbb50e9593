"""Build the paper's tables with the rows of an evaluation, next to the paper's own numbers, marked as quoted."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import mean
from typing import Any

from rpe3d.evaluate.tasks import PROBES, babilong, longbench, longbench_v2, suite

PAPER = json.loads((files("rpe3d.evaluate.tasks") / "data" / "paper.json").read_text(encoding="utf-8"))
PARTS = ("easy", "hard", "short", "medium", "long")
CSV = ("law", "length", "suite", "task", "metric", "score", "n", "empty", "status", "seconds", "samples_per_minute",
       "batch", "commit")  # fmt: skip

MEANS = {"ruler": "mean", "babilong": "mean of qa1 to qa5", "infinitebench": "mean"}
"""Last column of some suites: a mean of tasks, if all of them were measured."""
BY_LENGTH = ("kv", "needle")
"""Suites with hardly more than one task: their tables have a column for each length."""
TITLES = {
    "longbench": "LongBench",
    "leval": "L-Eval, exact match",
    "ruler": "RULER",
    "babilong": "BABILong",
    "infinitebench": "InfiniteBench",
    "kv": "Key-value retrieval",
    "needle": "Needle in a haystack",
    "longbench-v2": "LongBench v2",
}
QUOTED = "Quoted lines are the paper's numbers, of its models on the whole data sets; none of them was measured here."

Results = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row of a table: its label, its numbers, and whether they are quoted from the paper."""

    label: str
    cells: Sequence[float | str | None]
    quoted: bool = False

    def texts(self) -> list[str]:
        return ["" if cell is None else cell if isinstance(cell, str) else f"{cell:.2f}" for cell in self.cells]


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table of the paper, or one in its style."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Line]
    note: str = ""


def tables(results: Results) -> list[PaperTable]:
    """Return the tables that the results have rows for."""
    rows = [row for row in results["rows"] if row["status"] == "ok"]
    suites = {group: (_lengths if group in BY_LENGTH else _tasks)(rows, group) for group in TITLES}
    made = [_categories(rows), suites.pop("longbench"), suites.pop("leval"), _perplexity(rows), *suites.values()]
    made += [*(_parts(rows, task) for task in longbench_v2.TASKS), _probes(rows)]
    return [table for table in made if table is not None]


def _categories(rows: Sequence[Row]) -> PaperTable | None:
    """Make Table 1: the plain mean over a category's tasks, if all of them were measured."""
    wanted = PAPER["longbench_categories"]["columns"]
    lines = []
    for place, scores in _by_place(rows, "longbench").items():
        cells = []
        for category in wanted:
            tasks = [name for name, task in longbench.TASKS.items() if task.category == category]
            whole = all(task in scores for task in tasks)
            cells.append(mean(scores[task]["score"] for task in tasks) if whole else None)
        if any(cell is not None for cell in cells):
            lines.append(Line(label=place, cells=cells))
    return _with_quoted("longbench_categories", wanted, lines, "LongBench, means over the tasks of a category")


def _tasks(rows: Sequence[Row], group: str) -> PaperTable | None:
    """Make a column for each measured task, with its number of samples, and for some suites their mean."""
    places = _by_place(rows, group)
    columns = [task for task in suite(group).TASKS if any(task in scores for scores in places.values())]
    cells = {place: [_score(scores, task) for task in columns] for place, scores in places.items()}
    sizes = {task: {s[task]["n"] for s in places.values() if task in s} for task in columns}
    heads = [f"{task} ({'/'.join(map(str, sorted(sizes[task])))})" for task in columns]
    meant = babilong.LEADERBOARD if group == "babilong" else columns
    means = {place: _mean([_score(scores, task) for task in meant]) for place, scores in places.items()}
    if group in MEANS and any(value is not None for value in means.values()):
        heads.append(_mean_of(len(columns), len(suite(group).TASKS)) if group == "ruler" else MEANS[group])
        cells = {place: [*some, means[place]] for place, some in cells.items()}
    lines = [Line(label=place, cells=some) for place, some in cells.items()]
    title = f"{TITLES[group]} (number of samples)"
    if group in PAPER:
        return _with_quoted(group, columns, lines, title, heads)
    return PaperTable(title=title, columns=heads, lines=lines) if lines else None


def _mean_of(some: int, every: int) -> str:
    """Name the column of a mean over some of a suite's tasks."""
    return f"mean of {some} tasks" + (f", of {every}" if some < every else "")


def _lengths(rows: Sequence[Row], group: str) -> PaperTable | None:
    """Make a column for each task at each length, with the number of its samples."""
    measured = [row for row in rows if row["suite"] == group]
    columns = sorted({(row["task"], row["length"]) for row in measured})
    lines: dict[str, dict[tuple[str, int], Row]] = {}
    for row in measured:
        lines.setdefault(row["law"], {})[row["task"], row["length"]] = row
    sizes = {(row["task"], row["length"]): row["n"] for row in measured}
    several = len({task for task, _ in columns}) > 1
    heads = [f"{f'{task} ' * several}{_short(length)} ({sizes[task, length]})" for task, length in columns]
    made = [
        Line(label=law, cells=[found[at]["score"] if at in found else None for at in columns])
        for law, found in lines.items()
    ]
    return PaperTable(title=f"{TITLES[group]} (number of samples)", columns=heads, lines=made) if made else None


def _score(scores: Mapping[str, Row], task: str) -> float | None:
    return scores[task]["score"] if task in scores else None


def _parts(rows: Sequence[Row], task: str) -> PaperTable | None:
    """Split LongBench v2 by difficulty, length and domain, as its leaderboard does, with the samples of each."""
    places = {
        place: {(kind, name): part for kind, some in scores[task]["parts"].items() for name, part in some.items()}
        for place, scores in _by_place(rows, "longbench-v2").items()
        if task in scores
    }
    found = {part: n for parts in places.values() for part, (_, n) in parts.items()}
    known = [part for name in PARTS for part in found if part[1] == name]
    columns = [*known, *(part for part in found if part not in known)]
    lines = [
        Line(label=place, cells=[parts[part][0] if part in parts else None for part in columns])
        for place, parts in places.items()
    ]
    heads = [f"{part[1]} ({found[part]})" for part in columns]
    title = f"LongBench v2, {task}, by difficulty, length and domain (number of samples)"
    return PaperTable(title=title, columns=heads, lines=lines) if lines else None


def _perplexity(rows: Sequence[Row]) -> PaperTable | None:
    """Make Table 3: a column for each text at each length."""
    measured = [row for row in rows if row["suite"] == "ppl"]
    columns = list(dict.fromkeys((row["task"] or "texts", row["length"]) for row in measured))
    lines: dict[str, dict[tuple[str, int], float]] = {}
    for row in measured:
        lines.setdefault(row["law"], {})[row["task"] or "texts", row["length"]] = row["score"]
    heads = [f"{task} {_short(length)}" for task, length in columns]
    made = [Line(label=law, cells=[scores.get(column) for column in columns]) for law, scores in lines.items()]
    protocols = ", ".join(sorted({row["metric"].removeprefix("ppl ") for row in measured}))
    return _with_quoted("ppl", heads, made, f"Perplexity, protocol {protocols}")


def _probes(rows: Sequence[Row]) -> PaperTable | None:
    """Make a table of passkeys in percent, the loss of copies and LongPPL, at each length."""
    lines = []
    long = any(row["suite"] == "longppl" for row in rows)
    probes = [probe for probe in PROBES[1:] if long or probe != "longppl"]
    for place in dict.fromkeys(_place(row) for row in rows if row["suite"] in probes):
        scores = {row["suite"]: row["score"] for row in rows if _place(row) == place}
        lines.append(Line(label=place, cells=[scores.get(probe) for probe in probes]))
    title = "Passkeys found, in percent, and loss per token of a copied passage" + ", and LongPPL" * long
    return PaperTable(title=title, columns=probes, lines=lines) if lines else None


def _with_quoted(
    name: str, columns: Sequence[str], lines: Sequence[Line], title: str, heads: Sequence[str] | None = None
) -> PaperTable | None:
    """Add the paper's lines below a table, in the columns that both have."""
    if not lines:
        return None
    paper = PAPER[name]
    places = [paper["columns"].index(column) if column in paper["columns"] else None for column in columns]
    quoted = [
        Line(label=label, cells=[None if at is None else cells[at] for at in places], quoted=True)
        for label, cells in paper["rows"].items()
    ]
    some = any(at is not None for at in places)
    return PaperTable(
        title=f"{paper['title']}: {title}" if some else title,
        columns=heads or columns,
        lines=[*lines, *(quoted if some else ())],
        note=QUOTED if some else "",
    )


def _by_place(rows: Sequence[Row], group: str) -> dict[str, dict[str, Row]]:
    places: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["suite"] == group:
            places.setdefault(_place(row), {})[row["task"]] = row
    return places


def _place(row: Row) -> str:
    return f"{row['law']} at {_short(row['length'])}"


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _mean(cells: Sequence[float | None]) -> float | None:
    there = [cell for cell in cells if cell is not None]
    return mean(there) if len(there) == len(cells) else None


def rows_csv(results: Results, columns: Sequence[str] = CSV) -> str:
    """Return every row as CSV; rows of earlier versions have no commit or LongPPL."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    optional = ("commit", "long_ppl", "key_tokens")
    writer.writerows([row.get(name) if name in optional else row[name] for name in columns] for row in results["rows"])
    return file.getvalue()


def parts_csv(results: Results) -> str:
    """Return the score of every part of every row, such as a depth or a domain."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("law", "length", "suite", "task", "kind", "part", "score", "n"))
    for row in results["rows"]:
        for kind, some in row.get("parts", {}).items():
            for name, (score, n) in some.items():
                writer.writerow((row["law"], row["length"], row["suite"], row["task"], kind, name, score, n))
    return file.getvalue()
