"""Compute what a law costs in attention: library calls of a prompt as long as the context, and extra memory."""

from __future__ import annotations

from typing import NamedTuple

from rpe3d.attention.blocked import ROWS_ON_CPU as ROWS
from rpe3d.attention.blocked.schedule import Call, schedule
from rpe3d.attention.blocked.task import Task
from rpe3d.geometry import Law

MOST = 16384  # blocks: a window of a few tokens makes more than anyone wants to count


class Cost(NamedTuple):
    """One prompt as long as the context in one layer, in blocks of `ROWS` queries; the cache of keys is stock's."""

    calls: int | None
    """Library attention calls; 0 if none fits and attention goes tile by tile; None: too many to count."""
    pairs: float | None
    """Pairs of query and key that the calls compute, relative to all causal ones."""
    query_bytes: int
    """Bytes of rotated copies of queries that live at a time, per query head, in 16 bits."""
    key_bytes: int
    """Bytes of rotated copies of keys that live at a time, per key head, in 16 bits."""


def cost(law: Law) -> Cost:
    """Return the cost of `law` in the blocked implementation (`rpe3d.attention.blocked`)."""
    regions, everything = law.regions, range(law.context)
    copied = 2 * law.rotary.head_dim
    query = copied * min(ROWS, law.context) if not all(region.query.is_stock for region in regions) else 0
    key = copied * min(Task.slab, law.context) if not all(region.key.is_stock for region in regions) else 0
    windows = [r.last + 1 for r in regions if r.unit == 1 and r.last is not None]
    if law.context > MOST * min([ROWS, *windows]):
        return Cost(None, None, query, key)
    calls = [call for block in schedule(regions, everything, everything, ROWS) for call in block.calls]
    if not calls:
        return Cost(0, None, query, key)
    causal = law.context * (law.context + 1) // 2
    return Cost(len(calls), sum(map(_pairs, calls)) / causal, query, key)


def _pairs(call: Call) -> int:
    if call.shape == "full":
        each = call.rows * call.columns
    elif call.shape == "causal":  # column <= row
        square = min(call.rows, call.columns)
        each = square * (square + 1) // 2 + (call.rows - square) * call.columns
    else:  # column >= row
        square = min(call.rows, call.columns)
        each = square * call.columns - square * (square - 1) // 2
    return each * call.times
