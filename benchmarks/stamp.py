"""What every row of a result says about where it came from."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

from rpe3d.evaluate.origin import commit

COLUMNS = ("machine", "torch", "commit", "recipe")


def stamp(*, cuda: bool) -> dict[str, str]:
    """The machine, torch, the commit (with a + where files differ from it) and the command."""
    machine = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    recipe = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_without_folder(sys.argv[1:])])
    return dict(zip(COLUMNS, (machine, torch.__version__, commit() or "unknown", recipe), strict=True))


def _without_folder(arguments: list[str]) -> list[str]:
    """Where texts lay and the result was written, and in how many minutes, is no part of the recipe."""
    arguments = [Path(x).name if "/" in x and Path(x).is_file() else x for x in arguments]
    if "--minutes" in arguments:
        at = arguments.index("--minutes")
        arguments = [*arguments[:at], *arguments[at + 2 :]]
    if "--out" not in arguments:
        return arguments
    at = arguments.index("--out")
    return [*arguments[:at], "--out", "DIR", *arguments[at + 2 :]]
