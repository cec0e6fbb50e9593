"""The CSVs of `finetune.py`, of measures and of losses, and how they are shown."""

from __future__ import annotations

import csv
import io
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rpe3d.drawing.axes import Paint, boldest_last, labels, line, short
from rpe3d.drawing.palette import DASHED, SOFT, Style
from rpe3d.evaluate.plots import SHOWN, Panel, Plot, png
from stamp import COLUMNS

MEASURED = ("ppl", "tail_ppl", "copy_nll", "passkey")
NUMBERS = ("law", "steps", "tokens", "length", *MEASURED, "windows", "copies", "passkeys", "context", "s_per_step")
LOSSES = ("law", "step", "loss", "n", "of")
POINTS = 50  # of a curve of losses
Row = Mapping[str, str]
Looks = Mapping[str, Style]


class Table:
    """A CSV that is whole after every change."""

    def __init__(self, path: Path, origin: Mapping[str, str], columns: Sequence[str]) -> None:
        self.path = path
        self.origin = origin
        self.columns = columns
        self.rows: list[Row] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))

    def append(self, *rows: Mapping[str, Any]) -> None:
        from rpe3d.train.folder import write

        self.rows += [{**self.origin, **{key: str(row.get(key, "")) for key in self.columns}} for row in rows]
        text = io.StringIO()
        writer = csv.DictWriter(text, (*COLUMNS, *self.columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write(self.path, text.getvalue())


class Results(Table):
    """What was measured, with training and without."""

    def __init__(self, path: Path, origin: Mapping[str, str]) -> None:
        super().__init__(path, origin, NUMBERS)

    def missing(self, name: str, steps: int, lengths: Sequence[int]) -> list[int]:
        """The lengths at which a way has not been measured."""
        there = {int(row["length"]) for row in self.rows if (row["law"], row["steps"]) == (name, str(steps))}
        return [length for length in lengths if length not in there]

    def add(self, name: str, about: dict[str, Any], found: dict[str, Any]) -> None:
        """A measured row; one that failed is said, and left to the next call."""
        if found["status"] != "ok":
            print(f"{found['law']} at {found['length']}: {found['status']}", file=sys.stderr, flush=True)
            return
        counts = {kind: len(found[kind]) for kind in ("windows", "copies", "passkeys")}
        measured = {key: round(found[key], 4) for key in MEASURED}
        row = {**about, **measured, **counts, "law": name, "length": found["length"], "context": found["context"]}
        self.append(row)

    def sorted(self, order: Sequence[str]) -> list[Row]:
        return sorted(self.rows, key=lambda r: (order.index(r["law"]), int(r["steps"]), int(r["length"])))


class Losses(Table):
    """The loss of every way by step: means of parts of the run, as far as it has come."""

    def __init__(self, path: Path, origin: Mapping[str, str]) -> None:
        super().__init__(path, origin, LOSSES)

    def replace(self, name: str, losses: Sequence[float], steps: int) -> None:
        """Write the curve of a way, of which `losses` are all steps so far, anew."""
        self.rows = [row for row in self.rows if row["law"] != name]
        self.append(*({"law": name, **point, "of": steps} for point in curve(losses, steps)))


def curve(losses: Sequence[float], steps: int, points: int = POINTS) -> list[dict[str, Any]]:
    """Return the mean loss of each of `points` parts of a run, at its last step; the last part may be unfinished."""
    ends = sorted({max(1, steps * i // points) for i in range(1, points + 1)})
    parts = [(end, losses[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    return [
        {"step": min(end, len(losses)), "loss": f"{statistics.fmean(part):.5f}", "n": len(part)}
        for end, part in parts
        if part
    ]


def show(rows: Sequence[Row]) -> None:
    print(f"\n{'law':22} {'steps':>6} {'length':>7} {'ppl':>9} {'tail ppl':>9} {'copy nll':>9} {'passkey':>8}")
    for row in rows:
        measured = " ".join(f"{float(row[key]):9.2f}" for key in MEASURED[:3])
        print(
            f"{row['law']:22} {row['steps']:>6} {row['length']:>7} {measured} {row['passkey']:>5}/{row['passkeys']}",
            flush=True,
        )


def draw(rows: Sequence[Row], title: str, context: int, looks: Looks, path: Path) -> None:
    """Perplexity by length: a line for every way with training, and a dashed one for its law without."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    curves: dict[bool, dict[str, list[tuple[int, float]]]] = {False: defaultdict(list), True: defaultdict(list)}
    for row in rows:
        curves[row["steps"] != "0"][row["law"]].append((int(row["length"]), float(row["ppl"])))
    lengths = sorted({int(row["length"]) for row in rows})
    values = [float(row["ppl"]) for row in rows]

    def lines(axes: Any, paint: Paint) -> None:
        for learned, by_name in curves.items():
            for name in boldest_last(by_name, looks):
                style = looks[name] if learned else looks[name]._replace(dash=DASHED, width=1.0)
                line(axes, paint, style, *zip(*by_name[name], strict=True))
        axes.set_yscale("log")
        axes.set_ylim(0.95 * min(values), 1.05 * min(max(values), SHOWN * min(values)))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.4g}"))
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, labels=[short(length) for length in lengths])
        axes.margins(x=0)
        axes.minorticks_off()
        axes.axvline(context, color=paint(SOFT), linestyle=":", linewidth=1)
        axes.set_xlabel(f"tokens in a window (dotted: trained to {short(context)})")
        labels(axes, paint, looks, {name: ends[-1][1] for name, ends in (curves[False] | curves[True]).items()})

    panel = Panel(title=title, alt="Line chart of perplexity by length.", size=(430, 300), draw=lines)
    path.write_bytes(png(Plot(name="finetune", caption="", panels=[panel])))


def draw_losses(rows: Sequence[Row], title: str, looks: Looks, path: Path) -> None:
    """The training loss by step: a line for every way, as far as it has come."""
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        curves[row["law"]].append((int(row["step"]), float(row["loss"])))

    def lines(axes: Any, paint: Paint) -> None:
        for name in boldest_last(curves, looks):
            line(axes, paint, looks[name], *zip(*curves[name], strict=True))
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.3g}"))
        axes.minorticks_off()
        axes.set_xlim(0, max(int(row["of"]) for row in rows))
        axes.set_xlabel("step")
        labels(axes, paint, looks, {name: points[-1][1] for name, points in curves.items()})

    panel = Panel(title=title, alt="Line chart of training loss by step.", size=(430, 300), draw=lines)
    path.write_bytes(png(Plot(name="finetune-loss", caption="", panels=[panel])))
