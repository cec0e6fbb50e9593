"""Where the tokens of a forward stand: from a model's position ids and padding mask to attention's arguments."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rpe3d.attention.contract import Placed, Run, placed
from rpe3d.attention.decode import MOST_QUERIES
from rpe3d.config import ConfigError

_last = threading.local()


@dataclass(frozen=True)
class Layout:
    """Arguments of `attention`, and how much of a preallocated cache they speak of."""

    queries: Tensor | range | Placed
    keys: Tensor | range | Placed
    query_mask: Tensor | None
    key_mask: Tensor | None
    keys_used: int
    steps: dict[Any, Any] = field(default_factory=dict)
    """Kernels made ready for layers of this forward, by what each depends on."""

    @property
    def arguments(self) -> dict[str, Any]:
        """As `attention` calls them."""
        return {
            "query_positions": self.queries,
            "key_positions": self.keys,
            "query_mask": self.query_mask,
            "key_mask": self.key_mask,
        }


def layout(query: Tensor, key: Tensor, mask: Tensor | None, position_ids: Tensor | None, layer: int) -> Layout:
    """The same for every layer of a forward, so it is made for the first and kept for the others."""
    shape = (query.shape[0], query.shape[2], key.shape[2])
    if torch.compiler.is_compiling():
        return _layout(*shape, mask, position_ids)
    state = (shape, _changes(mask), _changes(position_ids))
    made = getattr(_last, "made", None)
    if made is not None and made[0] is mask and made[1] is position_ids and made[2] == state:
        kept: Layout = made[4]
        if None not in state or layer > made[3]:
            _last.made = (mask, position_ids, state, layer, kept)
            return kept
    result = _layout(*shape, mask, position_ids)
    _last.made = (mask, position_ids, state, layer, result)
    return result


def _changes(x: Tensor | None) -> int | None:
    """How often a tensor was changed in place. None in inference mode, where nobody counts: there only layers that
    follow one another are one forward.
    """
    if x is None:
        return 0
    return None if x.is_inference() else x._version


def _layout(b: int, t: int, s: int, mask: Tensor | None, position_ids: Tensor | None) -> Layout:
    if position_ids is None:
        raise ConfigError("this model passes no position ids to its attention", "rpe3d cannot extend it")
    positions = position_ids.expand(b, t)
    if mask is not None:
        return _padded(t, s, mask, positions)
    if t <= MOST_QUERIES or torch.compiler.is_compiling():  # a decoding step and a graph ask the device nothing
        return Layout(positions, positions if s == t else range(s), None, None, s)
    queries = _same(placed(position_ids, None).runs)
    if queries is None:
        raise ConfigError(
            "position ids start anew or skip within a row", "give one sequence per row, with its padding mask"
        )
    if s == t:
        return Layout(queries[1], queries[1], None, None, s)
    used = min(s, queries[1].stop)  # a static cache is longer than what it holds
    return Layout(queries[1], range(used), None, None, used)


def _padded(t: int, s: int, mask: Tensor, positions: Tensor) -> Layout:
    """A row's slots and positions rise together: counted from its first query that is a token.

    The last token of a batch is in the last slot in use, wherever a static cache ends.
    """
    slots = torch.arange(s, device=mask.device)
    end = (mask * (slots + 1)).amax() if s > t else s
    rows = (end - t + torch.arange(t, device=mask.device)).expand(mask.shape[0], t)
    query_mask = mask.gather(1, rows)
    first = query_mask.long().argmax(1, keepdim=True)
    keys = (slots - rows.gather(1, first) + positions.gather(1, first)).clamp(min=0)
    if t <= MOST_QUERIES or torch.compiler.is_compiling():
        return Layout(positions, keys, query_mask, mask, s)
    query_rows, key_rows = placed(positions, query_mask), placed(keys, mask)
    query, key = _same(query_rows.runs), _same(key_rows.runs)
    if query is not None and key is not None and len(query[1]) == t and key[0].start == 0:  # a mask that masks nothing
        return Layout(query[1], key[1], None, None, key[0].stop)
    return Layout(query_rows, key_rows, query_mask, mask, s)


def _same(runs: tuple[Run | None, ...]) -> Run | None:
    """The one run of all rows, if there is one."""
    return runs[0] if all(run == runs[0] for run in runs) else None
