"""Perplexity, copying and passkeys: measured alike for every command, and told as a row's numbers or as a score."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch

from rpe3d.evaluate.grid import Progress
from rpe3d.evaluate.ranks import Ranks
from rpe3d.evaluate.settings import Asked
from rpe3d.evaluate.tasks.perplexity import PROTOCOLS, Losses, Window, batches, by_position, mean_nll, score
from rpe3d.evaluate.tasks.retrieval import copy_nll, make_copy, make_passkey, passkey_found
from rpe3d.evaluate.texts import Tokens

Found = dict[str, list[Any]]
"""Numbered results by kind, as one process has them."""


@dataclass(kw_only=True)
class Bench:
    """What every row is measured with, and how far the work is."""

    model: Any
    tokenizer: Any
    texts: list[Tokens]
    first: tuple[int, ...]
    settings: Asked
    measures: Sequence[str]
    ranks: Ranks
    progress: Progress
    what: str = ""
    total: float = 0.0
    done: float = 0.0

    def windows(self, length: int) -> list[Window]:
        return PROTOCOLS[self.settings.protocol](self.texts, length, self.settings.window_count, self.first)

    def work(self, length: int) -> float:
        """Return how much of a row is this process's work."""
        many = {"ppl": len(self.windows(length)), "copy": self.settings.copies, "passkey": self.settings.passkeys}
        return sum(len(self.ranks.share(range(many[m]))) for m in self.measures) * _work(length)

    def advance(self, work: float = 0.0) -> None:
        self.done += work
        self.progress(self.what, self.done, self.total)


def _work(length: int) -> float:
    """One forward. Attention of a small model costs as much as all the rest at 8192 tokens."""
    return length * (1 + length / 8192)


def merged(parts: Sequence[Found]) -> Found:
    """Return what all processes found, in the order of its numbers."""
    return {kind: sorted(item for part in parts for item in part[kind]) for kind in parts[0]}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How a probe is measured, and how its trials are told."""

    kind: str
    """The name of its trials in what is found, and in a comparison's row."""
    measure: Callable[[Bench, int], Found]
    told: Callable[[Found, int, str], dict[str, Any] | None]
    """Returns the numbers of a comparison's row from all trials, a length and a protocol; None: not finite."""
    metric: str
    score: Callable[[dict[str, Any]], float]
    """Returns an evaluation's score from what is told."""
    recorded: tuple[str, ...]
    """The entries of a trial that an evaluation keeps with its predictions."""


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


def _perplexity(found: Found, length: int, protocol: str) -> dict[str, Any] | None:
    scores: list[Losses] = [item[-1] for item in found["windows"]]
    nll, tail = mean_nll(scores, protocol)
    if not (nll < 700 and tail < 700):  # NaN, or beyond what exp can hold
        return None
    return {
        "ppl": math.exp(nll),
        "tail_ppl": math.exp(tail),
        "positions": by_position(scores, length),
        "tokens_per_second": round(1 / median(found["seconds_per_token"]), 1),
        "windows": [
            {"text": text, "start": start, "nll": s.nll, "tail_nll": s.tail_nll}
            for _, text, start, s in found["windows"]
        ],
    }


def _copying(found: Found, length: int, protocol: str) -> dict[str, Any] | None:
    copies = [{"nll": nll, "seed": seed} for _, seed, nll in found["copies"]]
    nll = mean(trial["nll"] for trial in copies)
    return {"copies": copies, "copy_nll": nll} if math.isfinite(nll) else None


def _retrieving(found: Found, length: int, protocol: str) -> dict[str, Any]:
    keys = ("depth", "key", "answer", "correct")
    trials = [dict(zip(keys, item[1:], strict=True)) for item in found["passkeys"]]
    return {"passkeys": trials, "passkey": sum(t["correct"] for t in trials), "passkey_n": len(trials)}


PROBES = {
    "ppl": Probe(
        kind="windows",
        measure=_windows,
        told=_perplexity,
        metric="ppl {protocol}",
        score=lambda told: float(told["ppl"]),
        recorded=("text", "start", "nll"),
    ),
    "copy": Probe(
        kind="copies",
        measure=_copies,
        told=_copying,
        metric="nll",
        score=lambda told: float(told["copy_nll"]),
        recorded=("seed", "nll"),
    ),
    "passkey": Probe(
        kind="passkeys",
        measure=_passkeys,
        told=_retrieving,
        metric="exact_match",
        score=lambda told: round(100 * told["passkey"] / told["passkey_n"], 2),
        recorded=("depth", "key", "answer", "correct"),
    ),
}
