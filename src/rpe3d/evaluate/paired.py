"""Whether one law is better than another: differences on the same windows and trials, with intervals.

Windows differ far more from each other than laws do on one of them, so laws are compared window by window and trial by
trial. The interval is the middle 95 % of the mean difference over bootstrap samples of the windows (trials).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from rpe3d.config import choice

SAMPLES = 10_000
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How much higher a law's number is than the other law's, and between which bounds with 95 %."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def clear(self) -> bool:
        """The interval does not hold 0."""
        return self.low > 0 or self.high < 0


MEASURES: dict[str, tuple[str, Callable[[Mapping[str, Any]], float]]] = {
    "nll": ("windows", lambda item: float(item["nll"])),
    "tail_nll": ("windows", lambda item: float(item["tail_nll"])),
    "copy_nll": ("copies", lambda item: float(item["nll"])),
    "passkey": ("passkeys", lambda item: float(item["correct"])),
}
"""What is compared: where a row has its items, and the number of each."""


def paired(results: Mapping[str, Any], against: str) -> list[dict[str, Any]]:
    """For every other law at every length: {"law", "length", measure: Difference}, law less `against`.

    Losses in nats (0.01 is 1 % of perplexity), passkeys as a share. A measure that either row lacks is left out.
    """
    rows = [row for row in results["rows"] if row["status"] == "ok"]
    choice("law", against, dict.fromkeys(row["law"] for row in rows))
    base = {row["length"]: row for row in rows if row["law"] == against}
    found = []
    for row in rows:
        if row["law"] != against and row["length"] in base:
            other = base[row["length"]]
            differences = {name: _difference(row, other, *measure) for name, measure in MEASURES.items()}
            known = {name: value for name, value in differences.items() if value is not None}
            found.append({"law": row["law"], "length": row["length"], **known})
    return found


def _difference(row: Row, other: Row, kind: str, number: Callable[[Any], float]) -> Difference | None:
    if not row[kind] or len(row[kind]) != len(other[kind]):
        return None
    return bootstrap([number(a) - number(b) for a, b in zip(row[kind], other[kind], strict=True)])


def bootstrap(differences: Sequence[float]) -> Difference:
    """The mean and its interval; always the same one for the same numbers."""
    values = numpy.asarray(differences)
    draw = numpy.random.default_rng(0).integers(len(values), size=(SAMPLES, len(values)))
    low, high = numpy.quantile(values[draw].mean(1), (0.025, 0.975))
    return Difference(mean=math.fsum(differences) / len(values), low=float(low), high=float(high), n=len(values))
