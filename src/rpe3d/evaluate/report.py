"""Write the report of a comparison or an evaluation: one page that needs no network, plots as PNG and rows as CSV.

Everything comes from the results file, so that a report can be written again without the model.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup

from rpe3d.config import ConfigError
from rpe3d.drawing.axes import short
from rpe3d.drawing.palette import COLOURS, Style, variable
from rpe3d.drawing.web import page
from rpe3d.evaluate.findings import STOCK, findings, number
from rpe3d.evaluate.heat import heat_maps
from rpe3d.evaluate.names import with_short_names
from rpe3d.evaluate.paired import SHOWN, Difference, Shown, not_beaten, paired, signed
from rpe3d.evaluate.plots import Plot, plots, png, svg
from rpe3d.evaluate.scores import TITLES, margin, scores
from rpe3d.evaluate.tables import parts_csv, rows_csv, tables
from rpe3d.files import refusing, write_all
from rpe3d.geometry import styles

Results = Mapping[str, Any]
Row = Mapping[str, Any]


class Column(NamedTuple):
    """A measure in the table: its heading, its meaning, the value that ranks laws (lower is better), and its text.

    `paired` is the measure whose differences tell laws apart; without it no law is marked as the best.
    """

    heading: str
    meaning: str
    rank: Callable[[Row], float | None]
    text: Callable[[Row], str]
    paired: str | None = None


def _column(name: str, heading: str, meaning: str, text: Callable[[float], str], paired: str | None = None) -> Column:
    def rank(row: Row) -> float | None:
        return None if row.get(name) is None else float(row[name])

    return Column(heading, meaning, rank, lambda row: text(row[name]), paired)


TABLE = (
    _column("ppl", "ppl", "perplexity of all tokens", number, "nll"),
    _column(
        "tail_ppl",
        "tail ppl",
        "perplexity of the last tokens of each window (4096, or half a shorter one)",
        number,
        "tail_nll",
    ),
    _column(
        "copy_nll", "copy", "NLL per token of a passage repeated at the end of the window", "{:.2f}".format, "copy_nll"
    ),
    _column("long_ppl", "longppl", "perplexity of the key tokens, which need the far context", number, "long_nll"),
    Column(
        "key tokens",
        "how many longppl is of; below 30 it has no number",
        lambda row: None if row.get("key_tokens") is None else 0.0,
        lambda row: f"{row['key_tokens']:,}",
    ),
    Column(
        "passkey",
        "passkeys answered in full, of those hidden",
        lambda row: -row["passkey"] / row["passkey_n"] if row["passkey_n"] else None,
        lambda row: f"{row['passkey']}/{row['passkey_n']}",
        "passkey",
    ),
    _column("tokens_per_second", "tokens/s", "speed of the perplexity windows", "{:,.0f}".format),
)
CSV = ("law", "length", "status", "ppl", "tail_ppl", "copy_nll", "passkey", "passkey_n", "tokens_per_second", "tokens",
       "seconds", "commit", "long_ppl", "key_tokens")  # fmt: skip


def write_report(results: Results, folder: Path, against: str | None = None) -> list[Path]:
    """Write `report.html`, a PNG of each plot and `table.csv` into `folder`, all or none, and return their paths.

    Differences are shown from the law `against`; by default from stock RoPE, or from the first law.
    """
    if results.get("schema") != 1 or results.get("kind") != "compare":
        raise ConfigError(
            "these are not results of `rpe3d compare`, schema 1", "pass the JSON that `rpe3d compare --json` writes"
        )
    told, labels = with_short_names(results)
    drawn = plots(told)
    contents = {f"{plot.name}.png": png(plot) for plot in drawn}
    contents["table.csv"] = rows_csv(results, CSV).encode(errors="backslashreplace")
    shown = next((name for name, label in labels.items() if label == against), against)
    # A file's name may hold bytes that are not UTF-8, and so may the command that names it.
    contents["report.html"] = _page(told, drawn, labels, shown).encode(errors="backslashreplace")
    return _write(contents, folder)


def _write(contents: dict[str, bytes], folder: Path) -> list[Path]:
    with refusing(f"cannot write the report to {folder}", "pass a writable folder"):
        return write_all(contents, folder)


def _page(results: Results, drawn: list[Plot], labels: Mapping[str, str], against: str | None) -> str:
    model, looks = results["model"], styles(results["settings"]["laws"])
    headline, *others = findings(results)
    size = f"{model['parameters'] / 1e6:,.0f} M parameters"
    asked = len(results["settings"]["laws"]) * len(results["settings"]["lengths"])
    if len(results["rows"]) < asked:
        others.append(f"Unfinished: {len(results['rows'])} of {asked} rows; the same command resumes here.")
    columns = [c for c in TABLE if any(c.rank(row) is not None for row in results["rows"])]
    settings = {name: value for name, value in results["settings"].items() if name != "given"}  # as parameters
    making = {"model": model, "settings": settings, "versions": results["versions"]}
    return page(
        "rpe3d.evaluate",
        "compare",
        _variables(looks),
        title=f"{model['name']}: laws compared",
        about=f"{model['name']} · {model['architecture']} · {size} · pretrained on {short(model['pretrained'])} tokens",
        headline=_unbroken(headline, looks),
        others=[_unbroken(sentence, looks) for sentence in others],
        strokes={law: _stroke(style) for law, style in looks.items()},
        columns=columns,
        groups=list(_groups(results, columns)),
        differences=_differences(results, against),
        labels=labels,
        lines=[_shown(plot) for plot in drawn if plot.name != "passkey"],
        maps=[_shown(plot) for plot in drawn if plot.name == "passkey"],
        parameters=_parameters(results),
        command=results["command"],
        making={part: {name: _value(value) for name, value in values.items()} for part, values in making.items()},
        texts=results["texts"],
    )


def _unbroken(sentence: str, laws: Iterable[str]) -> Markup:
    """Return the sentence with every law's name on one line: `3d-rpe` would be split at its hyphen."""
    names = "|".join(re.escape(escape(law)) for law in sorted(laws, key=len, reverse=True))
    return Markup(re.sub(f"(?<![\\w-])({names})(?![\\w-])", r'<span class="law">\1</span>', escape(sentence)))


def _variables(looks: Mapping[str, Style]) -> str:
    """Return the CSS variables of the page's colours, for light and dark."""
    colours = dict.fromkeys([*COLOURS, *(style.colour for style in looks.values())])
    light = "".join(f"{variable(colour)}:{colour.light};" for colour in colours)
    dark = "".join(f"{variable(colour)}:{colour.dark};" for colour in colours)
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _stroke(style: Style) -> Markup:
    """Return the SVG attributes of a law's line."""
    dash = f' stroke-dasharray="{" ".join(f"{part * style.width:g}" for part in style.dash)}"' if style.dash else ""
    return Markup(f'stroke="var({variable(style.colour)})" stroke-width="{1.4 * style.width:g}"{dash}')


def _groups(results: Results, columns: Sequence[Column]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table for each length."""
    for length in results["settings"]["lengths"]:
        rows = [row for row in results["rows"] if row["length"] == length]
        best = [_best(rows, column) for column in columns]
        shown = [
            {"law": row["law"], "status": row["status"], "cells": list(map(partial(_cell, row), columns, best))}
            for row in rows
        ]
        times = length / results["model"]["pretrained"]
        yield {"title": f"{short(length)} tokens, {times:.3g} × the pretrained length", "rows": shown}


def _best(rows: list[Row], column: Column) -> list[str]:
    """Return the best law and those within its noise; none if all are, or if the noise is not known."""
    known = [row for row in rows if row["status"] == "ok" and column.rank(row) is not None]
    if column.paired is None or len(known) < 2:
        return []
    best = not_beaten(known, column.paired, lambda row: column.rank(row) or 0.0)
    return best if best is not None and len(best) < len(known) else []


def _cell(row: Row, column: Column, best: list[str]) -> dict[str, str]:
    if row["status"] != "ok" or column.rank(row) is None:
        return {"mark": "missing", "text": "–"}
    return {"mark": "best" if row["law"] in best else "", "text": column.text(row)}


def _differences(results: Results, against: str | None) -> dict[str, Any] | None:
    """Return each law's difference from one of them, as the page shows it; None if there is nothing to compare."""
    laws = list(dict.fromkeys(row["law"] for row in results["rows"] if row["status"] == "ok"))
    if len(laws) < 2:
        return None
    base = against if against is not None and against in laws else STOCK if STOCK in laws else laws[0]
    rows = paired(results, base)
    measures = [name for name in SHOWN if any(name in row for row in rows)]
    groups = []
    for length in dict.fromkeys(row["length"] for row in rows):
        lines = []
        for row in (row for row in rows if row["length"] == length):
            cells = [_difference(row[name], SHOWN[name]) if name in row else None for name in measures]
            lines.append({"law": row["law"], "cells": cells})
        groups.append({"title": f"{short(length)} tokens", "rows": lines})
    headings = [SHOWN[name].heading for name in measures]
    return {"against": base, "columns": headings, "groups": groups} if groups and measures else None


def _difference(difference: Difference, how: Shown) -> dict[str, str]:
    mean, interval = signed(difference, how)
    sign = math.copysign(1, difference.mean)
    mark = ("better" if sign == how.better else "worse") if difference.clear else ""
    return {"mean": mean, "interval": interval, "mark": mark}


def _shown(plot: Plot) -> dict[str, Any]:
    panels = [
        {"title": panel.title, "svg": Markup(svg(panel, f"{plot.name}-{i}"))} for i, panel in enumerate(plot.panels)
    ]
    return {"name": plot.name, "caption": plot.caption, "panels": panels}


def _parameters(results: Results) -> list[tuple[str, str, str]]:
    """Return one line for each setting of a law; lengths with the same setting share it."""
    lengths: dict[tuple[str, str], list[str]] = {}
    for row in results["rows"]:
        text = ", ".join(f"{name} {_value(value)}" for name, value in row["parameters"].items())
        lengths.setdefault((row["law"], text), []).append(short(row["length"]))
    return [(law, ", ".join(at), text) for (law, text), at in lengths.items()]


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_page(results: Results, folder: Path, file: Path | None = None) -> list[Path]:
    """Write `report.html`, `rows.csv`, and heat maps and `parts.csv` if there are any, and return their paths.

    `file` is the results file; the page links to the predictions next to it.
    """
    maps = heat_maps(results)
    contents = {"rows.csv": rows_csv(results).encode(errors="backslashreplace")}
    if any(row.get("parts") for row in results["rows"]):
        contents["parts.csv"] = parts_csv(results).encode()
    contents |= {f"{plot.name}.png": png(plot) for plot in maps}
    whole = _eval_page(results, folder, file, maps).encode(errors="backslashreplace")
    return _write({**contents, "report.html": whole}, folder)


def _eval_page(results: Results, folder: Path, file: Path | None, maps: Sequence[Plot]) -> str:
    told, labels = with_short_names(results)
    model = told["model"]
    size = f"{model['parameters'] / 1e6:,.0f} M parameters · {model['pretrained']} positions"
    data = {
        task: ", ".join(f"{part['name']} ({part['n']}, {part['sha256'][:12]})" for part in parts)
        for task, parts in told["data"].items()
    }
    headline, *others = scores(told)
    laws = dict.fromkeys(row["law"] for row in told["rows"])
    return page(
        "rpe3d.evaluate",
        "eval",
        _variables({}),
        title=f"{model['name']}: evaluation",
        about=f"{model['name']} · {model['architecture']} · {size} · {model['dtype']} · {model['device']}",
        headline=_unbroken(headline, laws),
        others=[_unbroken(sentence, laws) for sentence in others],
        labels=labels,
        tables=tables(told),
        maps=[_shown(plot) for plot in maps],
        rows=[_scored(row, folder, file) for row in told["rows"] if row["status"] == "ok"],
        failed=[row for row in told["rows"] if row["status"] != "ok"],
        command=told["command"],
        making={
            "Settings": told["settings"],
            "Versions": told["versions"],
            "Data (samples or characters, sha256)": data,
        },
    )


def _scored(row: Row, folder: Path, file: Path | None) -> dict[str, Any]:
    """Return a row of the page's last table: one score with its margin, and a link to its predictions."""
    link = None
    if file is not None and row.get("predictions"):
        link = Path(os.path.relpath(file.parent / row["predictions"], folder)).as_posix()
    wide = f" ± {margin(row['score'], row['n']):.1f}" if row["suite"] in TITLES and row["n"] else ""
    task = ":".join(filter(None, (row["suite"], row["task"])))
    return {
        "law": row["law"],
        "length": short(row["length"]),
        "task": task,
        "score": f"{row['score']:.2f}{wide}",
        "n": row["n"],
        "link": link and quote(link),
    }
