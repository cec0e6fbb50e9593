"""The CSV of `pretrain.py`, and how it is shown."""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain_measures import Number
from rpe3d import files
from rpe3d.drawing.axes import Paint, boldest_last, labels, line, short
from rpe3d.drawing.palette import OTHERS, SOFT, Style
from rpe3d.evaluate.plots import Panel, Plot, png
from rpe3d.geometry.registry import LAWS
from stamp import COLUMNS

INTERPOLATED = " + PI"
"""The end of the label of a phased form with `interpolate=true`."""
NUMBERS = ("law", "seed", "weights", "trained", "tokens", "applied", "length", "measure", "at", "value", "n")
Row = Mapping[str, str]


class Results:
    """The CSV: whole after every model and law, in an order that does not depend on how it was made."""

    def __init__(self, path: Path, origin: dict[str, str]) -> None:
        self.path = path
        self.origin = origin
        self.rows: list[Row] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))

    def lacks(self, law: str, seed: int, applied: str, length: int) -> bool:
        cell = (law, str(seed), applied, str(length))
        return all((row["law"], row["seed"], row["applied"], row["length"]) != cell for row in self.rows)

    def forget(self, law: str, seed: int) -> None:
        """Leave out what was measured on a model whose weights are gone: it is trained again."""
        self.rows = [row for row in self.rows if (row["law"], row["seed"]) != (law, str(seed))]

    def add(self, about: Mapping[str, Any], numbers: Sequence[Number]) -> None:
        made = [{**about, **number._asdict(), "value": f"{number.value:.6g}"} for number in numbers]
        self.take([self.origin | {key: str(row[key]) for key in NUMBERS} for row in made])

    def take(self, rows: Sequence[Row]) -> None:
        """Add rows, and write all of them."""
        self.rows += rows
        self.rows.sort(key=lambda r: (int(r["seed"]), r["law"], r["applied"], int(r["length"])))
        text = io.StringIO()
        writer = csv.DictWriter(text, (*COLUMNS, *NUMBERS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        files.write_text(self.path, text.getvalue())


def mean_over_seeds(rows: Sequence[Row], measure: str, where: str, **wanted: int) -> dict[str, list[tuple[int, float]]]:
    """Return a curve for every model and law applied to it: the mean of a measure over seeds, by a column."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["measure"] == measure and all(int(row[key]) == value for key, value in wanted.items()):
            own = row["applied"] in (row["law"], f"{row['law']}{INTERPOLATED}")
            name = row["applied"] if own else f"{row['law']} → {row['applied']}"
            found[name][int(row[where])].append(float(row["value"]))
    return {name: [(x, statistics.fmean(ys)) for x, ys in sorted(at.items())] for name, at in found.items()}


def show(rows: Sequence[Row]) -> None:
    print(f"\n{'model → law applied':44} {'tail loss by length (mean of seeds)'}")
    for name, curve in mean_over_seeds(rows, "tail_loss", "length").items():
        print(f"{name:44} {', '.join(f'{short(length)} {loss:.3f}' for length, loss in curve)}", flush=True)


def draw(rows: Sequence[Row], length: int, path: Path) -> None:
    """Draw the loss of the tail under every law, and copying and attention by distance under the model's own."""
    from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

    own = [row for row in rows if row["law"] == row["applied"]]
    free = [row for row in rows if row["law"] == "rope"]
    grown = [row for row in rows if row["applied"].endswith(INTERPOLATED) or row["applied"] == "linear"]

    def panel(title: str, below: str, curves: Mapping[str, list[tuple[int, float]]], mark: int) -> Panel:
        looks = {name: style_of(name) for name in curves}

        def lines(axes: Any, paint: Paint) -> None:
            for name in boldest_last(curves, looks):
                line(axes, paint, looks[name], *zip(*curves[name], strict=True))
            values = [y for curve in curves.values() for _, y in curve]
            axes.set_yscale("log")
            narrow = max(values) < 20 * min(values)
            axes.yaxis.set_major_locator(MaxNLocator(5) if narrow else LogLocator(subs=(1, 3)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.3g}"))
            axes.set_xscale("log", base=2)
            places = sorted({x for curve in curves.values() for x, _ in curve})
            axes.set_xticks(places, labels=[short(x) for x in places], rotation=45)
            axes.margins(x=0)
            axes.minorticks_off()
            axes.axvline(mark, color=paint(SOFT), linestyle=":", linewidth=1)
            axes.set_xlabel(below)
            labels(axes, paint, looks, {name: curve[-1][1] for name, curve in curves.items()})

        return Panel(title=title, alt=f"Line chart: {title}.", size=(352, 250), draw=lines)

    window, away = "tokens in a window", "distance (tokens)"
    twice = {"length": 2 * length}
    attended = mean_over_seeds(own, "attention", "at", **twice)
    attended = {name: [(x, y) for x, y in curve if x] for name, curve in attended.items()}  # a logarithm has no 0
    shown = [
        ("Loss of the tail", window, mean_over_seeds(own, "tail_loss", "length")),
        ("... of the RoPE model, train-free", window, mean_over_seeds(free, "tail_loss", "length")),
        ("... under interpolation", window, mean_over_seeds(grown, "tail_loss", "length")),
        (f"Loss of a copy in {short(length)}", away, mean_over_seeds(own, "copy_loss", "at", length=length)),
        (f"Loss of a copy in {short(2 * length)}", away, mean_over_seeds(own, "copy_loss", "at", **twice)),
        (f"Mean weight of a key in {short(2 * length)}", away, attended),
    ]
    panels = [panel(title, below, curves, length) for title, below, curves in shown if curves]
    files.write_bytes(path, png(Plot(name="pretrain", caption="", panels=panels)))


def style_of(name: str) -> Style:
    """Return the style of the law that a curve is under; an interpolated form is thinner."""
    applied = re.split(r":| \+ ", name.rpartition("→ ")[2])[0]
    style = LAWS[applied].style if applied in LAWS else OTHERS[0]
    return style._replace(width=1.0) if name.endswith(INTERPOLATED) else style
