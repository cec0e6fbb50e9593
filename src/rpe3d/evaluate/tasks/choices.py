"""Compute how likely a model finds each of several answers to a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from rpe3d.config import ConfigError
from rpe3d.evaluate.likelihood import head_in_pieces, token_nll
from rpe3d.evaluate.tasks.chat import Chat


@torch.no_grad()
def log_likelihoods(model: Any, chat: Chat, prompt: str, answers: Sequence[str]) -> list[float]:
    """Return the log-likelihood of each answer after the prompt, over the tokens in which answers differ.

    Tokens that all answers begin or end with are left out. If one token of each is left, as is usual for letters, one
    forward pass is enough for all of them.
    """
    rows = [chat.encode(prompt + answer) for answer in answers]
    shared = _shared(rows)
    shortest = min(map(len, rows))
    ends = min(_shared([row[::-1] for row in rows]), shortest - shared - 1)
    rows = [row[: len(row) - ends] for row in rows]
    if all(len(row) == shared + 1 for row in rows):
        prefix = torch.tensor([rows[0][:shared]], device=model.device)
        last = {"logits_to_keep": 1} if head_in_pieces(model) else {}
        likely = model(prefix, use_cache=False, **last).logits[0, -1].float().log_softmax(-1)
        found = [float(likely[row[-1]]) for row in rows]
    else:
        found = [-float(token_nll(model, torch.tensor([row]), len(row) - shared).double().sum()) for row in rows]
    if not all(map(math.isfinite, found)):
        raise ConfigError("the likelihood of a choice is not finite", "check the model's weights and dtype")
    return found


def _shared(rows: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all rows begin with, at most all but one of the shortest."""
    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*rows, strict=False))
    return min(sum(1 for _ in same), min(map(len, rows)) - 1)
