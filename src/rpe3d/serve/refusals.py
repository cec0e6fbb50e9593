"""Reasons of vLLM's processes, told to `rpe3d serve`: in what vLLM prints, a reason is one line of hundreds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rpe3d.config import ConfigError
from rpe3d.files import write_json

VARIABLE = "RPE3D_REFUSAL"


@contextmanager
def told() -> Iterator[None]:
    """Write a ConfigError to the file that `rpe3d serve` has named, if it started this process, and raise it."""
    try:
        yield
    except ConfigError as error:
        if path := os.environ.get(VARIABLE):
            write_json(Path(path), {"problem": error.problem, "hint": error.hint})
        raise


def refusal(path: Path) -> ConfigError | None:
    """Return the reason that a process wrote to a file; None where none did."""
    try:
        return ConfigError(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
