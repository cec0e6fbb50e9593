"""What a run has written, read back."""

from __future__ import annotations

import csv


def losses(out):
    """The loss of every step."""
    with (out / "log.csv").open(newline="", encoding="utf-8") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]
