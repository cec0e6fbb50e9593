"""Shared parts of every plot: plain axes, a law's line, its name at the end of it, tokens along the bottom."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rpe3d.drawing.palette import GRID, INK, SOFT, Colour, Style

TEXT = 10.0
Paint = Callable[[Colour], str]


def short(tokens: float) -> str:
    """Write 65536 as 64k, 12000 as 12,000."""
    return f"{tokens / 1024:g}k" if tokens >= 1024 and tokens % 512 == 0 else f"{tokens:,.0f}"


def boldest_last(laws: Iterable[str], looks: Mapping[str, Style]) -> list[str]:
    """Return laws in drawing order: what is drawn last is on top."""
    return sorted(laws, key=lambda law: looks[law].width)


def line(axes: Any, paint: Paint, style: Style, x: Sequence[float], y: Sequence[float]) -> None:
    dash = (0, style.dash) if style.dash else "solid"
    axes.plot(x, y, color=paint(style.colour), linestyle=dash, linewidth=style.width, solid_capstyle="round")


def tokens(axes: Any, length: int, label: str) -> None:
    """Write tokens along the bottom, at multiples of a power of two."""
    axes.set_xlim(0, length)
    ticks = range(0, length + 1, 2 ** math.ceil(math.log2(length / 6)))
    axes.set_xticks(ticks, labels=[short(tick) for tick in ticks])
    axes.set_xlabel(label)


def labels(axes: Any, paint: Paint, looks: Mapping[str, Style], ends: Mapping[str, float]) -> None:
    """Write each law's name at the end of its line, or with an arrow at the top if the line has left the plot."""
    low, high = axes.get_ylim()
    place = (lambda y: math.log(y / low) / math.log(high / low)) if axes.get_yscale() == "log" else lambda y: y / high
    names = sorted(ends, key=lambda name: ends[name])
    at = [min(place(ends[name]), 1.0) for name in names]
    for name, end, label in zip(names, at, spread(at, gap=0.07), strict=True):
        ink = paint(looks[name].colour)
        axes.annotate(
            name if ends[name] <= high else f"{name} ↑",
            xy=(1, end),
            xytext=(1.04, label),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=ink,
            size=TEXT - 1,
            va="center",
            weight="bold" if looks[name].width > 2 else "normal",
            arrowprops={"arrowstyle": "-", "color": ink, "lw": 0.6, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)},
        )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Return places at least `gap` apart in the order of `wanted`, as near to it as possible, shifted into [0, 1]."""
    groups: list[tuple[float, int]] = []  # the mean place of the first label's column, and how many share it
    for i, value in enumerate(wanted):
        mean, count = value - i * gap, 1
        while groups and groups[-1][0] >= mean:
            before, size = groups.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        groups.append((mean, count))
    places = [mean for mean, count in groups for _ in range(count)]
    places = [place + i * gap for i, place in enumerate(places)]
    top = [1.0 - gap * i for i in reversed(range(len(places)))]
    places = [min(place, highest) for place, highest in zip(places, top, strict=True)]
    lift = max(0.0, -places[0])
    return [max(place, lift + places[0] + i * gap) for i, place in enumerate(places)]


def plain(axes: Any, paint: Paint) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(paint(SOFT))
    axes.tick_params(colors=paint(SOFT), labelcolor=paint(INK), labelsize=TEXT - 1)
    axes.grid(color=paint(GRID), linewidth=0.6)
    axes.set_axisbelow(True)


RC = {"text.parse_math": False, "svg.fonttype": "none", "font.size": TEXT, "axes.titlesize": TEXT + 1}
