"""How a batch becomes runs of consecutive positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rpe3d.attention import reference
from rpe3d.attention.contract import Inputs, placed


@dataclass(frozen=True)
class Span:
    """Sequences of the batch with the same consecutive tokens: where they lie in the tensors, and their positions."""

    batch: slice
    query: slice
    key: slice
    queries: range
    keys: range


def spans(x: Inputs) -> Iterator[Span | None]:
    """Runs of consecutive tokens, one per sequence, or one for all where nothing is masked; None: not consecutive."""
    masked = x.query_mask is not None or x.key_mask is not None
    if isinstance(x.queries, range) and isinstance(x.keys, range) and not masked:
        everything = slice(None)
        if x.queries.stop > x.keys.stop or x.queries.start < x.keys.start:
            yield None  # a query without its own key: not what the schedule is made for
            return
        yield Span(everything, everything, everything, x.queries, x.keys)
        return
    query, key = x.positions()
    queries = x.query_runs or placed(query, x.query_mask).runs
    keys = x.key_runs or placed(key, x.key_mask).runs
    if None in queries or None in keys:
        reference.check_order("query_positions", query, x.query_mask)
        reference.check_order("key_positions", key, x.key_mask)
        yield None
        return
    for b, (q, k) in enumerate(zip(queries, keys, strict=True)):
        assert q is not None
        assert k is not None
        if not len(q[1]):
            continue
        if q[1].stop > k[1].stop or q[1].start < k[1].start:
            yield None
            return
        yield Span(slice(b, b + 1), q[0], k[0], q[1], k[1])
