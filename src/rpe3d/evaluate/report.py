"""The report of a comparison: one page that needs no network, its plots as PNG and its table as CSV.

Everything comes from the results file, so that a report can be made again without the model.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from rpe3d.config import ConfigError
from rpe3d.drawing.axes import short
from rpe3d.drawing.palette import COLOURS, Style, styles, variable
from rpe3d.evaluate.findings import findings, number
from rpe3d.evaluate.plots import Plot, plots, png, svg
from rpe3d.files import refusing, write_all

Results = Mapping[str, Any]
Row = Mapping[str, Any]


class Column(NamedTuple):
    """A measure in the table: its heading, what it means, the value that ranks laws (less is better), and its text."""

    heading: str
    meaning: str
    rank: Callable[[Row], float | None]
    text: Callable[[Row], str]


def _column(name: str, heading: str, meaning: str, text: Callable[[float], str], sign: int = 1) -> Column:
    def rank(row: Row) -> float | None:
        return None if row[name] is None else sign * float(row[name])

    return Column(heading, meaning, rank, lambda row: text(row[name]))


TABLE = (
    _column("ppl", "ppl", "perplexity of all tokens", number),
    _column(
        "tail_ppl", "tail ppl", "perplexity of the last tokens of each window (4096, or half a shorter one)", number
    ),
    _column("copy_nll", "copy", "NLL per token of a passage repeated at the end of the window", "{:.2f}".format),
    Column(
        "passkey",
        "passkeys answered in full, of those hidden",
        lambda row: -row["passkey"] / row["passkey_n"] if row["passkey_n"] else None,
        lambda row: f"{row['passkey']}/{row['passkey_n']}",
    ),
    _column("tokens_per_second", "tokens/s", "speed of the perplexity windows", "{:,.0f}".format, sign=-1),
)
CSV = ("law", "length", "status", "ppl", "tail_ppl", "copy_nll", "passkey", "passkey_n", "tokens_per_second", "tokens",
       "seconds")  # fmt: skip


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write `report.html`, a PNG of each plot and `table.csv` into `folder`, all or none; returns their paths."""
    if results.get("schema") != 1 or results.get("kind") != "compare":
        raise ConfigError(
            "these are not results of `rpe3d compare`, schema 1", "give the JSON that `rpe3d compare --json` writes"
        )
    drawn = plots(results)
    contents = {f"{plot.name}.png": png(plot) for plot in drawn}
    contents["table.csv"] = _csv(results).encode()
    contents["report.html"] = _page(results, drawn).encode()
    with refusing(f"cannot write the report to {folder}", "give a folder that can be written to"):
        return write_all(contents, folder)


def _csv(results: Results) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV)
    writer.writerows([row[name] for name in CSV] for row in results["rows"])
    return file.getvalue()


# --- the page


def _page(results: Results, drawn: list[Plot]) -> str:
    model, looks = results["model"], styles(results["settings"]["laws"])
    headline, *others = findings(results)
    size = f"{model['parameters'] / 1e6:,.0f} M parameters"
    about = f"{model['name']} · {model['architecture']} · {size} · pretrained on {short(model['pretrained'])} tokens"
    lines = [plot for plot in drawn if plot.name != "passkey"]
    maps = [plot for plot in drawn if plot.name == "passkey"]
    asked = len(results["settings"]["laws"]) * len(results["settings"]["lengths"])
    if len(results["rows"]) < asked:
        others.append(f"Unfinished: {len(results['rows'])} of {asked} rows; the same command goes on from here.")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(model["name"])}: laws compared</title>
<style>{_variables()}{CSS}</style>
</head>
<body>
<header>
<p class="about">{escape(about)}</p>
<h1>{_unbroken(headline, looks)}</h1>
<ul>{"".join(f"<li>{_unbroken(sentence, looks)}</li>" for sentence in others)}</ul>
</header>
<main>
{_table(results, looks)}
{_figures("lines", lines)}
{_figures("maps", maps)}
{_parameters(results, looks)}
{_making(results)}
</main>
</body>
</html>
"""


def _unbroken(sentence: str, laws: Iterable[str]) -> str:
    """The sentence with every law's name in one line: `3d-rpe` would be parted at its hyphen."""
    names = "|".join(re.escape(escape(law)) for law in sorted(laws, key=len, reverse=True))
    return re.sub(f"(?<![\\w-])({names})(?![\\w-])", r'<span class="law">\1</span>', escape(sentence))


def _variables() -> str:
    light = "".join(f"{variable(colour)}:{colour.light};" for colour in COLOURS)
    dark = "".join(f"{variable(colour)}:{colour.dark};" for colour in COLOURS)
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _swatch(style: Style) -> str:
    """A piece of the law's line; the name beside it says the same in words."""
    dash = f' stroke-dasharray="{" ".join(f"{part * style.width:g}" for part in style.dash)}"' if style.dash else ""
    line = f'stroke="var({variable(style.colour)})" stroke-width="{1.4 * style.width:g}"{dash}'
    return f'<svg class="swatch" viewBox="0 0 22 8" aria-hidden="true"><path d="M0 4H22" {line}/></svg>'


def _law(name: str, looks: Mapping[str, Style]) -> str:
    return f'<th scope="row">{_swatch(looks[name])}{escape(name)}</th>'


def _table(results: Results, looks: Mapping[str, Style]) -> str:
    columns = [c for c in TABLE if any(c.rank(row) is not None for row in results["rows"])]
    heads = "".join(f'<th scope="col" title="{escape(c.meaning)}">{escape(c.heading)}</th>' for c in columns)
    parts, pretrained = [], results["model"]["pretrained"]
    for length in results["settings"]["lengths"]:
        rows = [row for row in results["rows"] if row["length"] == length]
        best = [_best(rows, column) for column in columns]
        title = f"{short(length)} tokens, {length / pretrained:.3g} × the pretrained length"
        parts.append(f'<tbody><tr class="length"><th colspan="{len(columns) + 1}" scope="rowgroup">{title}</th></tr>')
        for row in rows:
            if row["status"] == "ok":
                cells = "".join(_cell(row, column, top) for column, top in zip(columns, best, strict=True))
            else:
                cells = f'<td class="missing" colspan="{len(columns)}">{escape(row["status"])}</td>'
            parts.append(f"<tr>{_law(row['law'], looks)}{cells}</tr>")
        parts.append("</tbody>")
    meanings = "; ".join(f"<b>{escape(c.heading)}</b>: {escape(c.meaning)}" for c in columns)
    return f"""<section><h2>Every law at every length</h2>
<div class="wide"><table class="numbers"><thead><tr><th scope="col">law</th>{heads}</tr></thead>
{"".join(parts)}</table></div>
<p class="note">{meanings}. The best of each column at a length is <b class="best">marked</b>.
<a href="table.csv">table.csv</a></p></section>"""


def _best(rows: list[Row], column: Column) -> str | None:
    """The text of the best value, so that what reads alike is marked alike; None where there is nothing to choose."""
    ranked = [
        (rank, column.text(row)) for row in rows if row["status"] == "ok" and (rank := column.rank(row)) is not None
    ]
    return min(ranked)[1] if len({text for _, text in ranked}) > 1 else None


def _cell(row: Row, column: Column, best: str | None) -> str:
    if column.rank(row) is None:
        return '<td class="missing">–</td>'
    text = column.text(row)
    return f'<td class="best">{text}</td>' if text == best else f"<td>{text}</td>"


def _figures(kind: str, drawn: list[Plot]) -> str:
    figures = [
        f"<figure><h3>{escape(panel.title)}</h3>{svg(panel, f'{plot.name}-{i}')}</figure>"
        for plot in drawn
        for i, panel in enumerate(plot.panels)
    ]
    if not figures:
        return ""
    notes = "".join(
        f'<p class="note">{escape(plot.caption)} <a href="{plot.name}.png">{plot.name}.png</a></p>' for plot in drawn
    )
    title = {"lines": "Where each law breaks", "maps": "Passkeys: depth in the prompt × length"}[kind]
    return f'<section><h2>{title}</h2><div class="{kind}">{"".join(figures)}</div>{notes}</section>'


def _parameters(results: Results, looks: Mapping[str, Style]) -> str:
    """One line for each setting of a law; lengths with the same setting share it."""
    lengths: dict[tuple[str, str], list[str]] = {}
    for row in results["rows"]:
        text = ", ".join(f"{name} {_value(value)}" for name, value in row["parameters"].items())
        lengths.setdefault((row["law"], text), []).append(short(row["length"]))
    rows = "".join(
        f"<tr>{_law(law, looks)}<td class='at'>{', '.join(at)}</td><td>{escape(text) or 'none'}</td></tr>"
        for (law, text), at in lengths.items()
    )
    head = '<tr><th scope="col">law</th><th scope="col">at</th><th scope="col">its own parameters</th></tr>'
    table = f'<table class="words"><thead>{head}</thead><tbody>{rows}</tbody></table>'
    return f'<section><h2>Parameters</h2><div class="wide">{table}</div></section>'


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _making(results: Results) -> str:
    def pairs(values: Mapping[str, Any]) -> str:
        rows = (
            f'<tr><th scope="row">{escape(name)}</th><td>{escape(_value(value))}</td></tr>'
            for name, value in values.items()
        )
        return f'<table class="words"><tbody>{"".join(rows)}</tbody></table>'

    settings = {name: value for name, value in results["settings"].items() if name != "given"}  # `_parameters` has it
    texts = "".join(
        f'<tr><th scope="row">{escape(text["name"])}</th><td class="at">{text["tokens"]:,} tokens</td>'
        f"<td><code>{escape(text['sha256'])}</code></td></tr>"
        for text in results["texts"]
    )
    return f"""<section><h2>How it was made</h2>
<pre>{escape(results["command"])}</pre>
<div class="making">
<div><h3>Model</h3>{pairs(results["model"])}</div>
<div><h3>Settings</h3>{pairs(settings)}</div>
<div><h3>Versions</h3>{pairs(results["versions"])}</div>
</div>
<h3>Texts (sha256)</h3><table class="words"><tbody>{texts}</tbody></table></section>"""


CSS = """
:root{--page:#fff;--soft:#6b6b70;--ink:#1d1d1f;--line:#dcdce0;--tint:#f4f4f6;--mark:#dcecf8}
@media (prefers-color-scheme:dark){
:root{--page:#141417;--soft:#a0a0a8;--ink:#f0f0f2;--line:#3a3a40;--tint:#202024;--mark:#173a55}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:24px 16px 64px;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;overflow-wrap:anywhere}
h1{font-size:clamp(22px,3.2vw,34px);line-height:1.2;margin:4px 0 16px;max-width:30em;text-wrap:balance}
h2{font-size:20px;margin:48px 0 12px}
h3{font-size:14px;margin:0 0 6px}
.about{color:var(--soft);margin:0;font-size:14px}
header ul{margin:0;padding-left:1.2em;max-width:60em}
header li{margin:4px 0}
.law{white-space:nowrap}
.note{color:var(--soft);font-size:13px;max-width:68em;margin:10px 0 0}
a{color:inherit}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.numbers{width:100%;font-size:15px}
th,td{padding:5px 10px;text-align:right;border-bottom:1px solid var(--line);vertical-align:top;font-weight:400}
td,thead th{white-space:nowrap}
.words td{white-space:normal}
th:first-child,.words td,.words th{text-align:left}
thead th{color:var(--soft);font-size:13px;border-bottom-color:var(--soft)}
.length th{font-weight:600;background:var(--tint);padding-top:8px;padding-bottom:8px}
tbody th[scope=row]{overflow-wrap:normal}
.best{font-weight:700;background:var(--mark)}
.missing{color:var(--soft)}
td.missing[colspan]{text-align:left;font-style:italic}
.words{font-size:14px}
td.at{white-space:nowrap}
.words th{color:var(--soft)}
.words th:has(.swatch){color:inherit;white-space:nowrap}
.swatch{width:22px;height:8px;margin-right:8px;vertical-align:middle}
.lines,.maps,.making{display:grid;gap:28px 32px}
.lines{grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr))}
.lines figure{max-width:640px}
.maps{grid-template-columns:repeat(auto-fill,minmax(min(44%,190px),1fr))}
.maps figure{max-width:260px}
.making{grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));margin-bottom:24px}
figure{margin:0;min-width:0}
figure svg{display:block;width:100%;height:auto}
svg text{font-family:inherit!important}
pre{background:var(--tint);padding:12px 14px;border-radius:8px;white-space:pre-wrap;font-size:13px;margin:0 0 20px}
code{font-size:12px}
@media (max-width:600px){body{padding:16px 12px 48px}.numbers{font-size:13px}.numbers th,.numbers td{padding:5px 4px}
thead th{font-size:11px}.swatch{width:14px;margin-right:5px}.words{font-size:13px}}
"""
