"""Measure the context that a model really uses (how far back it can copy with stock RoPE), and pick 3D-RPE for it.

A trial is one window of the pretrained length with eight passages in it, each repeated once, nested like brackets: the
repetition of the first comes 1/8 of the length after it, that of the last nearly the whole length. The model copies
from a distance if repetitions cost at most half of what the same tokens cost at first sight, over all trials and
averaged with the distances before and after: single distances are noisy, and one next to a failure is not safe.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rpe3d.config import ConfigError
from rpe3d.evaluate.grid import Progress
from rpe3d.evaluate.likelihood import token_nll
from rpe3d.evaluate.texts import Tokens
from rpe3d.geometry.laws.bounded import BLOCK, FADE, FOCUS
from rpe3d.models import extend, restore

STEPS = 8
AT_MOST = 0.5
SHORTEST = 256
FEWEST = 8
"""Minimum number of far blocks that a query chooses: one in eight is always the first."""

LEVEL = 0.01
"""Difference in nats that the two tried windows are not trusted to resolve."""
Way = Literal["even", "anchored", "chosen", "wide"]
"""All far keys fade; all but the first token fade; or a query chooses as many keys as half of the reach, or as all of
it."""
WAYS: tuple[Way, ...] = get_args(Way)
CHOSEN: tuple[Way, ...] = ("chosen", "wide")


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Mean losses of passages at first sight and when repeated `distance` later, and of other text at that position."""

    distance: int
    first: float
    again: float
    text: float

    @property
    def share(self) -> float:
        """Loss of a repeated passage, as a share of its loss at first sight."""
        return self.again / self.first


@dataclass(frozen=True, kw_only=True)
class Nested:
    """A window and the places of its passages, the first and the second time, from the nearest pair to the farthest."""

    tokens: Tensor
    size: int
    first: list[int]
    again: list[int]


def passage_of(length: int) -> int:
    return length // (4 * STEPS)


def longest(texts: Sequence[Tokens]) -> int:
    """Return the longest window that these texts are long enough for."""
    return sum(len(text.ids) for text in texts) * 4 // 5  # it is a window and eight passages of 1/32


def make_nested(texts: Sequence[Tokens], length: int, seed: int, first: tuple[int, ...] = ()) -> Nested:
    """Make a window and its passages. All texts form one ring: the window starts anywhere, passages fill the rest."""
    ring = torch.cat([text.ids for text in texts])
    size = passage_of(length)
    body = length - len(first)
    spacing = (len(ring) - body) // STEPS
    if spacing < size:
        raise ConfigError(
            f"the texts have {len(ring)} tokens, but measuring {length} positions takes {body + STEPS * size}",
            "pass longer files to --texts",
        )
    turned = ring.roll(-random.Random(seed).randrange(len(ring)))
    tokens = torch.cat([torch.tensor(first, dtype=ring.dtype), turned[:body]])
    starts, again = [], []
    for step in range(1, STEPS + 1):
        distance = min(step * length // STEPS, body - size)
        start = len(first) + (body - size - distance) // 2
        passage = turned[body + (step - 1) * spacing :][:size]
        for at in (start, start + distance):
            tokens[at : at + size] = passage
        starts.append(start)
        again.append(start + distance)
    return Nested(tokens=tokens, size=size, first=starts, again=again)


def measure_distances(
    model: Any, texts: Sequence[Tokens], length: int, seeds: Sequence[int], first: tuple[int, ...], progress: Progress
) -> list[Distance]:
    """Measure copying by distance and the loss of text by position, over all trials, under the model's current law."""
    if length < SHORTEST:
        raise ConfigError(f"the model has {length} positions, too few to measure", f"use one with {SHORTEST} or more")
    sums = torch.zeros(3, STEPS, dtype=torch.float64)
    counts = torch.zeros(STEPS, dtype=torch.float64)
    for done, seed in enumerate(seeds):
        progress(f"trial {done + 1} of {len(seeds)}", done, len(seeds))
        trial = make_nested(texts, length, seed, first)
        losses = torch.nn.functional.pad(token_nll(model, trial.tokens[None])[0].double().cpu(), (1, 0))
        own = torch.ones(length, dtype=torch.bool)
        own[0] = False
        scored = trial.size * 7 // 8  # as in a copy test: the first tokens say which passage it is
        for step, (start, again) in enumerate(zip(trial.first, trial.again, strict=True)):
            for row, at in enumerate((start, again)):
                sums[row, step] += losses[at + trial.size - scored : at + trial.size].mean() / len(seeds)
                own[at : at + trial.size] = False
        step_of = (torch.arange(length) * STEPS // length)[own]
        sums[2].index_add_(0, step_of, losses[own])
        counts += step_of.bincount(minlength=STEPS)
    progress("done", len(seeds), len(seeds))
    return [
        Distance(
            distance=(step + 1) * length // STEPS,
            first=float(sums[0, step]),
            again=float(sums[1, step]),
            text=float(sums[2, step] / counts[step]),
        )
        for step in range(STEPS)
    ]


def averaged(distances: Sequence[Distance]) -> list[float]:
    """Average each share with its neighbours; the first and the last stand in for the neighbour they lack."""
    shares = [one.share for one in distances]
    padded = [shares[0], *shares, shares[-1]]
    return [sum(padded[i : i + 3]) / 3 for i in range(len(shares))]


def effective_context(distances: Sequence[Distance]) -> int:
    """Return the largest distance up to which the model copies from every measured distance; 0 if there is none."""
    near = takewhile(lambda pair: pair[1] <= AT_MOST, zip(distances, averaged(distances), strict=True))
    return max((one.distance for one, _ in near), default=0)


def pick(effective: int, pretrained: int, context: int, way: Way = "even") -> dict[str, Any]:
    """Choose 3D-RPE's parameters for a model that uses `effective` positions; a context within them is all exact.

    The reach is 3/4 of the effective context, which leaves room for the weaker layers, and at most half of the
    pretrained length: most tokens in pretraining have seen nothing from farther back. A chunk is a tenth of the
    effective context, as a power of two from 128 to 512, or a quarter of it if that is less. The defaults of `3d-rpe`
    are the same for a model that uses 2/3 of its pretrained length.

    "anchored": the first token does not fade, so the others may fade more, and more of them may be far. "chosen": no
    far key fades, and a query sees as many as half of the reach, in blocks; "wide": as many as all of it. `weigh` finds
    which is best for a model.
    """
    chunk = min(512, max(128, 1 << (effective // 10).bit_length() - 1), effective // 4)
    if context <= effective:
        chunk = next(size for size in range(chunk, 0, -1) if context % size == 0)  # the reach is all of it
        return {"chunk": chunk, "window": context - chunk, "reach": context, "focus": 0.0, "fade": 0.0, "sinks": 0}
    reach = max(2 * chunk, min(3 * effective // 4, pretrained // 2))
    exact = reach * (1 / 2 if way == "anchored" else 5 / 8)
    window = max(1, min(round(exact / chunk), reach // chunk - 1)) * chunk
    block = math.gcd(BLOCK, chunk)
    chosen = {"focus": 0.0, "fade": 0.0, "sinks": 0, "block": block}
    weights: dict[Way, dict[str, Any]] = {
        "even": {"focus": FOCUS, "fade": FADE, "sinks": 0},
        "anchored": {"focus": 1.0, "fade": 0.5, "sinks": 1},
        "chosen": chosen | {"far": max(FEWEST, reach // 2 // block)},
        "wide": chosen | {"far": max(FEWEST, reach // block)},
    }
    return {"chunk": chunk, "window": window, "reach": reach, **weights[way]}


def ways(effective: int, pretrained: int, length: int, *, chosen: bool) -> list[Way]:
    """Return the ways to try, with `chosen` those that choose keys as well; "wide" only if it is a different law."""
    wide, half = (pick(effective, pretrained, length, way) for way in ("wide", "chosen"))
    return [way for way in WAYS if chosen or way not in CHOSEN if way != "wide" or wide != half]


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """Mean losses under a law: of text, and of passages repeated from all distances."""

    text: float
    again: float

    @property
    def cost(self) -> float:
        return self.text + self.again


def weigh(
    model: Any,
    effective: int,
    pretrained: int,
    texts: Sequence[Tokens],
    length: int,
    seeds: Sequence[int],
    first: tuple[int, ...],
    progress: Progress,
    *,
    ways: Sequence[Way] = WAYS,
) -> dict[Way, Weighed]:
    """Measure windows of `length` under each way of `pick`. The model is stock before and afterwards."""
    weighed = {}
    for way in ways:
        extend(model, "3d-rpe", context=length, **pick(effective, pretrained, length, way))
        try:
            found = measure_distances(model, texts, length, seeds, first, progress)
        finally:
            restore(model)
        weighed[way] = Weighed(text=fmean(one.text for one in found), again=fmean(one.again for one in found))
    return weighed


def cheapest(weighed: Mapping[Way, Weighed], *, longer: bool = False) -> Way:
    """Return the way that costs least, the earlier of two that cost the same.

    `longer` says that texts will be longer than the windows that were tried. The cheaper of the ways that choose keys
    is then picked if it costs at most `LEVEL` more: what a choice gains grows with the length of a text (docs/log.md).
    """

    def cost(way: Way) -> tuple[bool, float]:
        return math.isnan(weighed[way].cost), weighed[way].cost

    least = min(weighed, key=cost)
    chosen = min((way for way in CHOSEN if way in weighed), key=cost, default=least)
    return chosen if longer and weighed[chosen].cost <= weighed[least].cost + LEVEL else least
