"""Compute perplexity: which windows of which texts are scored, and how their losses become one number.

`windows` is ours: whole windows spread evenly over the texts, every predicted token counts equally. The two published
sliding windows have a stride of 256. `overlap_mean` (ChunkLlama, LongLoRA): all texts as one stream, the mean over
windows of the mean over all their targets. `sliding_new_tokens` (Press et al., as in YaRN's code): text by text, only
tokens that no earlier window has scored count, again the mean over windows. Their numbers are not comparable.

A window has `length` tokens including its first, which is not predicted. If the tokenizer opens a text with a BOS token
by default, every window opens with it, except in `overlap_mean`, whose stream has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rpe3d.evaluate.likelihood import token_nll
from rpe3d.evaluate.texts import Tokens

STRIDE = 256
TAIL = 4096
WINDOWS = 4


@dataclass(frozen=True, kw_only=True)
class Window:
    """Tokens for one forward pass, where they come from, and how many of them, counted from the end, are scored."""

    text: str
    start: int
    ids: Tensor
    first: tuple[int, ...]
    scored: int

    @property
    def tokens(self) -> Tensor:
        """Tokens that the model reads, made on demand: overlapping windows share the memory of their text."""
        return torch.cat([torch.tensor(self.first, dtype=self.ids.dtype), self.ids])

    def __len__(self) -> int:
        return len(self.first) + len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Result of one window: mean losses of all scored tokens and of the tail, and sums by position."""

    nll: float
    tail_nll: float
    scored: int
    tail: int
    sums: list[tuple[int, float, int]]
    """(bucket, sum of losses, tokens)"""


First = tuple[int, ...]


def whole_windows(texts: Sequence[Tokens], length: int, count: int | None, first: First) -> list[Window]:
    """Return `count` windows: texts take turns, and each window is in the middle of an equal share of its text.

    Texts shorter than a window have none. Windows of a short text overlap if many are requested.
    """
    count = WINDOWS if count is None else count
    usable = _long_enough(texts, length, first)
    windows = []
    for turn, text in enumerate(usable):
        shares = len(range(turn, count, len(usable)))
        for share in range(shares):
            slack = len(text.ids) + len(first) - length
            start = slack * (2 * share + 1) // (2 * shares)
            ids = text.ids[start : start + length - len(first)]
            windows.append(Window(text=text.name, start=start, ids=ids, first=first, scored=length - 1))
    return windows


def overlapping_windows(texts: Sequence[Tokens], length: int, count: int | None, first: First) -> list[Window]:
    """Return windows of one stream at multiples of the stride, except one that would end the stream, as published."""
    stream = torch.cat([text.ids for text in texts])
    starts = [0]
    for text in texts[:-1]:
        starts.append(starts[-1] + len(text.ids))
    windows = []
    for start in _sample(range(0, len(stream) - length, STRIDE), count):
        home = max(i for i, begin in enumerate(starts) if begin <= start)
        ids = stream[start : start + length]
        windows.append(Window(text=texts[home].name, start=start - starts[home], ids=ids, first=(), scored=length - 1))
    return windows


def sliding_windows(texts: Sequence[Tokens], length: int, count: int | None, first: First) -> list[Window]:
    """Return each text's windows at multiples of the stride; the first scores all its tokens, the others the new ones.

    The last window of a text ends with it and may be shorter. Texts shorter than a window have none.
    """
    windows = []
    for text in _long_enough(texts, length, first):
        done = 0
        for start in range(0, len(text.ids), STRIDE):
            end = min(start + length - len(first), len(text.ids))
            scored = min(end - done, len(first) + end - start - 1)  # the first token of a window has no context
            windows.append(Window(text=text.name, start=start, ids=text.ids[start:end], first=first, scored=scored))
            done = end
            if end == len(text.ids):
                break
    return _sample(windows, count)


def _long_enough(texts: Sequence[Tokens], length: int, first: First) -> list[Tokens]:
    return [text for text in texts if len(text.ids) + len(first) >= length]


def _sample(items: Sequence[Any], count: int | None) -> list[Any]:
    """Return all items, or `count` of them, spread evenly."""
    if count is None or count >= len(items):
        return list(items)
    return [items[len(items) * (2 * i + 1) // (2 * count)] for i in range(count)]


PROTOCOLS: dict[str, Callable[[Sequence[Tokens], int, int | None, First], list[Window]]] = {
    "windows": whole_windows,
    "overlap_mean": overlapping_windows,
    "sliding_new_tokens": sliding_windows,
}


def bucket_width(length: int) -> int:
    """Return the number of positions per bucket of the curve: 64 buckets, of 128 positions or more."""
    return max(128, math.ceil(length / 64))


def tail_of(length: int) -> int:
    """Return the number of tokens in a window's tail: 4096, or half of a shorter window."""
    return min(TAIL, length // 2)


def score(model: Any, windows: Sequence[Window], length: int) -> list[Losses]:
    """Score windows of equal length in one forward pass. The tail counts only scored tokens."""
    losses = token_nll(model, torch.stack([w.tokens for w in windows]), max(w.scored for w in windows)).double().cpu()
    return [score_losses(row[-window.scored :], window, length) for row, window in zip(losses, windows, strict=True)]


def score_losses(losses: Tensor, window: Window, length: int) -> Losses:
    """Sum the losses of a window's scored tokens: over all, over its tail, and by position."""
    end = len(window)
    width = bucket_width(length)
    buckets = torch.arange(end - window.scored, end) // width
    sums = torch.zeros(math.ceil(length / width), dtype=torch.float64).index_add_(0, buckets, losses)
    counts = buckets.bincount(minlength=len(sums))
    tail = min(tail_of(length), window.scored)
    return Losses(
        nll=float(losses.mean()),
        tail_nll=float(losses[-tail:].mean()),
        scored=window.scored,
        tail=tail,
        sums=[(i, float(sums[i]), int(counts[i])) for i in counts.nonzero().flatten().tolist()],
    )


def mean_nll(scores: Sequence[Losses], protocol: str = "windows") -> tuple[float, float]:
    """Return the mean loss of all windows and of their tails: by tokens, or by windows in the published protocols."""
    by_token = protocol == "windows"
    weights = [(s.scored, s.tail) if by_token else (1, 1) for s in scores]
    whole = sum(s.nll * w for s, (w, _) in zip(scores, weights, strict=True)) / sum(w for w, _ in weights)
    tail = sum(s.tail_nll * t for s, (_, t) in zip(scores, weights, strict=True)) / sum(t for _, t in weights)
    return whole, tail


def by_position(scores: Sequence[Losses], length: int) -> list[dict[str, Any]]:
    """Return the mean loss by position in the window, over all windows."""
    width = bucket_width(length)
    curve: dict[int, tuple[float, int]] = {}
    for bucket, total, n in (item for s in scores for item in s.sums):
        before = curve.get(bucket, (0.0, 0))
        curve[bucket] = (before[0] + total, before[1] + n)
    return [
        {"from": bucket * width, "to": min(length, (bucket + 1) * width), "nll": total / n, "n": n}
        for bucket, (total, n) in sorted(curve.items())
    ]


def batches(windows: Sequence[Window], batch: int) -> list[list[Window]]:
    """Group windows of equal length, at most `batch` together, in order."""
    groups: list[list[Window]] = []
    for window in windows:
        fits = groups and len(groups[-1]) < batch and len(groups[-1][0]) == len(window)
        if fits:
            groups[-1].append(window)
        else:
            groups.append([window])
    return groups


def perplexity(
    model: Any,
    texts: Sequence[Tokens],
    length: int,
    *,
    windows: int | None = None,
    protocol: str = "windows",
    batch: int = 1,
    first: First = (),
) -> float:
    """Return exp of the mean loss over windows of `length` tokens, each of which begins with `first` (BOS)."""
    cut = PROTOCOLS[protocol](texts, length, windows, first)
    scores = [s for group in batches(cut, batch) for s in score(model, group, length)]
    return math.exp(mean_nll(scores, protocol)[0])
