"""Draw the flat figures. Each drawing reads only its table; `paint` gives colours for light or dark."""

from __future__ import annotations

import math
from typing import Any

from rpe3d.analysis.draw_sphere import CHUNKS, flat
from rpe3d.analysis.paper import FLOOR
from rpe3d.analysis.shown import KINDS
from rpe3d.analysis.table import Table
from rpe3d.drawing.axes import TEXT, Paint, line, plain, short, tokens
from rpe3d.drawing.palette import (
    BAND,
    GRID,
    INK,
    KIND_COLOURS,
    MISS,
    ON_MISS,
    ORANGE,
    PAGE,
    SOFT,
    Colour,
)
from rpe3d.geometry import LAWS

HATCHES = ("", "", "////", "")
"""Hatches of the kinds of pairs, so that unseen ones stand out in a print without colours."""
CHANGED = Colour("#cfe3f5", "#1d4566")
"""Background of a position that is not the true distance."""


def draw_circle(figure: Any, table: Table, paint: Paint) -> None:
    """Draw Figure 1 (a)."""
    axes = figure.subplots()
    flat(axes)
    turn = [math.radians(step) for step in range(361)]
    axes.plot([math.cos(t) for t in turn], [math.sin(t) for t in turn], color=paint(SOFT), linewidth=0.8)
    for p, known, angle, x, y in table.rows:
        fill = paint(INK if known else PAGE)
        edge = paint(INK if known else ORANGE)
        axes.plot([0, x], [0, y], color=paint(GRID), linewidth=0.7, zorder=0)
        axes.plot([x], [y], "o", markersize=8, color=fill, markeredgecolor=edge, markeredgewidth=1.6)
        if p % 4 == 0:
            label = {"ha": "center", "va": "center", "color": edge, "size": TEXT}
            axes.text(1.16 * x, 1.16 * y, str(p), **label)
        if p == 2:
            arc = [angle * i / 20 for i in range(21)]
            axes.plot([0.4 * math.cos(t) for t in arc], [0.4 * math.sin(t) for t in arc], color=paint(INK), linewidth=1)
            axes.text(0.5, 0.11, "2θ", va="center", ha="center", color=paint(INK), size=TEXT)
    axes.text(0, 0.24, "in training", color=paint(INK), ha="center", size=TEXT)
    axes.text(0, -0.36, "never seen", color=paint(ORANGE), ha="center", size=TEXT)


def draw_decay(figure: Any, table: Table, paint: Paint) -> None:
    """Draw Figure 1 (c)(d): one panel each, with the claimed floor dotted, and the outcome of the claim in words."""
    laws = table.kinds("law")
    every = figure.subplots(len(laws), 1, sharex=True, sharey=True)
    titles = {
        "rope": "(c) RoPE",
        "3d-rpe-definition": "(d) 3D-RPE as defined, c = 1000",
        "3d-rpe-dual-chunk": "(d) 3D-RPE as its authors' code computes it (dual-chunk)",
        "3d-rpe": "(d) 3D-RPE, bounded (the default here)",
    }
    for axes, law in zip(every, laws, strict=True):
        part = table.where(law=law)
        distance, bound = part.column("distance"), part.column("bound")
        plain(axes, paint)
        axes.plot(distance, bound, color=paint(LAWS[law].style.colour), linewidth=0.6)
        axes.axhline(FLOOR, color=paint(PAGE), linewidth=3)
        axes.axhline(FLOOR, color=paint(INK), linestyle=":", linewidth=1.5)
        axes.set_yscale("log")
        axes.set_ylim(1.4, 70)
        axes.set_yticks([2, 5, 10, 30], labels=["2", "5", "10", "30"])
        axes.minorticks_off()
        low = min(zip([round(value, 9) for value in bound], distance, strict=True))
        far = [value for value, at in zip(bound, distance, strict=True) if at > 1000]
        share = sum(value > FLOOR for value in far) / len(far)
        note = f"lowest {low[0]:.2f} at {low[1]:,}; beyond 1000, {share:.0%} of the distances above {FLOOR:g}"
        axes.set_title(titles[law], loc="left", color=paint(INK), size=TEXT + 1)
        axes.text(0.995, 0.93, note, transform=axes.transAxes, ha="right", va="top", color=paint(SOFT), size=TEXT - 1)
        axes.set_xlim(0, len(distance))
    every[-1].set_xlabel("distance from query to key (tokens)", color=paint(SOFT))
    figure.supylabel("bound E of eq. 7", color=paint(SOFT), size=TEXT)


def draw_interpolation(figure: Any, table: Table, paint: Paint) -> None:
    """Draw Figure 1 (e)(f)."""
    left, right = figure.subplots(1, 2)
    shapes = {"linear": "o", "3d-rpe-definition": "s", "3d-rpe": "^"}
    sizes = {law: (6, paint(LAWS[law].style.colour)) for law in shapes} | {"3d-rpe-definition": (13, "none")}
    for axes, law in ((left, "linear"), (right, "3d-rpe-definition"), (right, "3d-rpe")):
        part = table.where(law=law)
        x, style = part.column("context"), LAWS[law].style
        line(axes, paint, style, x, part.column("within"))
        size, fill = sizes[law]
        axes.plot(x, part.column("within"), shapes[law], color=fill, markeredgecolor=paint(style.colour), ms=size)
    for axes, title in ((left, "(e) RoPE with PI: L_p / L"), (right, "(f) 3D-RPE: 1 within a chunk")):
        plain(axes, paint)
        axes.set_xscale("log", base=2)
        axes.set_xticks([4096 * 2**i for i in range(5)], labels=[short(4096 * 2**i) for i in range(5)])
        axes.minorticks_off()
        axes.set_ylim(0, 1.15)
        axes.set_xlabel("context L (tokens)", color=paint(SOFT))
        axes.set_title(title, loc="left", color=paint(INK), size=TEXT + 1)
    left.set_ylabel("resolution of neighbours", color=paint(SOFT))
    part = table.where(law="linear")
    for context, within in zip(part.column("context"), part.column("within"), strict=True):
        if context in (4096, 8192, 16384, 65536):
            place: dict[str, Any] = {"xytext": (4, 7)} if context < 65536 else {"xytext": (0, 9), "ha": "center"}
            left.annotate(
                f"{within:.4g}", (context, within), textcoords="offset points", color=paint(INK), size=TEXT - 1, **place
            )
    grown = [(c, b) for c, b in zip(*(table.column(n) for n in ("chunk", "border")), strict=True) if b is not None]
    chunk, border = max(grown)
    note = (
        "squares: as defined, with PI\ntriangles: bounded, without PI\n\n"
        f"As defined, at a border: {border:,.0f} with c' = {chunk:,},\nthe token before comes a chunk after"
    )
    right.text(0.03, 0.06, note, transform=right.transAxes, color=paint(INK), size=TEXT - 1, va="bottom")


def draw_chunking(figure: Any, table: Table, paint: Paint) -> None:
    """Draw Figure 2: the tokens above, and below them a circle for each chunk with h, h⊥ and the rotated vectors."""
    above, *circles = figure.subplot_mosaic([["t", "t", "t"], ["0", "1", "2"]], height_ratios=[1, 3]).values()
    above.axis("off")
    above.set_xlim(-0.6, len(table.rows) - 0.4)
    above.set_ylim(-0.9, 1.1)
    for p, j, m, *_ in table.rows:
        colour = CHUNKS[j][0]
        above.bar(p, 0.8, bottom=-0.1, width=0.92, color=paint(colour))
        above.text(p, 0.3, f"{j},{m}", ha="center", va="center", color=paint(PAGE), size=TEXT + 1, weight="bold")
        above.text(p, -0.35, str(p), ha="center", va="center", color=paint(SOFT), size=TEXT)
    words = f"a text of L = {len(table.rows)} tokens in chunks of c = 4: each is (chunk j, offset m)"
    above.text(-0.5, 0.9, words, color=paint(INK), size=TEXT)
    turn = [math.radians(step) for step in range(361)]
    for j, axes in enumerate(circles):
        flat(axes)
        colour = CHUNKS[j][0]
        axes.plot([math.cos(t) for t in turn], [math.sin(t) for t in turn], color=paint(SOFT), linewidth=0.8)
        part = table.where(chunk=j)
        for name, x, y in (("h", 1, 0), ("h⊥", 0, 1)):
            _arrow(axes, x, y, paint(SOFT), 1.0)
            axes.text(1.14 * x, 1.32 * y, name, ha="center", va="center", color=paint(INK), size=TEXT)
        for m, x, y in zip(*(part.column(name) for name in ("offset", "x", "y")), strict=True):
            _arrow(axes, x, y, paint(colour), 2.2 if m == 0 else 1.3)
            label = f"φ{'₀₁₂'[j]} = {part.column('phi')[0]:g}" if m == 0 else f"m = {m}"
            side = "left" if x > 0.1 else "right" if x < -0.1 else "center"
            axes.text(1.1 * x, 1.1 * y, label, ha=side, va="center", color=paint(colour), size=TEXT)
        axes.set_ylim(-1.1, 1.45)
        axes.set_title(f"chunk {j}", color=paint(INK), size=TEXT + 1)


def _arrow(axes: Any, x: float, y: float, colour: str, width: float) -> None:
    look = {"arrowstyle": "-|>", "color": colour, "lw": width, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (x, y), (0, 0), arrowprops=look)


def draw_matrices(figure: Any, table: Table, paint: Paint) -> None:
    """Draw Figure 3: a cell shows the pair as printed or as defined, or the one position shown."""
    titles = {
        "printed": "as printed: (distance div c, mod c)",
        "definition": "as Definition 1 gives it: (i - j, m - n)",
        "dual-chunk": "as the authors' code: position shown",
        "bounded": "bounded: position shown",
    }
    length = max(table.column("query")) + 1
    for axes, form in zip(figure.subplots(2, 2).flatten(), table.kinds("form"), strict=True):
        axes.set_aspect("equal")
        for _, query, key, between, within, f in table.where(form=form).rows:
            fill, ink = (MISS, ON_MISS) if f < 0 else (BAND, INK)
            if f >= 0 and f != query - key:
                fill = CHANGED
            axes.bar(key, 0.94, bottom=query - 0.47, width=0.94, color=paint(fill), linewidth=0)
            pair = f"{between},{within}".replace("-", "−")
            text = pair if form in ("printed", "definition") else f"{f:g}"
            size = TEXT - 2.8 if len(text) > 3 else TEXT - 2
            axes.text(key, query, text, ha="center", va="center", color=paint(ink), size=size)
        for border in range(4, length, 4):
            axes.plot([border - 0.5] * 2, [border - 0.5, length - 0.5], color=paint(SOFT), linewidth=1)
            axes.plot([-0.5, border + 3.5], [border - 0.5] * 2, color=paint(SOFT), linewidth=1)
        axes.set_xlim(-0.5, length - 0.5)
        axes.set_ylim(length - 0.5, -0.5)
        axes.set_xticks(range(0, length, 4))
        axes.set_yticks(range(0, length, 4))
        axes.tick_params(length=0, labelcolor=paint(SOFT), labelsize=TEXT - 1)
        axes.spines[:].set_visible(False)
        axes.set_title(titles[form], loc="left", color=paint(INK), size=TEXT + 1)
        axes.set_xlabel("key", color=paint(SOFT))
        axes.set_ylabel("query", color=paint(SOFT))
    note = {"transform": figure.axes[0].transAxes, "ha": "right", "va": "top", "size": TEXT - 1}
    for n, (fill, ink, text) in enumerate(
        ((BAND, INK, "the true distance"), (CHANGED, INK, "another one"), (MISS, ON_MISS, "negative: in the future"))
    ):
        box = {"facecolor": paint(fill), "edgecolor": "none", "boxstyle": "square,pad=0.3"}
        figure.axes[0].text(0.99, 0.97 - 0.09 * n, text, color=paint(ink), bbox=box, **note)


def draw_positions(figure: Any, table: Table, paint: Paint) -> None:
    """Draw small multiples, one per law, with stock RoPE in all of them for comparison."""
    laws = table.kinds("law")
    pretrained, context = table.column("pretrained")[0], max(table.column("distance")) + 1
    every = figure.subplots(math.ceil(len(laws) / 5), 5, sharex=True, sharey=True).flatten()
    for axes in every[len(laws) :]:
        axes.set_visible(False)
    for axes, law in zip(every, laws, strict=False):
        plain(axes, paint)
        axes.axhspan(0, pretrained, color=paint(BAND), linewidth=0, zorder=0)
        axes.axhline(0, color=paint(SOFT), linewidth=0.6)
        part, style = table.where(law=law), LAWS[law].style
        x = part.column("distance")
        axes.plot([0, context], [0, context], color=paint(SOFT), linewidth=0.7)
        fastest, slowest = (
            [math.nan if f is None else f for f in part.column(f"{name} plane")] for name in ("fastest", "slowest")
        )
        ink = paint(style.colour)
        axes.plot(x, fastest, color=ink, linewidth=1.5, solid_joinstyle="round")
        if any(abs(one - other) > 1 for one, other in zip(fastest, slowest, strict=True)):
            axes.plot(x, slowest, color=ink, linewidth=1.5, linestyle=(0, (1.2, 1.2)))
        axes.set_title(law, loc="left", color=ink, size=TEXT + 1, weight="bold" if style.width > 2 else "normal")
        axes.set_xlim(0, context)
        axes.set_xticks([0, context // 2, context], labels=["0", short(context // 2), short(context)])
        axes.set_ylim(-0.8 * pretrained, 1.6 * pretrained)
        ticks = [step * pretrained // 2 for step in range(-1, 4)]
        axes.set_yticks(ticks, labels=[short(tick) if tick >= 0 else f"−{short(-tick)}" for tick in ticks])
    every[0].text(0.97, 0.5, "seen in training", transform=every[0].transAxes, ha="right", color=paint(SOFT), size=8)
    figure.supxlabel("distance from query to key (tokens)", color=paint(SOFT), size=TEXT)
    figure.supylabel("relative position shown", color=paint(SOFT), size=TEXT)


def draw_regions(figure: Any, table: Table, paint: Paint) -> None:
    """Draw one strip for each law, from the nearest key to the farthest."""
    axes = figure.subplots()
    plain(axes, paint)
    laws, context = table.kinds("law"), max(table.column("last")) + 1
    for law, _, kind, first, last in table.rows:
        place, number = laws.index(law), KINDS.index(kind)
        axes.barh(
            place, last + 1 - first, left=first, height=0.68, color=paint(KIND_COLOURS[number]), linewidth=0,
            hatch=HATCHES[number], edgecolor=paint(PAGE),
        )  # fmt: skip
    pretrained = table.column("pretrained")[0]
    axes.axvline(pretrained, color=paint(INK), linestyle=":", linewidth=1.2)
    axes.text(pretrained, -0.75, " pretrained length", color=paint(INK), size=TEXT - 1, va="center")
    axes.set_yticks(range(len(laws)), labels=laws)
    axes.set_ylim(len(laws) - 0.5, -1.2)
    axes.grid(False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    tokens(axes, context, "distance from the last query to the key (tokens)")
    axes.xaxis.label.set_color(paint(SOFT))
    handles = [
        axes.barh(0, 0, color=paint(KIND_COLOURS[n]), hatch=HATCHES[n], edgecolor=paint(PAGE), linewidth=0, label=kind)
        for n, kind in enumerate(KINDS)
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, labelcolor=paint(INK))
