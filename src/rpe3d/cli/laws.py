"""`rpe3d laws`: list all laws, one per line, or the parameters of one law.

JSON, schema 1: {"schema": 1, "kind": "laws", "laws": {name: {"description", "parameters": {name: help}}}}.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rpe3d.cli.arguments import need, write_json
from rpe3d.cli.terminal import STDOUT, new_table, say, show
from rpe3d.config import choice


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("law", metavar="LAW", nargs="?", help="list the parameters of this law; default: list all laws")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the table as JSON; - prints it instead")


def run(arguments: Namespace) -> int:
    need("cli", "rich")
    from rpe3d.geometry import laws

    known = laws()
    if arguments.law is not None:
        known = type(known)({arguments.law: known[choice("law", arguments.law, known)]})
    if arguments.json is not None:
        told = {
            name: {"description": law.description, "parameters": dict(law.parameters)} for name, law in known.items()
        }
        write_json("--json", arguments.json, {"schema": 1, "kind": "laws", "laws": told})
    if arguments.json == STDOUT:
        return 0
    if arguments.law is not None:
        law = known[arguments.law]
        print(f"{arguments.law}: {law.description}")
        rows = list(law.parameters.items())
        table = new_table("parameter", "what it is", words=("parameter", "what it is"))
    else:
        rows = [(name, law.description) for name, law in known.items()]
        table = new_table("law", "what it is", words=("law", "what it is"))
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*row)
    if table.rows:
        show(table)
    if arguments.law is None:
        say("`rpe3d laws LAW` lists the parameters of a law; set them as LAW:parameter=value")
    return 0
