"""Where the tokens of a forward stand: from a model's position ids and padding mask to attention's arguments."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rpe3d.attention.decode import MOST_QUERIES
from rpe3d.config import ConfigError

_last = threading.local()


@dataclass(frozen=True)
class Layout:
    """Arguments of `attention`, and how much of a preallocated cache they speak of."""

    queries: Tensor | range
    keys: Tensor | range
    query_mask: Tensor | None
    key_mask: Tensor | None
    keys_used: int


def layout(query: Tensor, key: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Layout:
    """The same for every layer of a forward, so it is made for the first and kept for the others."""
    shape = (query.shape[0], query.shape[2], key.shape[2])
    if torch.compiler.is_compiling() or not (_counts(mask) and _counts(position_ids)):
        return _layout(*shape, mask, position_ids)
    state = (shape, *(x._version if x is not None else 0 for x in (mask, position_ids)))
    made = getattr(_last, "made", None)
    if made is not None and made[0] is mask and made[1] is position_ids and made[2] == state:
        kept: Layout = made[3]
        return kept
    result = _layout(*shape, mask, position_ids)
    _last.made = (mask, position_ids, state, result)
    return result


def _counts(x: Tensor | None) -> bool:
    """Whether a tensor counts its changes: without that, one that was changed in place would look like itself."""
    return x is None or not x.is_inference()


def _layout(b: int, t: int, s: int, mask: Tensor | None, position_ids: Tensor | None) -> Layout:
    if position_ids is None:
        raise ConfigError("this model passes no position ids to its attention", "rpe3d cannot extend it")
    positions = position_ids.expand(b, t)
    if mask is not None:
        return _padded(t, s, mask, positions)
    if t <= MOST_QUERIES:  # a decoding step asks the device nothing
        return Layout(positions, positions if s == t else range(s), None, None, s)
    queries = _consecutive(position_ids)
    if s == t:
        return Layout(queries, queries, None, None, s)
    used = min(s, queries.stop)  # a static cache is longer than what it holds
    return Layout(queries, range(used), None, None, used)


def _padded(t: int, s: int, mask: Tensor, positions: Tensor) -> Layout:
    """A row's slots and positions rise together: counted from its first query that is a token.

    The last token of a batch is in the last slot in use, wherever a static cache ends.
    """
    slots = torch.arange(s, device=mask.device)
    end = (mask * (slots + 1)).amax() if s > t else s
    rows = (end - t + torch.arange(t, device=mask.device)).expand(mask.shape[0], t)
    query_mask = mask.gather(1, rows)
    first = query_mask.long().argmax(1, keepdim=True)
    keys = slots - rows.gather(1, first) + positions.gather(1, first)
    return Layout(positions, keys.clamp(min=0), query_mask, mask, s)


def _consecutive(position_ids: Tensor) -> range:
    """A prompt's positions, or a refusal of what no law is defined for."""
    rows: Any = position_ids.tolist()
    start = rows[0][0]
    expected = list(range(start, start + len(rows[0])))
    if any(row != expected for row in rows):
        raise ConfigError(
            "position ids start anew or skip within a row", "give one sequence per row, with its padding mask"
        )
    return range(start, start + len(expected))
