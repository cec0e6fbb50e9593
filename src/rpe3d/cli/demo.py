"""`rpe3d demo`: every law for an example model as a table, and what the laws do as a picture.

JSON, schema 1: {"schema": 1, "model": {"pretrained", "context", "head_dim", "rope_theta"},
"rows": [{"law", "summary", "parameters": {name: value}}]}.
"""

from __future__ import annotations

import csv
import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rpe3d.cli.arguments import folder, need, replacing, size

EXAMPLE = "SmolLM2-135M"
PRETRAINED = 8192
HEAD_DIM = 64
ROPE_THETA = 100000.0
STRETCH = 8


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", metavar="DIR", type=Path, default=Path("demo"), help="folder for the figure; default ./demo")
    add(
        "--pretrained",
        metavar="N",
        type=size,
        default=PRETRAINED,
        help=f"positions that the example model has seen, as 8192 or 8k; default 8k, those of {EXAMPLE}",
    )
    add("--context", metavar="N", type=size, help=f"tokens that it shall take; default {STRETCH} times --pretrained")
    add("--json", metavar="FILE", type=Path, help="write the rows of the table as JSON, too")


def run(arguments: Namespace) -> int:
    need("cli", "rich", "matplotlib")
    from rpe3d.analysis import Row, draw_decay, figure_table
    from rpe3d.geometry import LAWS, make_law

    context = STRETCH * arguments.pretrained if arguments.context is None else arguments.context
    model = {
        "pretrained": arguments.pretrained,
        "context": context,
        "head_dim": HEAD_DIM,
        "rope_theta": ROPE_THETA,
    }
    laws = [make_law(name, **model) for name in LAWS]
    rows = [
        {"law": law.name, "summary": law.summary, "parameters": {p: getattr(law, p) for p in law.parameters()}}
        for law in laws
    ]

    out = folder("--out", arguments.out)
    numbers = figure_table(laws)
    written = [out / "decay.png", out / "decay.svg", out / "decay.csv"]
    for path in written[:2]:
        with replacing("--out", path) as unfinished:
            draw_decay(numbers, unfinished)
    with replacing("--out", written[2]) as unfinished, unfinished.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Row._fields, *numbers])
    if arguments.json is not None:
        text = json.dumps({"schema": 1, "model": model, "rows": rows}, indent=2, allow_nan=False)
        with replacing("--json", arguments.json) as unfinished:
            unfinished.write_text(text + "\n", encoding="utf-8")
        written.append(arguments.json)

    positions = f"from {arguments.pretrained} to {context} positions"
    _print_table(f"head_dim {HEAD_DIM}, rope_theta {ROPE_THETA:g} ({EXAMPLE}), {positions}", rows)
    print("wrote " + ", ".join(map(str, written)), file=sys.stderr)
    return 0


def _print_table(title: str, rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("law", no_wrap=True)
    table.add_column("what it does")
    table.add_column("parameters")
    for row in rows:
        values = (f"{name}={_short(value)}" for name, value in row["parameters"].items())
        table.add_row(row["law"], row["summary"], " ".join(values))
    Console().print(table)


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
