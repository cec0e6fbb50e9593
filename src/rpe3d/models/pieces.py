"""Read a long prompt in pieces: activations of a piece are freed before the next, so memory is that of the cache."""

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
"""Default number of tokens to read at once: enough to keep a GPU busy."""
AT_ONCE = 2**17
"""Length up to which a measurement reads a text at once, in tokens."""


def read(
    model: Any,
    ids: Tensor,
    piece: int = PIECE,
    told: Callable[[int], None] = lambda done: None,
    *,
    left: int | None = None,
) -> Any:
    """Read all of a prompt but its last piece, and return the cache to pass to `generate` with the whole prompt.

    Rows must be without padding: every row is read from its first token on. Returns None if nothing is read: the prompt
    is one piece, or has to be read at once (`refusal`). `told` is called with the number of tokens read. `left` is the
    number of last tokens to leave unread, instead of the last piece.
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
    """Read all but the last piece of a text longer than AT_ONCE, and return the cache; None if nothing was read."""
    return read(model, ids, PIECE) if ids.shape[1] > AT_ONCE else None


def continued(ids: Tensor, cache: Any) -> dict[str, Any]:
    """Return the arguments of a forward that reads the part of a text that a cache lacks; all of it without a cache."""
    if cache is None:
        return {"input_ids": ids, "use_cache": False}
    return {"input_ids": ids[:, cache.get_seq_length() :], "past_key_values": cache, "use_cache": True}


def refusal(model: Any) -> str | None:
    """Return why reading a prompt in pieces would give another result than reading it at once; None if it does not."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    config = model.config.get_text_config(decoder=True)
    if any(type(x) not in (DynamicLayer, DynamicSlidingWindowLayer) for x in DynamicCache(config=config).layers):
        return "some of its layers cache something other than their own keys and values"
    law, stock = law_of(model), (parameters_of(config) or {}).get("rope_type")
    if law.grows if law is not None else stock in ("dynamic", "longrope"):
        return "its frequencies change with the length of the text"
    return None
