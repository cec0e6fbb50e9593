"""Pictures of the README and the docs that no other command draws, each as SVG for light and for dark pages.

    python tools/site/pictures.py --out docs/images

`stretch` and `results-MODEL` show what docs/results.md has in its tables; `far-field` computes with
`rpe3d.geometry.region.Fade`. `rpe3d figures --out DIR` draws the others.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import results
from rpe3d.drawing.axes import RC, Paint, boldest_last, labels, line, plain, short
from rpe3d.drawing.palette import DASHED, INK, OWN, PAGE, SOFT, Colour, Style
from rpe3d.geometry import LAWS, styles
from rpe3d.geometry.region import Fade

SHOWN = ("rope", "yarn", "dca", "self-extend", "rerope", "streaming-llm", "3d-rpe")
REACH = 4096
DENSE = Style(OWN.colour, DASHED, 1.4)


def stretch(figure: Any, paint: Paint) -> None:
    """Draw perplexity and passkeys by length, of the laws that the README names, from the large comparison."""
    model = results.MODELS["smollm2"]
    looks = {law: LAWS[law].style for law in SHOWN}
    axes = figure.subplots(1, 2)
    for ax, column, title in zip(axes, ("ppl", "passkey"), ("perplexity", "passkeys found, of 40"), strict=True):
        ends = lines(ax, paint, model, column, {law: law for law in SHOWN}, looks)
        ax.set_ylim(*((14, 24) if column == "ppl" else (0, 41)))
        ax.set_title(title, loc="left", color=paint(INK))
        beside(ax, paint, looks, ends)


def lines(
    ax: Any, paint: Paint, model: results.Model, column: str, shown: dict[str, str], looks: Any
) -> dict[str, float]:
    """Draw a column of a model's results by length; return where each line ends. `shown` names the laws."""
    kept, ends = results.rows(model.name), {}
    for name in boldest_last(shown.values(), looks):
        law = next(law for law, label in shown.items() if label == name)
        laws = {length: model.ours(length) if law == model.tuned else law for length in model.lengths}
        points = [(length, kept[law, length].number(column)) for length, law in laws.items() if (law, length) in kept]
        assert len(points) > 1, f"{model.name} has {len(points)} lengths of {law}"
        line(ax, paint, looks[name], [math.log2(x) for x, _ in points], [y for _, y in points])
        ends[name] = points[-1][1]
    ax.set_xticks([math.log2(n) for n in model.lengths], labels=[short(n) for n in model.lengths])
    ax.set_xlim(math.log2(model.lengths[0]), math.log2(model.lengths[-1]))
    ax.set_xlabel(f"tokens read (pretrained: {short(model.lengths[0])})", color=paint(SOFT))
    plain(ax, paint)
    return ends


def by_length(model: results.Model, roofs: tuple[float, float], floor: float) -> Callable[[Any, Paint], None]:
    """Return how to draw tail, copies and passkeys of a model by length, up to `roofs` of the first two."""
    shown = {model.tuned: "3d-rpe, chosen", model.dense: "3d-rpe"}
    shown |= {law: law.partition(":")[0] for law in model.beside if not law.startswith("3d-rpe")}
    looks = styles(shown.values()) | {"3d-rpe, chosen": LAWS["3d-rpe"].style, "3d-rpe": DENSE}

    def draw(figure: Any, paint: Paint) -> None:
        titles = {
            "tail_ppl": "perplexity, last 4096 tokens",
            "copy_nll": "loss of a copied passage",
            "passkey": "passkeys found, of 40",
        }
        limits = {"tail_ppl": (floor, roofs[0]), "copy_nll": (0, roofs[1]), "passkey": (0, 41)}
        for ax, (column, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
            ends = lines(ax, paint, model, column, shown, looks)
            ax.set_ylim(*limits[column])
            ax.set_title(title, loc="left", color=paint(INK))
            beside(ax, paint, looks, ends)

    return draw


def apart(model: results.Model) -> Callable[[Any, Paint], None]:
    """Return how to draw how much higher other laws are than ours at each length, with their intervals."""
    looks = styles(model.beside) | {model.dense: DENSE}
    kept = results.rows(model.name)
    shown = [
        (length, law)
        for length in model.lengths
        for law in model.beside
        if (law, length) in kept and law != model.ours(length)
    ]

    def draw(figure: Any, paint: Paint) -> None:
        titles = {
            "ppl": "perplexity",
            "tail_ppl": "perplexity, last 4096 tokens",
            "copy_nll": "loss of a copied passage",
        }
        for ax, (column, title) in zip(figure.subplots(1, 3, sharey=True), titles.items(), strict=True):
            for i, (length, law) in enumerate(shown):
                away = results.difference(model.name, length, column, law, model.ours(length))
                if away is None:  # nothing to compare with, or not measured
                    continue
                low, high = away.low, away.high
                assert low is not None
                assert high is not None
                scale = 1.0 if column == "copy_nll" else 100.0
                ink = paint(looks[law].colour)
                ax.plot([scale * low, scale * high], [i, i], color=ink, linewidth=2, solid_capstyle="round")
                ax.plot([scale * away.mean], [i], "o", color=ink, markersize=6)
            ax.axvline(0, color=paint(SOFT), linewidth=1)
            ax.set_yticks(range(len(shown)), labels=[f"{law}, {short(length)}" for length, law in shown])
            ax.set_ylim(len(shown) - 0.5, -0.5)
            ax.set_title(title, loc="left", color=paint(INK))
            ax.set_xlabel("nats above ours" if column == "copy_nll" else "% above ours", color=paint(SOFT))
            plain(ax, paint)

    return draw


def far_field(figure: Any, paint: Paint) -> None:
    """Draw what far keys weigh together by the query's position: a crowd of equal keys, and one that stands out."""
    ways = {"no fading": (0.0, 0.0), "focus 1": (0.0, 1.0), "focus 2": (0.0, 2.0), "focus 2, fade 1/8": (0.125, 2.0)}
    looks = dict(zip(ways, (LAWS[law].style for law in ("rope", "dca", "self-extend", "3d-rpe")), strict=True))
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


PICTURES: dict[str, tuple[tuple[float, float], Callable[[Any, Paint], None]]] = {
    "stretch": ((9, 3.6), stretch),
    "far-field": ((9, 3.6), far_field),
    "results-smollm2": ((12, 3.2), by_length(results.MODELS["smollm2"], (22, 4), 12)),
    "results-tinyllama": ((12, 3.2), by_length(results.MODELS["tinyllama"], (32, 6), 12)),
    "results-qwen2.5-coder": ((12, 2.7), apart(results.MODELS["qwen2.5-coder"])),
}
"""Their size in inches, and what draws them."""


def main() -> None:
    """Write every picture into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the SVG files")
    out = parser.parse_args().out
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    for name, (size, draw) in PICTURES.items():
        for suffix, side in (("", "light"), ("-dark", "dark")):
            with matplotlib.rc_context(RC | {"svg.hashsalt": name, "svg.fonttype": "path"}):

                def paint(colour: Colour, side: str = side) -> str:
                    return str(getattr(colour, side))

                figure = Figure(figsize=size, layout="constrained", facecolor=paint(PAGE))
                draw(figure, paint)
                for ax in figure.axes:
                    ax.set_facecolor(paint(PAGE))
                figure.savefig(out / f"{name}{suffix}.svg", metadata={"Date": None}, facecolor=paint(PAGE))


if __name__ == "__main__":
    main()
