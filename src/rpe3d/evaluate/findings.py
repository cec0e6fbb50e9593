"""Summarise a comparison in sentences made from its numbers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rpe3d.drawing.axes import short
from rpe3d.evaluate.paired import not_beaten
from rpe3d.evaluate.plots import smoothed
from rpe3d.geometry.laws.rope import Rope

Results = Mapping[str, Any]
Row = Mapping[str, Any]
STOCK = Rope.name


def findings(results: Results) -> list[str]:
    """Return the headline, then where stock RoPE breaks, what was retrieved, and what could not be measured."""
    rows, pretrained = results["rows"], results["model"]["pretrained"]
    measured = [row for row in rows if row["status"] == "ok"]
    if not measured:
        return ["Nothing could be measured.", *_unmeasured(rows)]
    longest = max(row["length"] for row in measured)
    at = [row for row in measured if row["length"] == longest]
    times = longest / pretrained
    where = f"At {short(longest)} tokens"
    if times > 1:
        where += f", {times:.3g} times its pretrained {short(pretrained)}"
    said = [_reading(where, at), _breaking(at, pretrained), _retrieving(longest, at, results), _copying(longest, at)]
    said += [_key_tokens(longest, at, results)]
    return [sentence for sentence in said if sentence] + _unmeasured(rows)


def number(value: float) -> str:
    """Format a number with about four digits, as one would read it out."""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _reading(where: str, rows: list[Row]) -> str:
    """Say which laws read best, which come next, and where stock RoPE ranks; crown no law within the noise."""
    known = sorted((row for row in rows if row["ppl"] is not None), key=lambda row: row["ppl"])
    if not known:
        return f"{where}, perplexity was not measured."
    if len(known) == 1:
        return f"{where}, {known[0]['law']} has perplexity {number(known[0]['ppl'])}."
    every = _grouped((row["law"], number(row["ppl"])) for row in known)
    best = not_beaten(known, "nll", lambda row: float(row["ppl"]))
    if best is None:
        count = min(len(row["windows"]) for row in known)
        few = "one window" if count == 1 else "two windows" if count == 2 else "overlapping windows"
        return f"{where}, the perplexities are: {every} ({few}: small differences may be noise)."
    if len(best) == len(known):
        return f"{where}, no law reads better than another, within the noise: {every}."
    leading = [row for row in known if row["law"] in best]
    rest = [row for row in known if row["law"] not in best]
    others = [rest[0], *(row for row in rest[1:] if row["law"] == STOCK)]
    then = " and ".join(f"{'stock RoPE' if row['law'] == STOCK else row['law']} {number(row['ppl'])}" for row in others)
    if len(best) == 1:
        first = f"{best[0]} has the lowest perplexity of {len(known)} laws, {number(leading[0]['ppl'])}"
    else:
        listed = _listed([f"{row['law']} {number(row['ppl'])}" for row in leading])
        first = f"the lowest perplexities of {len(known)} laws are within the noise of each other: {listed}"
    return f"{where}, {first}; then {then}."


def _breaking(rows: list[Row], pretrained: int) -> str:
    """Say from where on stock RoPE exceeds twice the perplexity of the best law; if it is best, of its own beginning.

    Say nothing if it is best and no bucket of positions lies within the pretrained length: it has no beginning.
    """
    known = sorted((row for row in rows if row["positions"]), key=lambda row: row["ppl"])
    stock = next((row for row in known if row["law"] == STOCK), None)
    if stock is None or stock["positions"][-1]["to"] <= pretrained:
        return ""
    buckets, curve = stock["positions"], smoothed(stock["positions"])
    if known[0] is not stock:
        level, whose = smoothed(known[0]["positions"]), f"that of {known[0]['law']}"
    else:
        early = [nll for bucket, nll in zip(buckets, curve, strict=True) if bucket["to"] <= pretrained]
        if not early:
            return ""
        level, whose = [sum(early) / len(early)] * len(curve), "what it is within the pretrained length"
    doubled = [nll > other + math.log(2) for nll, other in zip(curve, level, strict=True)]
    if not doubled[-1]:
        return f"Stock RoPE does not break: at the end of the window its perplexity is within twice {whose}."
    first = len(doubled) - next((i for i, over in enumerate(reversed(doubled)) if not over), len(doubled))
    last = number(math.exp(curve[-1]))
    return (
        f"Stock RoPE breaks at about token {buckets[first]['from']:,}: from there on its perplexity is more than twice "
        f"{whose}, and at the end it is {last}."
    )


def _retrieving(length: int, rows: list[Row], results: Results) -> str:
    """Say how many passkeys each law found; a custom probe may hide other notes."""
    known = [row for row in rows if row["passkey_n"]]
    known.sort(key=lambda row: -row["passkey"] / row["passkey_n"])
    if not known:
        return ""
    if all(len(row["passkeys"]) == 1 for row in known):
        return _answering(length, known)
    said = _grouped((row["law"], f"{row['passkey']} of {row['passkey_n']}") for row in known)
    return f"{'Notes' if 'probe' in results else 'Passkeys'} found at {short(length)}: {said}."


def _answering(length: int, rows: list[Row]) -> str:
    """Say what each law answered to one passkey, which tells more than a count."""
    trial = rows[0]["passkeys"][0]
    said = _grouped((row["law"], f"answers {row['passkeys'][0]['answer'].strip()!r}") for row in rows)
    return f"Asked for the passkey {trial['key']}, about {(1 - trial['depth']) * length:,.0f} tokens back: {said}."


def _copying(length: int, rows: list[Row]) -> str:
    known = sorted((row for row in rows if row["copy_nll"] is not None), key=lambda row: row["copy_nll"])
    said = _grouped((row["law"], f"{row['copy_nll']:.2f}") for row in known)
    return f"Copying from the beginning to the end of {short(length)}, NLL per token: {said}." if known else ""


def _key_tokens(length: int, rows: list[Row], results: Results) -> str:
    """Say what LongPPL is, and what found its key tokens: they decide which law looks good."""
    known = sorted((row for row in rows if row.get("long_ppl") is not None), key=lambda row: row["long_ppl"])
    counts = [row["key_tokens"] for row in rows if row.get("key_tokens") is not None]
    if not counts:
        return ""
    by = evaluator(results["keys"][str(length)])
    if not known:
        return f"LongPPL at {short(length)} has no number, with {counts[0]} key tokens, found by {by}."
    said = _grouped((row["law"], number(row["long_ppl"])) for row in known)
    return f"LongPPL at {short(length)}, of {counts[0]:,} key tokens found by {by}: {said}."


def evaluator(keys: Mapping[str, Any]) -> str:
    """Describe what found these key tokens: a model under laws, its windows if others, and the truncated context."""
    by = [law for law in keys["by"]["laws"] if law not in keys["left_out"]]
    under = _listed(by) if len(by) == 1 else f"any of {_listed(by)}"
    where = f" in windows of {keys['by']['length']} tokens" if "length" in keys["by"] else ""
    return f"{keys['by']['model']} under {under}{where}, against a context of {keys['short']} tokens with stock RoPE"


def _grouped(pairs: Iterable[tuple[str, str]]) -> str:
    """Join `a and b 9 of 10, c 8 of 10`, where neighbours share a value. Of more than five, keep three and stock's."""
    groups: list[tuple[list[str], str]] = []
    for name, value in pairs:
        if groups and groups[-1][1] == value:
            groups[-1][0].append(name)
        else:
            groups.append(([name], value))
    rest = [] if len(groups) <= 5 else [([STOCK], value) for names, value in groups[3:] if STOCK in names]
    groups = groups if len(groups) <= 5 else groups[:3] + rest
    return ", ".join(f"{_listed(names)} {value}" for names, value in groups)


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _unmeasured(rows: list[Row]) -> list[str]:
    why: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            why.setdefault(row["status"], []).append(f"{row['law']} at {short(row['length'])}")
    return [f"{status[0].upper()}{status[1:]}: {_listed(which)}." for status, which in why.items()]
