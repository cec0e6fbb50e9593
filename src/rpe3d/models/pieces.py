"""A long prompt, read in pieces: what layers compute for a piece is freed before the next, so memory is the cache's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rpe3d.config import whole
from rpe3d.models.carried import parameters_of
from rpe3d.models.extend import law_of

PIECE = 32768
"""Tokens read at once, unless asked for otherwise: enough to keep a GPU busy."""
AT_ONCE = 2**17
"""Tokens up to which a measurement reads a text at once."""


def read(
    model: Any,
    ids: Tensor,
    piece: int = PIECE,
    told: Callable[[int], None] = lambda done: None,
    *,
    left: int | None = None,
) -> Any:
    """Read a prompt but for its last piece, and return the cache to hand to `generate` with the whole prompt.

    Without padding: every row is read from its first token on. None where nothing is read: the prompt is one piece, or
    has to be read at once (`refusal`). `told` hears how many tokens have been read. `left` is the number of last tokens
    to leave unread, instead of the last piece.
    """
    from transformers import DynamicCache

    tokens, piece = ids.shape[1], whole("piece", piece)
    end = (tokens - 1) // piece * piece if left is None else tokens - whole("left", left)
    if end <= 0 or refusal(model) is not None:
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        for start in range(0, end, piece):
            stop = min(start + piece, end)
            model(ids[:, start:stop], past_key_values=cache, use_cache=True, **last)
            told(stop)
    return cache


def read_long(model: Any, ids: Tensor) -> Any:
    """Read what is longer than AT_ONCE but for its last piece, and return the cache; None where nothing was read."""
    return read(model, ids, PIECE) if ids.shape[1] > AT_ONCE else None


def continued(ids: Tensor, cache: Any) -> dict[str, Any]:
    """Return the arguments of a forward that reads what a cache lacks of a text; of all of it where there is none."""
    if cache is None:
        return {"input_ids": ids, "use_cache": False}
    return {"input_ids": ids[:, cache.get_seq_length() :], "past_key_values": cache, "use_cache": True}


def refusal(model: Any) -> str | None:
    """Say why pieces of a prompt would not give what the prompt read at once gives; None if they do."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    config = model.config.get_text_config(decoder=True)
    if any(type(x) not in (DynamicLayer, DynamicSlidingWindowLayer) for x in DynamicCache(config=config).layers):
        return "some of its layers keep something other than their own keys and values"
    law, stock = law_of(model), (parameters_of(config) or {}).get("rope_type")
    if law.grows if law is not None else stock in ("dynamic", "longrope"):
        return "its frequencies change with the length of the text"
    return None
