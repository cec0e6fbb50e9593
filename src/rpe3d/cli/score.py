"""`rpe3d score`: score a predictions file from any program, as the benchmark's own script does.

JSON, on stdout and with --json in a file as well: {"suite", "task", "score", "n"}.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rpe3d.cli.arguments import check_writable, write_json
from rpe3d.cli.terminal import STDOUT, note, say
from rpe3d.config import choice

IDS = ("_id", "id", "index")
"""Fields of a record that tell it from the others, by suite."""
SUITES = ("longbench", "leval", "ruler", "babilong", "kv", "infinitebench", "longbench-v2", "needle")


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "predictions",
        metavar="PREDICTIONS.jsonl",
        type=Path,
        help="predictions in upstream's format (.csv for BABILong), plain or .xz, .gz, .bz2",
    )
    add("--suite", required=True, help=f"one of {', '.join(SUITES)}")
    add("--task", required=True, help="name of the task, e.g. hotpotqa or gsm100")
    add("--json", metavar="FILE", type=Path, help="also write the score as JSON; - for stdout, where it always goes")


def run(arguments: Namespace) -> int:
    choice("suite", arguments.suite, SUITES)
    from rpe3d.evaluate.tasks import suite
    from rpe3d.evaluate.tasks.predictions import read_records

    chosen = suite(arguments.suite)
    task = choice(f"{arguments.suite} task", arguments.task, chosen.TASKS)
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    records = read_records(arguments.predictions)
    score = chosen.score(task, records)
    for name in IDS:
        found = [json.dumps(record[name]) for record in records if name in record]
        if again := len(found) - len(set(found)):
            note(f"{again} of {score.n} predictions have the {name!r} of an earlier one, and count as well")
    if score.empty:
        note(f"{score.empty} of {score.n} predictions are empty")
    for kind, parts in score.parts.items():
        say(f"{kind}: " + ", ".join(f"{name} {value} ({n})" for name, (value, n) in parts.items()))
    told = {"suite": arguments.suite, "task": task, "score": score.score, "n": score.n}
    print(json.dumps(told))
    if arguments.json not in (None, STDOUT):
        write_json("--json", arguments.json, told)
    return 0
