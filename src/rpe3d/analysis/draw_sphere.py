"""Draw a sphere on flat axes, seen from above its equator: the far side is drawn faint, nothing is hidden."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from rpe3d.analysis.table import Table
from rpe3d.drawing.axes import TEXT, Paint
from rpe3d.drawing.palette import BAND, BLUE, GREEN, INK, ORANGE, PAGE, SOFT, Colour

Point = tuple[float, float, float]
AZIMUTH, ELEVATION = math.radians(35), math.radians(20)
CHUNKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"))
"""Colour and marker of the first chunks, which differ even in a print without colours."""


def project(point: Sequence[float]) -> tuple[float, float, float]:
    """Return the coordinates right, up, and towards the eye."""
    x, y, z = point
    across = x * math.cos(AZIMUTH) + y * math.sin(AZIMUTH)
    return (
        -x * math.sin(AZIMUTH) + y * math.cos(AZIMUTH),
        z * math.cos(ELEVATION) - across * math.sin(ELEVATION),
        z * math.sin(ELEVATION) + across * math.cos(ELEVATION),
    )


def globe(axes: Any, paint: Paint) -> None:
    """Draw the outline, the equator, two meridians and the axis."""
    flat(axes)
    turn = [math.radians(step) for step in range(0, 361, 2)]
    axes.fill([math.cos(t) for t in turn], [math.sin(t) for t in turn], color=paint(BAND), linewidth=0, zorder=0)
    axes.plot([math.cos(t) for t in turn], [math.sin(t) for t in turn], color=paint(SOFT), linewidth=1)
    for ring in (
        [(math.cos(t), math.sin(t), 0.0) for t in turn],
        [(math.cos(t), 0.0, math.sin(t)) for t in turn],
        [(0.0, math.cos(t), math.sin(t)) for t in turn],
    ):
        path(axes, paint, ring, SOFT, width=0.6)
    path(axes, paint, [(0, 0, -1.18), (0, 0, 1.18)], SOFT, width=0.6, through=True)


def flat(axes: Any) -> None:
    """Set axes for a drawing: no numbers, one scale."""
    axes.set_aspect("equal")
    axes.set_xlim(-1.3, 1.3)
    axes.set_ylim(-1.3, 1.3)
    axes.axis("off")


def path(
    axes: Any, paint: Paint, points: Iterable[Point], colour: Colour, *, width: float = 1.4, through: bool = False
) -> None:
    """Draw a line on the sphere, faint on the far side; with `through`, in one strength."""
    places = [project(point) for point in points]
    for front in (False, True):
        x = [x if through or (depth >= 0) == front else math.nan for x, _, depth in places]
        y = [y for _, y, _ in places]
        alpha = 1.0 if front else 0.35
        axes.plot(x, y, color=paint(colour), linewidth=width, alpha=alpha, zorder=2 if front else 1)


def mark(axes: Any, paint: Paint, point: Sequence[float], colour: Colour, shape: str = "o", size: float = 5) -> None:
    """Draw a point on the sphere."""
    x, y, depth = project(point)
    axes.plot(
        [x], [y], shape, color=paint(colour), markersize=size, markeredgecolor=paint(PAGE), markeredgewidth=0.7,
        alpha=1.0 if depth >= 0 else 0.45, zorder=4 if depth >= 0 else 1.5,
    )  # fmt: skip


def words(axes: Any, paint: Paint, text: str, point: Sequence[float], away: float = 1.16, **look: Any) -> None:
    """Write words next to a point, `away` times as far from the centre."""
    x, y, _ = project(point)
    look = {"ha": "center", "va": "center", "color": paint(INK), "size": TEXT} | look
    axes.text(x * away, y * away, text, zorder=5, **look)


def draw_sphere(figure: Any, table: Table, paint: Paint) -> None:
    """Draw Figure 1 (b): the phase as the figure needs it, and as it is printed."""
    every = figure.subplots(1, 2)
    for axes, base in zip(every, table.kinds("phi_base"), strict=True):
        globe(axes, paint)
        part = table.where(phi_base=base)
        for chunk, (colour, shape) in zip(part.kinds("chunk"), CHUNKS, strict=True):
            of_chunk = part.where(chunk=chunk)
            points = list(zip(*(of_chunk.column(name) for name in "xyz"), strict=True))
            for here, there in pairwise(points):
                path(axes, paint, _along(here, there), colour, width=1.2)
            for point in points:
                mark(axes, paint, point, colour, shape)
        names = ["chunk 0", "chunk 1", "chunk 2"] if base < 100 else ["chunk 0", "chunks 1, 2, ..."]
        for chunk, name in enumerate(names):
            height = project(part.where(chunk=chunk, offset=0).rows[0][5:])[1]
            axes.text(
                -math.sqrt(max(0.0, 1 - height**2)) - 0.08, height, name, ha="right", va="center",
                color=paint(CHUNKS[chunk][0]), size=TEXT,
            )  # fmt: skip
        axes.set_xlim(-1.75, 1.1)
        title = "phase base 2: chunks apart" if base < 100 else f"phase base {base:g}, as printed"
        axes.set_title(title, color=paint(INK), size=TEXT + 1)


def draw_bloch(figure: Any, table: Table, paint: Paint) -> None:
    """Draw Supplement A: the state with its two angles, and the chunks of 3D-RPE on the zero meridian."""
    axes = figure.subplots()
    globe(axes, paint)
    rows = {row[0]: row for row in table.rows}
    for name, away in (("|0⟩", 1.3), ("|1⟩", 1.3), ("|+⟩", 1.28), ("|i⟩", 1.14)):
        mark(axes, paint, rows[name][3:], INK, size=4)
        words(axes, paint, name, rows[name][3:], away)
    name, phi, theta_1, *state = rows["|φ⟩"]
    path(axes, paint, [(0, 0, 0), tuple(state)], ORANGE, width=2, through=True)
    mark(axes, paint, state, ORANGE, size=8)
    words(axes, paint, f" {name}", state, 1.12, ha="left", color=paint(ORANGE), size=TEXT + 2)
    foot = (state[0], state[1], 0.0)
    path(axes, paint, [(0, 0, 0), foot], SOFT, width=0.8, through=True)
    path(axes, paint, [foot, tuple(state)], SOFT, width=0.8, through=True)
    steps = [i / 24 for i in range(25)]
    arc = [_at(phi * s, theta_1, 0.42) for s in steps]
    path(axes, paint, arc, ORANGE, width=1.2, through=True)
    words(axes, paint, "φ", _at(phi / 2, theta_1, 0.53), 1.0, color=paint(ORANGE))
    path(axes, paint, [_at(math.pi / 2, theta_1 * s, 0.42) for s in steps], ORANGE, width=1.2, through=True)
    words(axes, paint, "θ₁", _at(math.pi / 2, theta_1 / 2, 0.56), 1.0, color=paint(ORANGE))
    for j in range(3):
        point = rows[f"chunk {j}"][3:]
        mark(axes, paint, point, BLUE, "s", size=6)
        words(axes, paint, f"chunk {j}", point, 1.06, ha="right", color=paint(BLUE))
    formula = r"$|\phi\rangle=e^{i\theta}(\cos\frac{\varphi}{2}|0\rangle+\sin\frac{\varphi}{2}e^{i\theta_1}|1\rangle)$"
    axes.set_title(formula, color=paint(ORANGE), size=TEXT + 2, parse_math=True)


def _along(here: Point, there: Point) -> list[Point]:
    """Return the parallel between two points of the same height."""
    first, last = math.atan2(here[1], here[0]), math.atan2(there[1], there[0])
    turn = (last - first) % math.tau
    radius = math.hypot(here[0], here[1])
    return [
        (radius * math.cos(first + turn * i / 12), radius * math.sin(first + turn * i / 12), here[2]) for i in range(13)
    ]


def _at(polar: float, longitude: float, radius: float) -> Point:
    return (
        radius * math.sin(polar) * math.cos(longitude),
        radius * math.sin(polar) * math.sin(longitude),
        radius * math.cos(polar),
    )
