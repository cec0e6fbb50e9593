"""Test whether one law is better than another: differences on the same windows and trials, with 95 % intervals.

Windows differ far more from each other than laws do on one of them, so laws are compared window by window and trial by
trial. All windows of a row count equally in its loss, so its difference from another row is the plain mean of the
windows' differences, and Student's t gives the interval of that mean. Passkeys are right or wrong: their interval is
that of Bonett and Price (2012, doi:10.3102/1076998611411915) for the difference of two paired proportions.

An interval needs at least three items. Overlapping windows have none: they are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist, stdev
from typing import Any, NamedTuple

from rpe3d.config import choice

LEVEL = 0.95
FEWEST = 3
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How much higher a law's number is than another law's, with its 95 % bounds if they are known."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def clear(self) -> bool:
        """Whether there is an interval and it excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


MEASURES: dict[str, tuple[str, Callable[[Mapping[str, Any]], float]]] = {
    "nll": ("windows", lambda item: float(item["nll"])),
    "tail_nll": ("windows", lambda item: float(item["tail_nll"])),
    "copy_nll": ("copies", lambda item: float(item["nll"])),
    "long_nll": ("key_windows", lambda item: float(item["nll"])),
    "passkey": ("passkeys", lambda item: float(item["correct"])),
}
"""Compared measures: where a row has its items, and the number of each."""


class Shown(NamedTuple):
    """How a measure's differences are shown: its heading, their scale factor, and the better sign."""

    heading: str
    scale: float
    better: int


SHOWN = {
    "nll": Shown("ppl %", 100.0, -1),
    "tail_nll": Shown("tail ppl %", 100.0, -1),
    "copy_nll": Shown("copy nll", 1.0, -1),
    "passkey": Shown("passkey", 1.0, 1),
    "long_nll": Shown("longppl %", 100.0, -1),
}
"""Perplexities in percent, copying in nats, passkeys as a share."""


def signed(difference: Difference, how: Shown) -> list[str]:
    """Write a difference and its interval, if it has one: ["+0.53", "(+0.11 .. +0.95)"]."""
    bounds = [f"{how.scale * bound:+.2f}" for bound in (difference.low, difference.high) if bound is not None]
    return [f"{how.scale * difference.mean:+.2f}", f"({' .. '.join(bounds)})" if bounds else ""]


def paired(results: Mapping[str, Any], against: str) -> list[dict[str, Any]]:
    """Return {"law", "length", measure: Difference} for every other law at every length: law minus `against`.

    Losses are in nats (0.01 is 1 % of perplexity), passkeys a share. A measure that either row lacks is left out.
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


def not_beaten(rows: Sequence[Row], measure: str, rank: Callable[[Row], float]) -> list[str] | None:
    """Return the best law by `rank` (lowest first) and those indistinguishable from it; None without intervals."""
    best, *others = sorted(rows, key=rank)
    laws = [best["law"]]
    for row in others:
        difference = _difference(row, best, *MEASURES[measure])
        if difference is None or difference.low is None:
            return None
        laws += [] if difference.clear else [row["law"]]
    return laws


def _difference(row: Row, other: Row, kind: str, number: Callable[[Any], float]) -> Difference | None:
    if not row.get(kind) or len(row[kind]) != len(other.get(kind, ())):
        return None
    if kind == "key_windows":
        return key_difference(row, other)
    values = [number(a) - number(b) for a, b in zip(row[kind], other[kind], strict=True)]
    if kind == "passkeys":
        return paired_shares(values)
    if kind == "windows" and _overlap(row):
        return Difference(mean=math.fsum(values) / len(values), low=None, high=None, n=len(values))
    return mean_difference(values)


def key_difference(row: Row, other: Row) -> Difference | None:
    """Return the difference of mean losses over key tokens, of which windows have different numbers n.

    The mean is a ratio of sums over windows, and so has the interval of its linear part (Cochran, Sampling Techniques,
    1977, section 6.3): windows differ from the mean by W n (d - mean) / N. Equal n give the plain mean.
    """
    if row["long_ppl"] is None or other["long_ppl"] is None:
        return None
    both = [
        (a["n"], a["nll"] - b["nll"]) for a, b in zip(row["key_windows"], other["key_windows"], strict=True) if a["n"]
    ]
    total = sum(n for n, _ in both)
    mean = math.fsum(n * d for n, d in both) / total
    if _overlap(row, "key_windows"):
        return Difference(mean=mean, low=None, high=None, n=len(both))
    return mean_difference([mean + len(both) * n * (d - mean) / total for n, d in both])


def _overlap(row: Row, kind: str = "windows") -> bool:
    """Return whether two windows of the row share text. One shared token may be BOS, which is not part of the text."""
    places = sorted((window["text"], window["start"]) for window in row[kind])
    return any(a[0] == b[0] and b[1] - a[1] < row["length"] - 1 for a, b in pairwise(places))


def mean_difference(differences: Sequence[float]) -> Difference:
    """Return the mean of differences and its Student's t interval; no interval for fewer than three differences."""
    n = len(differences)
    mean = math.fsum(differences) / n
    if n < FEWEST:
        return Difference(mean=mean, low=None, high=None, n=n)
    half = student(n - 1) * stdev(differences) / math.sqrt(n)
    return Difference(mean=mean, low=mean - half, high=mean + half, n=n)


def paired_shares(differences: Sequence[float]) -> Difference:
    """Return the mean of differences of -1, 0 or 1, and Bonett and Price's interval; none for fewer than three.

    One more trial is counted for either side, so that trials which all agree do not give an interval of width zero.
    """
    n = len(differences)
    mean = math.fsum(differences) / n
    if n < FEWEST:
        return Difference(mean=mean, low=None, high=None, n=n)
    better, worse = ((sum(d == side for d in differences) + 1) / (n + 2) for side in (1, -1))
    half = NormalDist().inv_cdf((1 + LEVEL) / 2) * math.sqrt((better + worse - (better - worse) ** 2) / (n + 2))
    low, high = better - worse - half, better - worse + half
    return Difference(mean=mean, low=max(-1.0, low), high=min(1.0, high), n=n)


@cache
def student(freedom: int) -> float:
    """Return the t within which a mean of `freedom` + 1 normal numbers stays 95 % of the time, by bisection."""
    low, high = 0.0, 13.0  # 12.706 for one degree of freedom, and less for more
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < LEVEL else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Return P(|T| < t): the finite series of Abramowitz and Stegun, 26.7.3 (odd) and 26.7.4 (even)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
