"""Long-term decay: the bound of eq. 7 and the relative position shown, against distance (Figure 1 c, d)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpe3d.geometry import Law, decay_bound, make_law

# Okabe and Ito's palette, which colour-blind readers can tell apart. A law without a colour is not drawn.
COLOURS = {
    "rope": "#000000",
    "linear": "#56B4E9",
    "3d-rpe": "#D55E00",
    "dca": "#E69F00",
    "self-extend": "#009E73",
    "rerope": "#CC79A7",
    "leaky-rerope": "#0072B2",
    "3d-rpe-definition": "#D55E00",
}
FLOOR = 5.0  # what E_3d-rpe "stays at or above" according to section 3.2.1


class Row(NamedTuple):
    """One pair: the last query of the context and the key `distance` before it. None: the law has no such value."""

    setting: str
    pretrained: int
    context: int
    head_dim: int
    rope_theta: float
    law: str
    distance: int
    relative_position: float | None
    bound: float | None


def decay_table(setting: str, laws: Iterable[Law], *, points: int = 2048) -> list[Row]:
    """The bound E of eq. 7 and the relative position f of each law, at about `points` evenly spaced distances.

    The first and the last distance of the context are among them. Teeth narrower than the spacing are not resolved.
    """
    rows = []
    for law in laws:
        last = law.context - 1
        distance = torch.arange(0, law.context, max(1, law.context // points))
        if distance[-1] != last:
            distance = torch.cat([distance, torch.tensor([last])])
        f = torch.full(distance.shape, torch.nan, dtype=torch.float64)
        if law.single_position:
            f = law.relative_position(last, last - distance)
        bound = decay_bound(law, last, last - distance)
        model = (setting, law.pretrained, law.context, law.rotary.head_dim, law.rotary.rope_theta, law.name)
        rows += [Row(*model, *pair) for pair in zip(distance.tolist(), _numbers(f), _numbers(bound), strict=True)]
    return rows


def _numbers(values: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def figure_table(laws: Iterable[Law]) -> list[Row]:
    """The rows that `draw_decay` draws: Figure 1 (c)(d) as the paper sets it up, and `laws` on their own model.

    The paper's c = 1000 divides the context, so that the last query sees the offsets m - n = 0 .. 999 of each chunk.
    """

    def as_printed(name: str, **parameters: Any) -> Law:
        return make_law(name, pretrained=4096, context=8000, head_dim=128, rope_theta=10000.0, **parameters)

    paper = [as_printed("rope"), as_printed("3d-rpe-definition", chunk=1000)]
    shown = [law for law in laws if law.single_position and law.name in COLOURS]
    return decay_table("paper", paper, points=8000) + decay_table("model", shown)


def draw_decay(table: Iterable[Row], path: Path) -> None:
    """Draw a `figure_table`: left the bound as the paper has it, right what a pretrained model is shown.

    The suffix of `path` is the format.
    """
    import matplotlib
    from matplotlib.figure import Figure

    curves: dict[tuple[str, str], list[Row]] = {}
    for row in table:
        curves.setdefault((row.setting, row.law), []).append(row)
    figure = Figure(figsize=(9, 4.8), dpi=180, layout="constrained")
    panels: dict[str, Any] = figure.subplot_mosaic([["c", "model"], ["d", "model"]], gridspec_kw={"wspace": 0.05})
    _draw_bound(panels["c"], curves["paper", "rope"], "Figure 1 (c): RoPE, d = 128, base 10000")
    _draw_bound(panels["d"], curves["paper", "3d-rpe-definition"], "Figure 1 (d): 3D-RPE as defined, c = 1000")
    _draw_positions(panels["model"], [curve for (setting, _), curve in curves.items() if setting == "model"])
    for name, axes in panels.items():
        axes.spines[["top", "right"]].set_visible(False)
        if name != "c":
            axes.set_xlabel("distance from query to key (tokens)")
    figure.legend(loc="outside lower center", ncols=len(curves), frameon=False, handlelength=1.7, columnspacing=1.3)
    # With a fixed salt and without a date the same table gives the same SVG, byte for byte.
    with matplotlib.rc_context({"svg.hashsalt": "rpe3d"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_bound(axes: Any, curve: list[Row], title: str) -> None:
    law = curve[0].law
    points = [(row.distance, row.bound) for row in curve if row.bound is not None]
    axes.plot(*zip(*points, strict=True), color=COLOURS[law], linewidth=0.5)
    axes.axhline(FLOOR, color="white", linewidth=3)  # so that the dots show on the curve
    axes.axhline(FLOOR, color="black", linestyle=":", linewidth=1.5)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel("bound E (eq. 7)")
    axes.set_yscale("log")
    axes.set_ylim(1.4, 40)
    axes.set_yticks([2, 5, 10, 30], labels=["2", "5", "10", "30"], minor=False)
    axes.minorticks_off()
    axes.set_xticks(range(0, 8001, 2000))
    if law == "rope":
        far = [bound for distance, bound in points if distance > 1000]
        share = sum(bound > FLOOR for bound in far) / len(far)
        note, place = f"beyond 1000, {share:.0%} of the distances are above {FLOOR:g}", 0.93
    else:
        distance, lowest = min(points, key=lambda point: (round(point[1], 9), point[0]))
        note, place = f"falls below {FLOOR:g}: {lowest:.2f} at distance {distance}", 0.05
    axes.text(0.99, place, note, transform=axes.transAxes, ha="right", va="top" if place > 0.5 else "bottom")


def _draw_positions(axes: Any, curves: list[list[Row]]) -> None:
    pretrained, context = curves[0][0].pretrained, curves[0][0].context
    axes.axhspan(0, pretrained, color="0.92", zorder=0)
    for curve in curves:
        law = curve[0].law
        style = (0, (3, 3)) if law == "leaky-rerope" else "solid"  # it lies on self-extend
        x, f = [row.distance for row in curve], [row.relative_position for row in curve]
        front = 3 if law == "3d-rpe" else 2
        axes.plot(x, f, label=law, color=COLOURS[law], linewidth=1.3, linestyle=style, zorder=front)
    axes.set_title(
        f"What a model is shown: {_short(pretrained)} extended to {_short(context)}", fontsize=10, loc="left"
    )
    axes.set_ylabel("relative position f")
    axes.set_xlim(0, context)
    axes.set_ylim(0, 1.5 * pretrained)
    for axis, unit, count in ((axes.xaxis, context / 4, 5), (axes.yaxis, pretrained / 4, 7)):
        axis.set_ticks([i * unit for i in range(count)], labels=[_short(i * unit) for i in range(count)])
    beside_rope = 1.2 * pretrained if context >= 2 * pretrained else 0.03 * context
    for note, side, edge in (("seen in training", "top", 0.97), ("not seen in training", "bottom", 1.03)):
        axes.text(beside_rope, edge * pretrained, note, va=side, color="0.35")


def _short(tokens: float) -> str:
    """65536 as 64k."""
    return f"{tokens / 1024:g}k" if tokens and tokens % 512 == 0 else f"{tokens:.0f}"
