"""Summarise an evaluation in sentences made from its scores alone, with their noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean
from typing import Any

from rpe3d.drawing.axes import short
from rpe3d.evaluate.paired import LEVEL

Results = Mapping[str, Any]
Row = Mapping[str, Any]
TITLES = {"longbench": "LongBench", "leval": "L-Eval", "ruler": "RULER", "passkey": "Passkeys"}
"""Suites whose scores are percentages of n samples."""
OTHERS = {"ppl": "Perplexity", "copy": "Loss of a copied passage", "longppl": "LongPPL"}
"""Suites whose scores are better the lower they are, and whose noise a row does not record."""


def margin(score: float, n: int) -> float:
    """Return the largest possible half width of a 95 % interval for a mean of n scores from 0 to 100.

    No distribution on [0, 100] with a mean p has a larger variance than p (100 - p), that of right or wrong; the
    interval is Wilson's (1927), so that 0 or 100 from a few samples is not certain.
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    p = min(1.0, max(0.0, score / 100))
    return 100 * z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))


def suite_score(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the mean over tasks, and its margin: tasks are independent, so their variances add up."""
    margins = [margin(row["score"], row["n"]) for row in rows]
    return fmean(row["score"] for row in rows), math.hypot(*margins) / len(rows)


def scores(results: Results) -> list[str]:
    """Return each suite's means at its longest length, over the tasks that every law has there, best first."""
    rows = [row for row in results["rows"] if row["status"] == "ok" and row["score"] is not None]
    said = [_suite(rows, suite) for suite in (*TITLES, *OTHERS)]
    return [sentence for sentence in said if sentence] or ["Nothing could be measured."]


def _suite(every: Sequence[Row], suite: str) -> str:
    rows = [row for row in every if row["suite"] == suite]
    if not rows:
        return ""
    length = max(row["length"] for row in rows)
    rows = [row for row in rows if row["length"] == length]
    laws = list(dict.fromkeys(row["law"] for row in rows))
    shared = [
        task
        for task in dict.fromkeys(row["task"] for row in rows)
        if len({row["law"] for row in rows if row["task"] == task}) == len(laws)
    ]
    if not shared:
        return ""
    of = {law: [row for row in rows if row["law"] == law and row["task"] in shared] for law in laws}
    which = f"mean of {len(shared)} tasks" if len(shared) > 1 else shared[0]
    title = ", ".join(filter(None, [f"{(TITLES | OTHERS)[suite]} at {short(length)}", which]))
    if suite in OTHERS:
        means = sorted((fmean(row["score"] for row in mine), law) for law, mine in of.items())
        return f"{title}: {', '.join(f'{law} {mean:.2f}' for mean, law in means)}."
    found = sorted(((*suite_score(mine), law) for law, mine in of.items()), reverse=True)
    listed = ", ".join(f"{law} {mean:.1f} ± {wide:.1f}" for mean, wide, law in found)
    best, *others = found
    tied = [law for mean, wide, law in others if best[0] - mean <= math.hypot(best[1], wide)]
    if not others:
        return f"{title}: {listed}."
    if len(tied) == len(others):
        return f"{title}: {listed}; no law is better than another, within the noise."
    return f"{title}: {listed}" + (f"; {best[2]} and {', '.join(tied)} are within the noise." if tied else ".")
