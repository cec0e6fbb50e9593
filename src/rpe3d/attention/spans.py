"""Turn a batch into runs of consecutive positions, or of positions that skip ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rpe3d.attention import reference
from rpe3d.attention.problem import Problem
from rpe3d.rotation.table import Places


@dataclass(frozen=True)
class Span:
    """Sequences of the batch with the same tokens: their slots in the tensors, and their positions.

    With `places`, these are the positions, sequence by sequence, and `queries` and `keys` count all tokens.
    """

    batch: slice
    query: slice
    key: slice
    queries: range
    keys: range
    places: tuple[Places, ...] | None = None


def spans(x: Problem) -> Iterator[Span | None]:
    """Yield runs of consecutive tokens, one for all sequences in a row that have the same; None: there is none."""
    masked = x.query_mask is not None or x.key_mask is not None
    if isinstance(x.queries, range) and isinstance(x.keys, range) and not masked:
        everything = slice(None)
        if x.queries.stop > x.keys.stop or x.queries.start < x.keys.start:
            yield None  # a query without its own key: not what the schedule is made for
            return
        yield Span(everything, everything, everything, x.queries, x.keys)
        return
    if x.places:
        everything, tokens = slice(None), range(x.q.shape[0] * x.q.shape[2])
        yield Span(everything, everything, everything, tokens, tokens, x.places)
        return
    queries, keys = x.query_runs, x.key_runs
    if None in queries or None in keys:
        query, key = x.positions()
        reference.check_order("query_positions", query, x.query_mask)
        reference.check_order("key_positions", key, x.key_mask)
        yield None
        return
    first = 0
    for (q, k), alike in groupby(zip(queries, keys, strict=True)):
        assert q is not None
        assert k is not None
        batch = slice(first, first := first + len(list(alike)))
        if not len(q[1]):
            continue
        if q[1].stop > k[1].stop or q[1].start < k[1].start:
            yield None
            return
        yield Span(batch, q[0], k[0], q[1], k[1])
