"""`rpe3d bench`: measure what a law costs on this machine, against the stock model in the same run.

The JSON is {"schema": 1, "kind": "bench", "command", "model", "versions", "rows"}; `evaluate.speed` describes a row.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rpe3d.cli.arguments import check_writable, command_line, laws, need, size, write_json
from rpe3d.cli.compare import LAW
from rpe3d.cli.model import MODEL, add_model_arguments, check_laws, check_loaded, load_model
from rpe3d.cli.terminal import STDOUT, new_table, progress_bar, say, show
from rpe3d.config import whole

LAWS = "3d-rpe,dca"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--laws", "--law", metavar="A,B", default=LAWS, help=f"{LAW}; default {LAWS}")
    add("--length", metavar="N", type=size, default="8k", help="tokens in the prompt; default 8k")
    add("--new", metavar="N", type=int, default=16, help="tokens to decode after the prompt; default 16")
    add("--repeat", metavar="N", type=int, default=3, help="rounds; the median is reported; default 3")
    add_model_arguments(parser)
    add("--json", metavar="FILE", type=Path, help="write the rows as JSON; - for stdout")


def run(arguments: Namespace) -> int:
    need("cli", "rich")
    need("models", "transformers")
    given = laws(arguments.laws)
    length, new = whole("--length", arguments.length, least=2), whole("--new", arguments.new)
    repeat = whole("--repeat", arguments.repeat)
    from rpe3d.evaluate.origin import versions
    from rpe3d.evaluate.speed import check_labels, measure_speed
    from rpe3d.evaluate.under import about
    from rpe3d.models import as_stock, facts

    check_labels(given)
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    check_laws(arguments, given, [length + new])
    loaded = load_model(arguments)
    check_loaded(loaded.model, given)
    known = facts(as_stock(loaded.model))
    context = max(length + new, 2 * known["pretrained"])
    with progress_bar() as progress:
        rows = measure_speed(
            loaded.model, given, length=length, new=new, repeat=repeat, context=context, progress=progress
        )
    if arguments.json != STDOUT:
        print_table(rows)
    if arguments.json is not None:
        content = {"schema": 1, "kind": "bench", "command": command_line()}
        content |= {"model": about(loaded.model, arguments.model, known), "versions": versions(), "rows": rows}
        write_json("--json", arguments.json, content)
        if arguments.json != STDOUT:
            say(f"wrote {arguments.json}")
    return 0


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows on stdout, with memory columns where there is a GPU."""
    columns = ["length", "tokens/s", "stock", "speed"] + (["MiB", "stock MiB", "memory"] if rows[0]["mib"] else [])
    table = new_table("law", "", *columns, words=("law", ""))
    for row in rows:
        rates = f"{row['tokens_per_second']:.1f}", f"{row['stock_tokens_per_second']:.1f}", f"{row['speed']:.2f} x"
        memory = (str(row["mib"]), str(row["stock_mib"]), f"{row['memory']:.2f} x") if row["mib"] else ()
        table.add_row(row["law"], row["what"], str(row["length"]), *rates, *memory)
    show(table)
