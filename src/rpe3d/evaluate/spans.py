"""Find where tokens are in their text, in characters, to carry key tokens from one tokenizer to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Spans = list[list[int]]
"""[first character, the one after the last], in ascending order."""


def offsets(tokenizer: Any, text: str, count: int) -> Int[Tensor, "t 2"] | None:
    """Return the characters of each of a text's `count` tokens; None if the tokenizer does not report them."""
    try:
        found = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True).offset_mapping
    except (NotImplementedError, AttributeError, TypeError):  # a tokenizer without offsets
        return None
    return torch.tensor(found).view(-1, 2) if len(found) == count else None


def joined(at: Int[Tensor, "t 2"], tokens: Sequence[int]) -> Spans:
    """Return the characters of some tokens, with neighbours in one span, as upstream joins them.

    Tokens that are parts of one character share it.
    """
    made: Spans = []
    for first, end in at[list(tokens)].tolist():
        if made and first <= made[-1][1]:
            made[-1][1] = max(end, made[-1][1])
        else:
            made.append([first, end])
    return made


def within(at: Int[Tensor, "t 2"], spans: Spans) -> Bool[Tensor, " t"]:
    """Return which tokens lie within one of the spans with all of their characters, as upstream counts them."""
    if not spans:
        return torch.zeros(len(at), dtype=torch.bool)
    firsts, ends = torch.tensor(spans).T
    span = torch.searchsorted(firsts.contiguous(), at[:, 0].contiguous(), right=True) - 1
    inside: Tensor = (span >= 0) & (at[:, 1] <= ends[span.clamp(min=0)]) & (at[:, 0] < at[:, 1])
    return inside
