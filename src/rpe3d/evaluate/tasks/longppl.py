"""LongPPL: the perplexity of a text's key tokens, which need the far context (Fang et al., arXiv 2410.23771).

A token is key if an evaluator finds it likely with the whole text before it, and unlikely with a truncated context:
loss_short - loss_full > α (the paper's LSD) and loss_full < β (its LCL > -β), α = β = 2 nats. LongPPL of a model is exp
of its mean loss over the key tokens of all texts. As in upstream's code (PKU-ML/LongPPL), truncated contexts start
every `step` tokens, and each scores the `step` tokens after its first `short` (1024 and 4096). The first `short` tokens
of a window are never key.

Truncated contexts open with the same BOS token as whole windows. Upstream's do not, which makes text look unlikely to a
model that puts much of its attention on BOS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rpe3d.config import ConfigError
from rpe3d.evaluate.likelihood import token_nll
from rpe3d.evaluate.tasks.perplexity import Window, batches

ALPHA = 2.0
BETA = 2.0
SHORT = 4096
FEWEST = 30
"""Minimum number of key tokens for a row to have a value: with fewer, a few words decide."""


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """A truncated context: `short` tokens, and the `step` tokens after them that it scores."""

    short: int
    step: int


def truncation(pretrained: int) -> Truncation:
    """Return upstream's 4096 and 1024, or half and an eighth of a pretrained length below 8192."""
    short = min(SHORT, pretrained // 2)
    return Truncation(short=short, step=max(1, short // 4))


def check_far(lengths: Sequence[int], cut: Truncation) -> None:
    """Refuse lengths without far context: all their tokens lie within the truncated one."""
    if min(lengths) <= cut.short:
        raise ConfigError(
            f"longppl needs windows longer than the truncated context of {cut.short} tokens, got {min(lengths)}",
            f"raise --lengths above {cut.short}, or leave longppl out of --measures",
        )


def truncated_nll(model: Any, window: Window, cut: Truncation, batch: int) -> Tensor:
    """Return loss_short of the window's tokens from number `cut.short` on, float32 [length - short] on the CPU."""
    tokens, opening = window.tokens, len(window.first)
    pieces = []
    for start in range(0, len(tokens) - cut.short, cut.step):
        ids = tokens[start + opening : start + cut.short + cut.step]
        scored = len(ids) + opening - cut.short
        pieces.append(Window(text=window.text, start=start, ids=ids, first=window.first, scored=scored))
    return torch.cat([row for group in batches(pieces, batch) for row in _scored(model, group)])


def whole_nll(model: Any, windows: Sequence[Window], batch: int) -> list[Tensor]:
    """Return the loss of each window's tokens but the first, read with all tokens before them."""
    return [row for group in batches(windows, batch) for row in _scored(model, group)]


def _scored(model: Any, group: Sequence[Window]) -> list[Tensor]:
    return list(token_nll(model, torch.stack([window.tokens for window in group]), group[0].scored).cpu())


def is_key(full: Tensor, short: Tensor) -> Tensor:
    """Return which tokens are key by their losses with the whole and the truncated context: LSD > α and LCL > -β."""
    return (short - full > ALPHA) & (full < BETA)


def mean_loss(losses: Tensor, keys: Sequence[int]) -> float | None:
    """Return the mean of a window's losses (as in `whole_nll`) over its key tokens; None without any."""
    return float(losses[torch.tensor(keys) - 1].double().mean()) if keys else None


def pooled(windows: Sequence[tuple[int, float | None]]) -> tuple[int, float]:
    """Return the number of key tokens and their mean loss, from those of each window; NaN without any."""
    n = sum(count for count, _ in windows)
    return n, sum(count * nll for count, nll in windows if nll is not None) / n if n else math.nan
