"""List every figure by name, with the functions that make and draw its table, and write them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rpe3d.analysis import draw, draw_attention, draw_sphere, ours, paper
from rpe3d.analysis.table import Table
from rpe3d.drawing.axes import RC, Paint
from rpe3d.drawing.palette import PAGE
from rpe3d.drawing.web import page
from rpe3d.files import refusing, write_bytes

SCHEMES = ("light", "dark")


class Figure(NamedTuple):
    """A table, its drawing, and the size of that in inches."""

    table: Callable[[], Table]
    draw: Callable[[Any, Table, Paint], None]
    size: tuple[float, float]


FIGURES: Mapping[str, Figure] = {
    "figure-1a": Figure(paper.circle, draw.draw_circle, (4.2, 4.2)),
    "figure-1b": Figure(paper.sphere, draw_sphere.draw_sphere, (8.0, 4.3)),
    "figure-1cd": Figure(paper.decay, draw.draw_decay, (8.0, 7.6)),
    "figure-1ef": Figure(paper.interpolation, draw.draw_interpolation, (8.0, 3.6)),
    "figure-2": Figure(paper.chunking, draw.draw_chunking, (8.0, 4.2)),
    "figure-3": Figure(paper.matrices, draw.draw_matrices, (9.0, 9.2)),
    "supplement-a": Figure(paper.bloch, draw_sphere.draw_bloch, (6.2, 4.4)),
    "positions": Figure(ours.positions, draw.draw_positions, (10.5, 6.0)),
    "regions": Figure(ours.regions, draw.draw_regions, (8.0, 5.0)),
    "attention": Figure(ours.attention, draw_attention.draw_attention, (11.0, 4.0)),
}


def picture(figure: Figure, table: Table, scheme: str, form: str) -> bytes:
    """Return the drawing as `svg` or `png`, for `light` or `dark` pages. The same table gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    def paint(colour: Any) -> str:
        return str(getattr(colour, scheme))

    # Letters as outlines look the same on every machine; a fixed salt and no date make the same file every time.
    with matplotlib.rc_context({**RC, "svg.fonttype": "path", "svg.hashsalt": "rpe3d", "hatch.linewidth": 1.2}):
        canvas = Canvas(figsize=figure.size, dpi=200, layout="constrained", facecolor=paint(PAGE))
        figure.draw(canvas, table, paint)
        for axes in canvas.axes:
            axes.set_facecolor("none")
        file = io.BytesIO()
        about = {"Date": None, "Title": table.title} if form == "svg" else {"Title": table.title}
        canvas.savefig(file, format=form, metadata=about)
    return file.getvalue()


def files(names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Return the files of the named figures: CSV, SVG and PNG in light and dark, and last a page with all of them."""
    tables = {}
    for name in names:
        figure = FIGURES[name]
        table = tables[name] = figure.table()
        yield f"{name}.csv", table.csv().encode()
        for scheme in SCHEMES:
            for form in ("svg", "png"):
                ending = "" if scheme == "light" else f"-{scheme}"
                yield f"{name}{ending}.{form}", picture(figure, table, scheme, form)
    yield "index.html", page("rpe3d.analysis", "figures", title="3D-RPE in figures", tables=tables).encode()


def write_figures(folder: Path, names: Iterable[str], progress: Callable[[str], object] = str) -> list[Path]:
    """Write all `files` into an existing folder, each atomically, and return their paths."""
    written = []
    for name, content in files(names):
        path = folder / name
        with refusing(f"cannot write {path}", "pass a writable folder to --out"):
            write_bytes(path, content)
        written.append(path)
        progress(name)
    return written
