"""Pictures of the README and the docs that no other command draws, each as SVG for light and for dark pages.

    python tools/site/pictures.py --out docs/images

`stretch` reads benchmarks/results/compare-large-smollm2.csv; `far-field` computes with `rpe3d.geometry.region.Fade`.
`rpe3d figures --out DIR` draws the others.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rpe3d.drawing.axes import RC, Paint, boldest_last, labels, line, plain, short
from rpe3d.drawing.palette import INK, PAGE, SOFT, Colour
from rpe3d.geometry import LAWS
from rpe3d.geometry.region import Fade

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "compare-large-smollm2.csv"
SHOWN = ("rope", "yarn", "dca", "self-extend", "rerope", "streaming-llm", "3d-rpe")
REACH = 4096


def stretch(figure: Any, paint: Paint) -> None:
    """Draw perplexity and passkeys by length, of the laws that the README names, from the large comparison."""
    with RESULTS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["law"] in SHOWN]
    looks = {law: LAWS[law].style for law in SHOWN}
    axes = figure.subplots(1, 2)
    for ax, column, title in zip(axes, ("ppl", "passkey"), ("perplexity", "passkeys found, of 40"), strict=True):
        ends = {}
        for law in boldest_last(SHOWN, looks):
            points = sorted((int(row["length"]), float(row[column])) for row in rows if row["law"] == law)
            assert len(points) == 4, f"{RESULTS} has {len(points)} lengths of {law}, not 4"
            line(ax, paint, looks[law], [math.log2(x) for x, _ in points], [y for _, y in points])
            ends[law] = points[-1][1]
        ticks = [2**n for n in range(13, 17)]
        ax.set_xticks([math.log2(tick) for tick in ticks], labels=[short(tick) for tick in ticks])
        ax.set_xlim(13, 16)
        ax.set_ylim(*((14, 24) if column == "ppl" else (0, 41)))
        ax.set_title(title, loc="left", color=paint(INK))
        ax.set_xlabel("tokens read (pretrained: 8k)", color=paint(SOFT))
        plain(ax, paint)
        beside(ax, paint, looks, ends)


def far_field(figure: Any, paint: Paint) -> None:
    """Draw what far keys weigh together by the query's position: a crowd of equal keys, and one that stands out."""
    ways = {"no fading": (0.0, 0.0), "focus 1": (0.0, 1.0), "focus 2": (0.0, 2.0), "focus 2, fade 1/8": (0.125, 2.0)}
    styles = [LAWS[law].style for law in ("rope", "dca", "self-extend", "3d-rpe")]
    looks = dict(zip(ways, styles, strict=True))
    positions = torch.logspace(math.log10(REACH), math.log10(65536), 200, dtype=torch.float64)
    cases = (("p equal far keys together", 0.0), ("one far key 12 nats above them", 12.0))
    for ax, (title, above) in zip(figure.subplots(1, 2, sharey=True), cases, strict=True):
        ends = {}
        for way, (rate, focus) in ways.items():
            fade = Fade(rate=rate, focus=focus, span=float(REACH))
            tau, lost = fade.sharpness(positions), fade.loss(positions)
            crowd = (positions - 1).log() if above else positions.log()
            top = torch.logaddexp(tau * above, crowd) if above else crowd
            weight = top / tau - lost - (above or math.log(REACH))
            line(ax, paint, looks[way], positions.log2().tolist(), weight.exp().tolist())
            ends[way] = float(weight[-1].exp())
        ax.set_xticks([12, 13, 14, 15, 16], labels=["4k", "8k", "16k", "32k", "64k"])
        ax.set_xlim(12, 16)
        ax.set_yscale("log", base=2)
        ax.set_ylim(1 / 16, 16.5)
        ax.set_yticks([1 / 16, 1 / 4, 1, 4, 16], labels=["1/16", "1/4", "1", "4", "16"])
        ax.set_title(title, loc="left", color=paint(INK))
        ax.set_xlabel("position of the query (reach: 4k)", color=paint(SOFT))
        plain(ax, paint)
        beside(ax, paint, looks, ends)


def beside(ax: Any, paint: Paint, looks: Any, ends: dict[str, float]) -> None:
    """Name the lines beside their ends, whatever the lowest value of the axis is."""
    low, high = ax.get_ylim()
    if ax.get_yscale() == "linear" and low:
        twin = {name: (value - low) if value <= high else math.inf for name, value in ends.items()}
        ax_labels = ax.twinx()
        ax_labels.set_ylim(0, high - low)
        ax_labels.axis("off")
        labels(ax_labels, paint, looks, twin)
    else:
        labels(ax, paint, looks, ends)


PICTURES: dict[str, Callable[[Any, Paint], None]] = {"stretch": stretch, "far-field": far_field}


def main() -> None:
    """Write every picture into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the SVG files")
    out = parser.parse_args().out
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        for suffix, side in (("", "light"), ("-dark", "dark")):
            with matplotlib.rc_context(RC | {"svg.hashsalt": name, "svg.fonttype": "path"}):

                def paint(colour: Colour, side: str = side) -> str:
                    return str(getattr(colour, side))

                figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor=paint(PAGE))
                draw(figure, paint)
                for ax in figure.axes:
                    ax.set_facecolor(paint(PAGE))
                figure.savefig(out / f"{name}{suffix}.svg", metadata={"Date": None}, facecolor=paint(PAGE))


if __name__ == "__main__":
    main()
