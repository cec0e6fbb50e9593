"""The paper's tables with this evaluation's rows, and the paper's own numbers beside them, marked as quoted."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import mean
from typing import Any

from rpe3d.evaluate.tasks import PROBES, leval, longbench, ruler

PAPER = json.loads((files("rpe3d.evaluate.tasks") / "data" / "paper.json").read_text(encoding="utf-8"))
CSV = ("law", "length", "suite", "task", "metric", "score", "n", "empty", "status", "seconds", "samples_per_minute",
       "batch", "commit")  # fmt: skip

QUOTED = "Quoted lines are the paper's numbers, of its models on the whole data sets; none of them was measured here."

Results = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row of a table: whose numbers, and whether they are the paper's."""

    label: str
    cells: Sequence[float | str | None]
    quoted: bool = False

    def texts(self) -> list[str]:
        return ["" if cell is None else cell if isinstance(cell, str) else f"{cell:.2f}" for cell in self.cells]


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table of the paper, or one in its manner."""

    title: str
    columns: Sequence[str]
    lines: Sequence[Line]
    note: str = ""


def tables(results: Results) -> list[PaperTable]:
    """Return the tables that the results have rows for."""
    rows = [row for row in results["rows"] if row["status"] == "ok"]
    made = [_categories(rows), _tasks(rows, "longbench", longbench.TASKS), _tasks(rows, "leval", leval.TASKS)]
    made += [_perplexity(rows), _tasks(rows, "ruler", ruler.TASKS), _probes(rows)]
    return [table for table in made if table is not None]


def _categories(rows: Sequence[Row]) -> PaperTable | None:
    """Table 1: the plain mean over a category's tasks, where all of them were measured."""
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


def _tasks(rows: Sequence[Row], group: str, known: Iterable[str]) -> PaperTable | None:
    """A column for each task that was measured, with the number of its samples."""
    places = _by_place(rows, group)
    columns = [task for task in known if any(task in scores for scores in places.values())]
    lines = []
    for place, scores in places.items():
        cells = [scores[task]["score"] if task in scores else None for task in columns]
        lines.append(Line(label=place, cells=[*cells, _mean(cells)] if group == "ruler" else cells))
    sizes = {task: {s[task]["n"] for s in places.values() if task in s} for task in columns}
    heads = [f"{task} ({'/'.join(map(str, sorted(sizes[task])))})" for task in columns]
    titles = {"longbench": "LongBench", "leval": "L-Eval, exact match", "ruler": "RULER"}
    title = f"{titles[group]} (number of samples)"
    if group == "ruler":
        return PaperTable(title=title, columns=[*heads, "mean"], lines=lines) if lines else None
    return _with_quoted(group, columns, lines, title, heads)


def _perplexity(rows: Sequence[Row]) -> PaperTable | None:
    """Table 3: a column for each text at each length."""
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
    """Passkeys in percent, the loss of copies and LongPPL, at each length."""
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
    """The table with the paper's lines below, in those columns that both have."""
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
    """Return every row, as a spreadsheet takes it; rows of earlier versions have no commit or LongPPL."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    optional = ("commit", "longppl", "key_tokens")
    writer.writerows([row.get(name) if name in optional else row[name] for name in columns] for row in results["rows"])
    return file.getvalue()
