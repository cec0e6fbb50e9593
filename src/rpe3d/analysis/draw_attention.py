"""The picture of docs/concepts/attention.md: a law's regions, the library calls that cover them, and their merge."""

from __future__ import annotations

from typing import Any

from rpe3d.analysis.table import Table
from rpe3d.drawing.axes import TEXT, Paint
from rpe3d.drawing.palette import BAND, INK, PAGE, SOFT, Colour

REGIONS = (Colour("#bcd9f7", "#1f4a73"), Colour("#fbcfae", "#7a3512"))
"""Background colours of near and far pairs."""
NAMES = ("near: RoPE as it is", "far: turned otherwise")
MARKED = 23
"""The query whose parts are followed."""


def draw_attention(figure: Any, table: Table, paint: Paint) -> None:
    """Draw the pairs by region (left), the calls by number (middle), the parts of one query and their sum (right)."""
    regions, calls, merge = figure.subplot_mosaic([["r", "c", "m"]], width_ratios=[1, 1, 0.9]).values()
    figure.get_layout_engine().set(wspace=0.1)
    for axes, title in (
        (regions, "1  law.regions: how a pair is turned"),
        (calls, "2  prepare: regions → library calls"),
        (merge, f"3  run: parts → one result, query {MARKED}"),
    ):
        axes.set_title(title, loc="left", color=paint(INK), size=TEXT + 1)
        axes.axis("off")
    length = max(row[3] + row[4] for row in table.rows)
    for axes in (regions, calls):
        axes.set_aspect("equal", anchor="N")
        axes.set_xlim(-0.5, length + 0.2)
        axes.set_ylim(length + 0.2, -0.5)
        axes.text(length / 2, length + 1.4, "keys →", ha="center", color=paint(SOFT), size=TEXT - 1)
        axes.text(
            -1.2, length / 2, "← queries", va="center", ha="center", rotation=90, color=paint(SOFT), size=TEXT - 1
        )
    for number, region, shape, query, rows, key, columns in table.rows:
        x, y = _outline(shape, query, rows, key, columns)
        fill = paint(REGIONS[region])
        regions.fill(x, y, color=fill, linewidth=0.6)
        calls.fill(x, y, facecolor=fill, edgecolor=paint(PAGE), linewidth=2.2)
        across = key + columns * (1 / 3 if shape == "causal" else 1 / 2)
        down = query + rows * (2 / 3 if shape == "causal" else 1 / 2)
        calls.text(across, down, str(number), ha="center", va="center", color=paint(INK), size=TEXT)
    for axes in (regions, calls):
        axes.plot([0, MARKED + 1], [MARKED + 0.5] * 2, color=paint(INK), linewidth=1.2, linestyle=(0, (2, 1.5)))
    for region, name in enumerate(NAMES):
        box = {"facecolor": paint(REGIONS[region]), "edgecolor": "none", "boxstyle": "square,pad=0.35"}
        regions.text(length, 1 + 2.4 * region, name, ha="right", va="center", color=paint(INK), size=TEXT - 1, bbox=box)
    note = "one number: one call, batched\nover all pieces that have it"
    calls.text(length, 2.2, note, ha="right", va="center", color=paint(SOFT), size=TEXT - 1)
    _draw_merge(merge, table, paint)


def _draw_merge(axes: Any, table: Table, paint: Paint) -> None:
    """Draw what every call contributes to the marked query, and the sum."""
    parts = sorted((row for row in table.rows if row[3] <= MARKED < row[3] + row[4]), key=lambda row: row[5])
    axes.set_xlim(0, 10)
    axes.set_ylim(24.2, -0.5)
    place = {"va": "center", "color": paint(INK), "size": TEXT}
    for i, (number, region, _, _, _, key, columns) in enumerate(parts):
        y = 1.1 + 2.9 * i
        axes.barh(y, 7.6, left=0, height=2.2, color=paint(REGIONS[region]), linewidth=0)
        axes.text(0.3, y, f"call {number}, keys {key} to {min(key + columns - 1, MARKED)}", ha="left", **place)
        axes.text(7.3, y, "out, lse", ha="right", **place)
        axes.plot([7.6, 8.8], [y, y], color=paint(SOFT), linewidth=1.0)
    end = 1.1 + 2.9 * len(parts) + 1.6
    axes.plot([8.8, 8.8], [1.1, end], color=paint(SOFT), linewidth=1.0)
    look = {"arrowstyle": "-|>", "color": paint(SOFT), "lw": 1.0, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (7.6, end), (8.8, end), arrowprops=look)
    axes.barh(end, 7.6, left=0, height=4.6, color=paint(BAND), edgecolor=paint(SOFT), linewidth=1.0)
    axes.text(0.3, end - 1.0, "lse = log Σ exp(lseᵢ)", ha="left", **place)
    axes.text(0.3, end + 1.0, "out = Σ exp(lseᵢ − lse) outᵢ", ha="left", **place)
    words = "exactly the softmax over all keys:\nevery pair is in one call"
    axes.text(0, end + 4.4, words, ha="left", va="center", color=paint(SOFT), size=TEXT - 1)


def _outline(shape: str, query: int, rows: int, key: int, columns: int) -> tuple[list[float], list[float]]:
    """Return the corners of a call's pairs: a rectangle, or the steps of a triangle (column <= row, or >= row)."""
    if shape == "full":
        return [key, key + columns, key + columns, key], [query, query, query + rows, query + rows]
    x: list[float] = []
    y: list[float] = []
    for row in range(rows):
        edge = min(row + 1, columns) if shape == "causal" else min(row, columns)
        x += [key + edge] * 2
        y += [query + row, query + row + 1]
    far = key if shape == "causal" else key + columns
    return [*x, far, far], [*y, query + rows, query]
