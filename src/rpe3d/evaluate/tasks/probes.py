"""Measure perplexity, copying, passkeys and LongPPL the same way for every command, as a row's numbers or a score."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import torch

from rpe3d.evaluate.grid import Progress
from rpe3d.evaluate.ranks import Ranks
from rpe3d.evaluate.settings import Asked
from rpe3d.evaluate.tasks.longppl import FEWEST, mean_loss, pooled, whole_nll
from rpe3d.evaluate.tasks.perplexity import (
    PROTOCOLS,
    Losses,
    Window,
    batches,
    by_position,
    mean_nll,
    score,
    whole_windows,
)
from rpe3d.evaluate.tasks.retrieval import copy_nll, make_copy, make_passkey, passkey_found
from rpe3d.evaluate.texts import Tokens

Found = dict[str, list[Any]]
"""Numbered results by kind, of one process."""


@dataclass(kw_only=True)
class Bench:
    """What every row is measured with, and the progress of the work."""

    model: Any
    tokenizer: Any
    texts: list[Tokens]
    first: tuple[int, ...]
    settings: Asked
    measures: Sequence[str]
    ranks: Ranks
    progress: Progress
    what: str = ""
    label: str = ""
    """The law whose row is being measured."""
    keys: dict[int, list[list[int]]] = field(default_factory=dict)
    """By length: the key tokens of each window, for LongPPL."""
    finders: set[tuple[str, int]] = field(default_factory=set)
    """Laws, with lengths, that find key tokens in this run."""
    key_losses: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    """By law and length: this process's losses of key tokens, if the law found them itself."""
    total: float = 0.0
    done: float = 0.0

    def windows(self, length: int) -> list[Window]:
        return PROTOCOLS[self.settings.protocol](self.texts, length, self.settings.window_count, self.first)

    def whole_windows(self, length: int) -> list[Window]:
        """Return the windows of LongPPL, which are whole in every protocol: others would count a token many times."""
        return whole_windows(self.texts, length, self.settings.windows, self.first)

    def work(self, length: int, label: str = "") -> float:
        """Return how much of a row is this process's work; a law that finds key tokens already has their losses."""
        many = {"ppl": len(self.windows(length)), "copy": self.settings.copies, "passkey": self.settings.passkeys}
        many["longppl"] = 0 if (label, length) in self.finders else len(self.whole_windows(length))
        return sum(len(self.ranks.share(range(many[m]))) for m in self.measures) * _work(length)

    def finding_work(self, length: int, laws: int) -> float:
        """Return this process's share of the work to find key tokens under so many laws."""
        mine = len(self.ranks.share(self.whole_windows(length)))
        return mine * (laws * self.forward_work(length) + self.truncated_work(length))

    def forward_work(self, length: int) -> float:
        return _work(length)

    def truncated_work(self, length: int) -> float:
        """Return the work of a window's truncated contexts, which read each token five times."""
        return 5.0 * length

    def advance(self, work: float = 0.0) -> None:
        self.done += work
        self.progress(self.what, self.done, self.total)


def _work(length: int) -> float:
    """Estimate the work of one forward pass; at 8192 tokens a small model's attention costs as much as all the rest."""
    return length * (1 + length / 8192)


def merged(parts: Sequence[Found]) -> Found:
    """Return what all processes found, in the order of its numbers."""
    return {kind: sorted(item for part in parts for item in part[kind]) for kind in parts[0]}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How a probe is measured, and how its trials are reported."""

    kind: str
    """Name of its trials in the results, and in a comparison's row."""
    measure: Callable[[Bench, int], Found]
    told: Callable[[Found, int, str], dict[str, Any] | None]
    """Returns the numbers of a comparison's row from all trials, a length and a protocol; None if not finite."""
    metric: str
    score: Callable[[dict[str, Any]], float]
    """Returns an evaluation's score from those numbers."""
    recorded: tuple[str, ...]
    """Entries of a trial that an evaluation keeps with its predictions."""


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


def _key_tokens(bench: Bench, length: int) -> Found:
    """Measure the losses of key tokens under this law, unless they are known from finding them."""
    known = bench.key_losses.get((bench.label, length))
    if known is None:
        mine = bench.ranks.share(bench.whole_windows(length))
        known = []
        for at in range(0, len(mine), bench.settings.batch):
            part = mine[at : at + bench.settings.batch]
            losses = whole_nll(bench.model, [window for _, window in part], bench.settings.batch)
            for (number, window), loss in zip(part, losses, strict=True):
                keys = bench.keys[length][number]
                known.append((number, window.text, window.start, len(keys), mean_loss(loss, keys)))
            bench.advance(_work(length) * len(part))
    return {"key_windows": known}


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


def _long_perplexity(found: Found, length: int, protocol: str) -> dict[str, Any] | None:
    """Return LongPPL; None for too few key tokens."""
    windows = found["key_windows"]
    n, nll = pooled([item[3:] for item in windows])
    if n and not nll < 700:
        return None
    return {
        "long_ppl": math.exp(nll) if n >= FEWEST else None,
        "key_tokens": n,
        "key_windows": [{"text": text, "start": start, "n": n, "nll": nll} for _, text, start, n, nll in windows],
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
    "longppl": Probe(
        kind="key_windows",
        measure=_key_tokens,
        told=_long_perplexity,
        metric="longppl",
        score=lambda told: float(told["long_ppl"]),
        recorded=("text", "start", "n", "nll"),
    ),
}
