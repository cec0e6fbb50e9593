"""The paper's evaluations: LongBench, L-Eval and RULER, with upstream's prompts and scores to the digit.

`longbench`, `leval` and `ruler` have the same parts: `TASKS`, `DEFAULT` (those of the paper), `samples` (a task's
prompts), `record` (a line of the predictions file, as upstream writes it) and `score` (of such lines,
whoever wrote them).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rpe3d.config import choice

SUITES = ("longbench", "leval", "ruler")


def suite(name: str) -> Any:
    """The module of a suite."""
    return import_module(f"{__name__}.{choice('suite', name, SUITES)}")
