"""One row of a comparison: a law at a length, measured by as many processes as there are.

A row: {"law": label, "name": the law's name, "length", "context", "parameters": its own, "status": "ok" |
"out of memory" | "skipped: why", "ppl", "tail_ppl", "copy_nll", "passkey": how many right, "passkey_n", "tokens": read
by the model, "seconds", "tokens_per_second": of one process, the median over the forwards of windows with their losses,
"windows": [{"text", "start", "nll", "tail_nll"}], "positions": [{"from", "to", "nll", "n"}], "copies": [{"nll",
"seed"}], "passkeys": [{"depth", "key", "answer": up to the first wrong token, "correct"}]}. What was not asked for or
not measured is null or empty.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch

from rpe3d.config import ConfigError
from rpe3d.evaluate.grid import Progress
from rpe3d.evaluate.memory import within_memory
from rpe3d.evaluate.perplexity import PROTOCOLS, Score, Window, batches, by_position, mean_nll, score
from rpe3d.evaluate.ranks import Ranks
from rpe3d.evaluate.retrieval import copy_nll, make_copy, make_passkey, passkey_found
from rpe3d.evaluate.settings import Entry, Settings
from rpe3d.evaluate.texts import Tokens
from rpe3d.evaluate.under import own_parameters, under
from rpe3d.geometry import Law

OUT_OF_MEMORY = "out of memory"
NOT_FINITE = "skipped: the model's likelihoods are not finite numbers"

Found = dict[str, list[Any]]
"""Numbered results by kind, as one process has them."""


@dataclass(kw_only=True)
class Bench:
    """What every row is measured with, and how far the work is."""

    model: Any
    tokenizer: Any
    texts: list[Tokens]
    first: tuple[int, ...]
    settings: Settings
    ranks: Ranks
    progress: Progress
    what: str = ""
    total: float = 0.0
    done: float = 0.0

    def windows(self, length: int) -> list[Window]:
        return PROTOCOLS[self.settings.protocol](self.texts, length, self.settings.windows, self.first)

    def work(self, length: int) -> float:
        """This process's part of a row."""
        many = {"ppl": len(self.windows(length)), "copy": self.settings.copies, "passkey": self.settings.passkeys}
        return sum(len(self.ranks.share(range(many[m]))) for m in self.settings.measures) * _work(length)

    def advance(self, work: float = 0.0) -> None:
        self.done += work
        self.progress(self.what, self.done, self.total)


def _work(length: int) -> float:
    """One forward. Attention of a small model costs as much as all the rest at 8192 tokens."""
    return length * (1 + length / 8192)


def measure_row(bench: Bench, entry: Entry, length: int, law: Law | ConfigError) -> dict[str, Any]:
    """One law at one length. Running out of memory in any process is the row's result, not the end."""
    row: dict[str, Any] = {"law": entry.label, "name": entry.law, "length": length, "context": None, "status": "ok"}
    row |= dict.fromkeys(("ppl", "tail_ppl", "copy_nll", "passkey", "passkey_n", "tokens_per_second"))
    row |= {"tokens": 0, "seconds": 0.0, "parameters": dict(entry.parameters)}
    row |= {"windows": [], "positions": [], "copies": [], "passkeys": []}
    bench.what = f"{entry.label} at {length}"
    end = bench.done + bench.work(length)
    if isinstance(law, ConfigError):
        bench.advance(end - bench.done)
        return row | {"status": f"skipped: {law}"}
    row |= {"context": law.context, "parameters": own_parameters(law)}
    began = time.perf_counter()
    everyone = bench.ranks.gather(within_memory(lambda: _found(bench, law, length)))
    bench.advance(end - bench.done)
    row["seconds"] = round(time.perf_counter() - began, 3)
    parts = [part for part in everyone if part is not None]
    if len(parts) < len(everyone):
        return row | {"status": OUT_OF_MEMORY}
    merged = {kind: sorted(item for part in parts for item in part[kind]) for kind in parts[0]}
    return row | _summary(merged, length, bench.settings.protocol)


def _found(bench: Bench, law: Law, length: int) -> Found:
    """Measure this process's share of the row under the law."""
    with under(bench.model, law):
        bench.advance()
        found: Found = {"windows": [], "seconds_per_token": [], "copies": [], "passkeys": []}
        for measure in bench.settings.measures:
            found |= MEASURERS[measure](bench, length)
        return found


def _windows(bench: Bench, length: int) -> Found:
    mine = bench.ranks.share(bench.windows(length))
    numbers = iter([number for number, _ in mine])
    found: Found = {"windows": [], "seconds_per_token": []}
    for group in batches([window for _, window in mine], bench.settings.batch):
        began = time.perf_counter()
        scores = score(bench.model, group, length)
        found["seconds_per_token"].append((time.perf_counter() - began) / sum(map(len, group)))
        found["windows"] += [(next(numbers), w.text, w.start, s) for w, s in zip(group, scores, strict=True)]
        bench.advance(_work(length) * len(group))
    return found


def _copies(bench: Bench, length: int) -> Found:
    batch, seed = bench.settings.batch, bench.settings.seed
    mine = bench.ranks.share(range(seed, seed + bench.settings.copies))
    copies = []
    for at in range(0, len(mine), batch):
        part = mine[at : at + batch]
        trials = torch.stack([make_copy(bench.texts, length, seed, bench.first) for _, seed in part])
        copies += [(*numbered, nll) for numbered, nll in zip(part, copy_nll(bench.model, trials), strict=True)]
        bench.advance(_work(length) * len(part))
    return {"copies": copies}


def _passkeys(bench: Bench, length: int) -> Found:
    n = bench.settings.passkeys
    passkeys = []
    for number, depth in bench.ranks.share([(i + 0.5) / n for i in range(n)]):
        trial = make_passkey(bench.tokenizer, length, depth, bench.settings.seed + number, bench.first)
        said = passkey_found(bench.model, trial)
        answer = bench.tokenizer.decode(said)
        passkeys.append((number, depth, trial.key, answer, said == trial.answer))
        bench.advance(_work(length))
    return {"passkeys": passkeys}


MEASURERS: dict[str, Callable[[Bench, int], Found]] = {"ppl": _windows, "copy": _copies, "passkey": _passkeys}


def _summary(found: Found, length: int, protocol: str) -> dict[str, Any]:
    """The row's numbers from what all processes found."""
    summary: dict[str, Any] = {}
    if windows := found["windows"]:
        scores: list[Score] = [item[-1] for item in windows]
        nll, tail = mean_nll(scores, protocol)
        if not (nll < 700 and tail < 700):  # NaN, or beyond what exp can hold
            return {"status": NOT_FINITE}
        summary |= {"ppl": math.exp(nll), "tail_ppl": math.exp(tail), "positions": by_position(scores, length)}
        summary["tokens_per_second"] = round(1 / median(found["seconds_per_token"]), 1)
        summary["windows"] = [
            {"text": text, "start": start, "nll": s.nll, "tail_nll": s.tail_nll} for _, text, start, s in windows
        ]
    if found["copies"]:
        copies = [{"nll": nll, "seed": seed} for _, seed, nll in found["copies"]]
        summary |= {"copies": copies, "copy_nll": mean(trial["nll"] for trial in copies)}
        if not math.isfinite(summary["copy_nll"]):
            return {"status": NOT_FINITE}
    if found["passkeys"]:
        keys = ("depth", "key", "answer", "correct")
        trials = [dict(zip(keys, item[1:], strict=True)) for item in found["passkeys"]]
        summary |= {"passkeys": trials, "passkey": sum(t["correct"] for t in trials), "passkey_n": len(trials)}
    summary["tokens"] = length * sum(len(found[kind]) for kind in ("windows", "copies", "passkeys"))
    return summary
