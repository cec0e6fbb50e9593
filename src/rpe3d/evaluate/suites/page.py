"""The report of an evaluation: one page of tables that needs no network, and its rows as CSV."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from rpe3d.evaluate.suites.tables import Results, Table, rows_csv, tables
from rpe3d.files import refusing, write_all


def write_page(results: Results, folder: Path) -> list[Path]:
    """`report.html` and `rows.csv` in `folder`; returns their paths."""
    contents = {"rows.csv": rows_csv(results), "report.html": _page(results)}
    with refusing(f"cannot write the report to {folder}", "give a folder that can be written to"):
        return write_all({name: content.encode() for name, content in contents.items()}, folder)


def _page(results: Results) -> str:
    model = results["model"]
    size = f"{model['parameters'] / 1e6:,.0f} M parameters"
    about = f"{model['architecture']} · {size} · {model['pretrained']} positions · {model['dtype']} · {model['device']}"
    shown = "".join(_table(table) for table in tables(results))
    failed = [row for row in results["rows"] if row["status"] != "ok"]
    lost = "".join(
        f"<li>{escape(row['law'])} at {row['length']}, {escape(row['suite'])} {escape(row['task'])}: "
        f"{escape(row['status'])}</li>"
        for row in failed
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(model["name"])}: evaluation</title>
<style>{CSS}</style>
</head>
<body>
<header><p class="note">{escape(about)}</p><h1>{escape(model["name"])}</h1></header>
<main>
{shown}
{f"<section><h2>Not measured</h2><ul>{lost}</ul></section>" if failed else ""}
<section><h2>How it was made</h2>
<pre>{escape(results["command"])}</pre>
{_pairs("Settings", results["settings"])}{_pairs("Versions", results["versions"])}
{_pairs("Data (samples or characters, sha256)", _data(results))}
<p class="note">Every row, with its samples per minute: <a href="rows.csv">rows.csv</a></p></section>
</main>
</body>
</html>
"""


def _table(table: Table) -> str:
    heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    lines = []
    for line in table.lines:
        cells = "".join(f"<td>{escape(text) or '–'}</td>" for text in line.texts())
        label = escape(line.label) + (' <span class="mark">quoted</span>' if line.quoted else "")
        lines.append(f'<tr class="{"quoted" if line.quoted else "ours"}"><th scope="row">{label}</th>{cells}</tr>')
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f"""<section><h2>{escape(table.title)}</h2><div class="wide"><table>
<thead><tr><th scope="col"></th>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>{note}</section>"""


def _data(results: Results) -> dict[str, str]:
    return {
        task: ", ".join(f"{part['name']} ({part['n']}, {part['sha256'][:12]})" for part in parts)
        for task, parts in results["data"].items()
    }


def _pairs(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{escape(str(v))}</td></tr>' for k, v in values.items())
    return f'<h3>{escape(title)}</h3><table class="words"><tbody>{rows}</tbody></table>'


CSS = """
:root{--page:#fff;--soft:#6b6b70;--ink:#1d1d1f;--line:#dcdce0;--tint:#f4f4f6}
@media (prefers-color-scheme:dark){:root{--page:#141417;--soft:#a0a0a8;--ink:#f0f0f2;--line:#3a3a40;--tint:#202024}}
body{margin:0 auto;max-width:1180px;padding:24px 16px 64px;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}
h1{font-size:clamp(22px,3.2vw,34px);line-height:1.2;margin:4px 0 16px}
h2{font-size:20px;margin:48px 0 12px}
h3{font-size:14px;margin:20px 0 6px}
.note{color:var(--soft);font-size:13px;margin:10px 0 0}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:5px 10px;text-align:right;border-bottom:1px solid var(--line);font-weight:400;white-space:nowrap}
th:first-child,.words td{text-align:left}
.words td{white-space:normal}
tbody th{white-space:normal;min-width:9em}
thead th,.words th{color:var(--soft)}
.ours th,.ours td{font-weight:600}
.quoted{color:var(--soft)}
.mark{border:1px solid var(--line);border-radius:6px;padding:0 5px;font-size:12px}
pre{background:var(--tint);padding:12px 14px;border-radius:8px;white-space:pre-wrap;font-size:13px}
a{color:inherit}
"""
