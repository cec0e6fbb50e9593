"""`rpe3d tasks`: list what `rpe3d eval --tasks` takes.

JSON, schema 1: {"schema": 1, "kind": "tasks", "suites": {suite: {"about", "tasks": {name: in the suite by default}}}}.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rpe3d.cli.arguments import need, write_json
from rpe3d.cli.terminal import STDOUT, new_table, say, show

ABOUT = {
    "longbench": "LongBench: questions, summaries, few-shot, retrieval and code; from --data or the hub",
    "longbench-v2": "LongBench v2: four choices about a long document; from --data or the hub",
    "leval": "L-Eval, closed-ended: exact match; from --data or the hub",
    "ruler": "RULER: needles, variables and word counts, generated on the fly",
    "babilong": "BABILong: facts hidden in a long text; upstream's files from --data, or bAbI's mixed into --texts",
    "infinitebench": "InfiniteBench's retrieval tasks, generated on the fly or from --data",
    "kv": "Lost in the Middle's key-value retrieval, generated on the fly or from --data",
    "needle": "RULER's needle at eleven depths of --texts, for a heat map",
    "ppl": "perplexity of --texts; ppl:FOLDER reads a folder of --data",
    "passkey": "a number hidden at evenly spaced depths",
    "copy": "loss on a passage that is repeated at the end",
    "longppl": "perplexity of the tokens that need the far text; needs --keys",
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the table as JSON; - prints it instead")


def run(arguments: Namespace) -> int:
    need("cli", "rich")
    from rpe3d.evaluate.tasks import SUITES, suite

    suites: dict[str, Any] = {}
    for name, about in ABOUT.items():
        chosen = suite(name) if name in SUITES else None
        tasks = {} if chosen is None else {task: task in chosen.DEFAULT for task in chosen.TASKS}
        suites[name] = {"about": about, "tasks": tasks}
    if arguments.json is not None:
        write_json("--json", arguments.json, {"schema": 1, "kind": "tasks", "suites": suites})
    if arguments.json == STDOUT:
        return 0
    table = new_table("suite", "tasks", words=("suite", "tasks"))
    table.columns[0].no_wrap = True
    table.columns[1].overflow = "fold"
    for name, told in suites.items():
        names = [task if usual else f"{task}*" for task, usual in told["tasks"].items()]
        table.add_row(name, told["about"] + (f":\n{', '.join(names)}" if names else ""))
    show(table)
    say("`rpe3d eval MODEL --tasks ruler,longbench:lcc`; tasks marked * run only by name")
    return 0
