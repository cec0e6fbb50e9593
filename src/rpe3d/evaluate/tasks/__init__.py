"""The tasks of an evaluation: benchmarks with upstream's prompts and scores to the digit, and probes.

Every suite is a module with the same parts: `TASKS`, `DEFAULT` (those of its paper, or of 3D-RPE's), `samples` (a
task's prompts), `record` (a line of the predictions file, as upstream writes it) and `score` (of such lines, from any
program). The probes `ppl`, `copy`, `passkey` and `longppl` are in `probes`, on top of `perplexity`, `retrieval` and
`longppl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rpe3d.config import ConfigError, choice

SUITES = ("longbench", "leval", "ruler", "babilong", "kv", "infinitebench", "longbench-v2", "needle")
PROBES = ("ppl", "passkey", "copy", "longppl")
Task = tuple[str, str]
"""A suite and one of its tasks; a probe is a suite with one nameless task, and `ppl` also has one per text folder."""


def suite(name: str) -> Any:
    """Import the module of a suite."""
    return import_module(f"{__name__}.{choice('suite', name, SUITES).replace('-', '_')}")


def parse_tasks(names: Sequence[str]) -> list[Task]:
    """Parse tasks: `longbench` is the paper's, `longbench:lcc` one; `ppl` reads --texts, `ppl:X` a folder of --data."""
    tasks: list[Task] = []
    for name in names:
        group, _, one = name.strip().partition(":")
        choice("suite of tasks", group, (*SUITES, *PROBES))
        if group in SUITES:
            known = suite(group)
            tasks += (
                [(group, choice(f"{group} task", one, known.TASKS))] if one else [(group, t) for t in known.DEFAULT]
            )
        elif one and group != "ppl":
            raise ConfigError(f"{group} has no task {one!r}", f"write {group} alone")
        else:
            tasks.append((group, one))
    return list(dict.fromkeys(tasks))


def title(task: Task) -> str:
    return ":".join(filter(None, task))
