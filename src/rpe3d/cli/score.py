"""`rpe3d score`: score a predictions file from any program, as the benchmark's own script does."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rpe3d.cli.terminal import note, say
from rpe3d.config import choice

SUITES = ("longbench", "leval", "ruler", "babilong", "kv", "infinitebench", "longbench-v2", "needle")


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "predictions",
        metavar="PREDICTIONS.jsonl",
        type=Path,
        help="a file in upstream's format (BABILong's is .csv), or as .xz, .gz, .bz2",
    )
    add("--suite", required=True, help=f"one of {', '.join(SUITES)}")
    add("--task", required=True, help="the task's name, such as hotpotqa or gsm100")


def run(arguments: Namespace) -> int:
    choice("suite", arguments.suite, SUITES)
    from rpe3d.evaluate.tasks import suite
    from rpe3d.evaluate.tasks.predictions import read_records

    chosen = suite(arguments.suite)
    task = choice(f"{arguments.suite} task", arguments.task, chosen.TASKS)
    score = chosen.score(task, read_records(arguments.predictions))
    if score.empty:
        note(f"{score.empty} of {score.n} predictions are empty")
    for kind, parts in score.parts.items():
        say(f"{kind}: " + ", ".join(f"{name} {value} ({n})" for name, (value, n) in parts.items()))
    print(json.dumps({"suite": arguments.suite, "task": task, "score": score.score, "n": score.n}))
    return 0
