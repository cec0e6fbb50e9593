"""Pass refusals from vLLM's processes to `rpe3d serve`: in vLLM's output, a reason is one line of hundreds."""

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
    """Write a ConfigError to the file that `rpe3d serve` has named, if it started this process, and raise it again."""
    try:
        yield
    except ConfigError as error:
        if path := os.environ.get(VARIABLE):
            write_json(Path(path), {"problem": error.problem, "hint": error.hint})
        raise


def refusal(path: Path) -> ConfigError | None:
    """Return the reason that a process wrote to a file; None if none did."""
    try:
        return ConfigError(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
