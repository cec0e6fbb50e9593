"""The plots of a comparison, each a list of panels that are drawn once and shown twice.

In a page, a panel is an inline SVG whose colours are CSS variables, so that it follows the reader's light or dark
scheme; next to the page, all panels of a plot are one PNG.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch

from rpe3d.config import ConfigError
from rpe3d.drawing.axes import RC, TEXT, Paint, boldest_last, labels, line, plain, short, tokens
from rpe3d.drawing.palette import BAND, HIT, INK, MISS, ON_HIT, ON_MISS, SOFT, Colour, Style, variable
from rpe3d.geometry import Law, saved_law, styles

Results = Mapping[str, Any]
Row = Mapping[str, Any]
SMOOTHED = 5  # buckets that a point of the position curve is the mean of
SHOWN = 10  # times the lowest curve's perplexity that the position plot reaches: a law beyond has left it


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes: its title, its description in words, its size in points, and how to draw it."""

    title: str
    alt: str
    size: tuple[float, float]
    draw: Callable[[Any, Paint], None]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Panels of one kind, and the sentence under them."""

    name: str
    caption: str
    panels: list[Panel]


def plots(results: Results) -> list[Plot]:
    """Return every plot for which the results have the numbers."""
    made = [positions_plot(results), profile_plot(results), passkey_plot(results)]
    return [plot for plot in made if plot.panels]


# --- perplexity by position


def smoothed(positions: Sequence[Row]) -> list[float]:
    """Return the mean NLL around every bucket: `SMOOTHED` buckets, fewer at the ends, weighted by tokens."""
    half = SMOOTHED // 2
    around = [positions[max(0, i - half) : i + half + 1] for i in range(len(positions))]
    return [sum(b["nll"] * b["n"] for b in near) / sum(b["n"] for b in near) for near in around]


def positions_plot(results: Results) -> Plot:
    looks, pretrained = styles(results["settings"]["laws"]), results["model"]["pretrained"]
    panels = []
    for length in results["settings"]["lengths"]:
        rows = [row for row in results["rows"] if row["length"] == length and row.get("positions")]
        if rows:
            ends = ", ".join(f"{row['law']} {math.exp(smoothed(row['positions'])[-1]):.3g}" for row in rows)
            panels.append(
                Panel(
                    title=f"Perplexity by position, windows of {short(length)}",
                    alt=f"Line chart of perplexity along windows of {length} tokens. At the end: {ends}.",
                    size=(352, 250),
                    draw=_drawing_positions(rows, looks, length, pretrained),
                )
            )
    caption = (
        f"Perplexity of the tokens at each place in the window, as the mean of {SMOOTHED} neighbouring buckets. Where "
        "a curve leaves the others, that law breaks (↑: it ends above the plot). "
        f"The dotted line is the pretrained length, {short(pretrained)}."
    )
    return Plot(name="positions", caption=caption, panels=panels)


def _drawing_positions(
    rows: list[Row], looks: Mapping[str, Style], length: int, pretrained: int
) -> Callable[[Any, Paint], None]:
    def draw(axes: Any, paint: Paint) -> None:
        curves = {row["law"]: [math.exp(nll) for nll in smoothed(row["positions"])] for row in rows}
        places = [(bucket["from"] + bucket["to"]) / 2 for bucket in rows[0]["positions"]]
        for law in boldest_last(curves, looks):
            line(axes, paint, looks[law], places, curves[law])
        values = [value for curve in curves.values() for value in curve]
        roof = SHOWN * min(sorted(curve)[len(curve) // 2] for curve in curves.values())
        axes.set_yscale("log")
        axes.set_ylim(0.9 * min(values), 1.1 * min(max(values), roof))
        _perplexities(axes)
        if pretrained < length:
            axes.axvline(pretrained, color=paint(SOFT), linestyle=":", linewidth=1)
        tokens(axes, length, "position in the window (tokens)")
        labels(axes, paint, looks, {law: curve[-1] for law, curve in curves.items()})

    return draw


def _perplexities(axes: Any) -> None:
    """Set round numbers on a logarithmic axis, as many as are legible."""
    low, high = axes.get_ylim()
    for steps in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
        ticks = [step * 10.0**e for e in range(-1, 12) for step in steps if low <= step * 10.0**e <= high]
        if len(ticks) <= 6:
            break
    axes.set_yticks(ticks, labels=[f"{tick:,.4g}" if tick < 1000 else f"{tick:,.0f}" for tick in ticks])
    axes.minorticks_off()


# --- what a law shows the model


def profile_plot(results: Results) -> Plot:
    """Plot f against distance for the last query of the longest length, using only the parameters in the results."""
    settings, model = results["settings"], results["model"]
    length = max(settings["lengths"])
    context = max(length, model["pretrained"])
    looks = styles(settings["laws"])
    made = {row["law"]: _law(row, model, context) for row in results["rows"] if row["length"] == length}
    curves = {name: law for name, law in made.items() if law is not None and law.single_position}
    missing = [name for name in made if name not in curves]
    caption = (
        f"What the model is shown instead of the true distance, for the last query of {short(context)} tokens. "
        f"The band marks the relative positions it saw in training, up to {short(model['pretrained'])}."
    )
    if missing:
        caption += f" Not drawn, because these have no single relative position: {', '.join(missing)}."
    panel = Panel(
        title=f"Relative position shown, context {short(context)}",
        alt=f"Line chart of relative position against distance in tokens, for {', '.join(curves)}.",
        size=(352, 250),
        draw=_drawing_profile(curves, looks, model["pretrained"], context),
    )
    return Plot(name="profile", caption=caption, panels=[panel] if curves else [])


def _law(row: Row, model: Row, context: int) -> Law | None:
    """Make the law of a row; None if its parameters make none (a row may exist only to say so)."""
    about = {name: model[name] for name in ("pretrained", "head_dim", "rope_theta")}
    try:
        return saved_law({"name": row.get("name", row["law"]), "context": context, **about, **row["parameters"]})
    except ConfigError:
        return None


def _drawing_profile(
    laws: Mapping[str, Law], looks: Mapping[str, Style], pretrained: int, context: int
) -> Callable[[Any, Paint], None]:
    def draw(axes: Any, paint: Paint) -> None:
        top = 1.5 * pretrained
        axes.axhspan(0, pretrained, color=paint(BAND), linewidth=0, zorder=0)
        distance = torch.arange(0, context, max(1, context // 1024))
        ends = {}
        for name in boldest_last(laws, looks):
            f = laws[name].relative_position(context - 1, context - 1 - distance)
            shown = f.isfinite() & (f <= top)
            x = torch.where(shown, distance.double(), torch.nan)
            line(axes, paint, looks[name], x.tolist(), f.tolist())
            ends[name] = float(f[f.isfinite()][-1])
        axes.set_ylim(0, top)
        ticks = [i * pretrained / 4 for i in range(0, 7, 2)]
        axes.set_yticks(ticks, labels=[short(tick) for tick in ticks])
        beside = {"ha": "right", "va": "top", "color": paint(SOFT), "size": TEXT - 1}
        axes.text(0.93 * context, 0.98 * pretrained, "seen in training", **beside)
        tokens(axes, context, "distance from query to key (tokens)")
        labels(axes, paint, looks, ends)

    return draw


# --- passkeys


def passkey_plot(results: Results) -> Plot:
    settings = results["settings"]
    rows = [row for row in results["rows"] if row.get("passkeys")]
    lengths = [length for length in settings["lengths"] if any(row["length"] == length for row in rows)]
    depths = sorted({round(trial["depth"], 3) for row in rows for trial in row["passkeys"]})
    panels = []
    for law in settings["laws"]:
        trials_at: dict[tuple[int, float], list[bool]] = {}
        for row in rows:
            for trial in row["passkeys"] if row["law"] == law else []:
                trials_at.setdefault((row["length"], round(trial["depth"], 3)), []).append(trial["correct"])
        if not trials_at:
            continue
        counts = []
        for length in lengths:
            trials = [ok for (at, _), found in trials_at.items() if at == length for ok in found]
            counts.append(
                f"{sum(trials)} of {len(trials)} at {length} tokens" if trials else f"none at {length} tokens"
            )
        panels.append(
            Panel(
                title=law,
                alt=f"Heat map of passkeys found by {law}, depth against length: {', '.join(counts)}.",
                size=(64 + 26 * len(lengths), 44 + 17 * len(depths)),
                draw=drawing_cells({place: _passkeys(found) for place, found in trials_at.items()}, lengths, depths),
            )
        )
    caption = (
        "One cell for each place of the passkey in the prompt: 0 % is the beginning, farthest from the question. "
        "✓: the answer was the whole key; ×: it was not."
    )
    return Plot(name="passkey", caption=caption, panels=panels)


def _passkeys(found: list[bool]) -> tuple[float, str]:
    """Return the share of passkeys found in a cell, and its mark."""
    share = sum(found) / len(found)
    return share, ("✓" if share else "×") if len(found) == 1 else f"{sum(found)}/{len(found)}"


def drawing_cells(
    cells: Mapping[tuple[int, float], tuple[float, str]], lengths: list[int], depths: list[float]
) -> Callable[[Any, Paint], None]:
    """Return how to draw a heat map: a cell, by length and depth, has a share from 0 to 1 as its colour and a mark."""

    def draw(axes: Any, paint: Paint) -> None:
        for x, length in enumerate(lengths):
            for y, depth in enumerate(depths):
                if (length, depth) not in cells:
                    continue
                share, mark = cells[length, depth]
                place = {"height": 0.94, "width": 0.94, "bottom": y - 0.47, "linewidth": 0}
                axes.bar(x, color=paint(MISS), **place)
                axes.bar(x, color=paint(HIT), alpha=share, **place)
                ink = paint(ON_HIT if share > 0.75 else INK if share else ON_MISS)
                axes.text(x, y, mark, ha="center", va="center", color=ink, size=TEXT - 1)
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylim(len(depths) - 0.5, -0.5)
        axes.set_xticks(range(len(lengths)), labels=[short(length) for length in lengths])
        axes.set_yticks(range(len(depths)), labels=[f"{depth:.0%}" for depth in depths])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.grid(False)

    return draw


def svg(panel: Panel, identity: str) -> str:
    """Return a panel as an <svg> for a page that defines every `variable`; `identity` makes its inner ids unique."""
    import matplotlib
    from matplotlib.figure import Figure

    codes: dict[Colour, str] = {}

    def paint(colour: Colour) -> str:
        return codes.setdefault(colour, f"#0{len(codes):02x}abc")  # colours nobody would choose

    with matplotlib.rc_context({**RC, "svg.hashsalt": identity}):
        figure = Figure(figsize=(panel.size[0] / 72, panel.size[1] / 72), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        plain(axes, paint)
        panel.draw(axes, paint)
        axes.xaxis.label.set_color(paint(SOFT))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>|\s*<style.*?</style>|\s*<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"|(<svg[^>]*?) height="[^"]*"', r"\1\2", text)
    widest = f"max-width:{1.6 * panel.size[0]:.0f}px"  # larger, and its words are larger than the page's
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape(panel.alt)}" style="{widest}"', 1)
    for colour, code in codes.items():
        text = text.replace(code, f"var({variable(colour)})")
    return text


def png(plot: Plot) -> bytes:
    """Return all panels of a plot as one PNG, in the light colours."""
    import matplotlib
    from matplotlib.figure import Figure

    paint: Paint = lambda colour: colour.light  # noqa: E731
    width, height = plot.panels[0].size
    across = min(len(plot.panels), max(1, round(1056 / width)))
    down = -(-len(plot.panels) // across)
    with matplotlib.rc_context(RC):
        size = (across * width / 72, down * (height + 22) / 72)
        figure = Figure(figsize=size, dpi=144, layout="constrained", facecolor="white")
        every = figure.subplots(down, across, squeeze=False).flatten().tolist()
        for axes, panel in zip(every, plot.panels, strict=False):
            plain(axes, paint)
            panel.draw(axes, paint)
            axes.set_title(panel.title, loc="left", color=paint(INK))
        for axes in every[len(plot.panels) :]:
            axes.set_visible(False)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()
