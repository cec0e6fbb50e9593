"""A choice of far keys in plain PyTorch, a tile of queries at a time: `chosen` says what it computes, and for which.

A tile is a decoding step in plain PyTorch (`decode.plain`) of more queries than usual: every far key is multiplied, and
those in blocks that a query has not chosen are masked. So it costs more than the whole far field does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from rpe3d.attention import reference
from rpe3d.attention.decode import plain
from rpe3d.attention.problem import Problem
from rpe3d.attention.spans import Span, spans

SCORES = 2**26
"""Of a tile, at most."""
KEPT = 2**28
"""Bytes of masks and tables of cos and sin that are kept for the layers that follow; more are made anew."""


class Tile(NamedTuple):
    """Queries, the keys that come no later than the last of them, and the problem of both."""

    queries: slice
    keys: slice
    problem: Problem


class Tiles:
    """A problem as tiles, settled once for all layers of a forward."""

    def __init__(self, x: Problem) -> None:
        self.flash = plain.has_flash(x)  # asked of vectors that lie as they will
        x = x.hollow()
        rows = max(16, min(512, SCORES // (x.q.shape[0] * x.q.shape[1] * x.k.shape[2])))
        self.spans = [(span.batch, _part(x, span), _tiles(x, span, rows)) for span in spans(x) if span is not None]
        self.steps: dict[int, plain.Step] = {}
        self.room = KEPT

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        precise = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        lse = torch.full(q.shape[:3], -torch.inf, dtype=precise, device=q.device)
        if sinks is not None:
            lse = sinks.to(precise)[None, :, None].expand_as(lse).clone()
        for batch, (problem, every), tiles in self.spans:
            choosers = reference.choosers_of(replace(problem, k=k[batch, :, every]))
            for tile in tiles:
                vectors = q[batch, :, tile.queries], k[batch, :, tile.keys], v[batch, :, tile.keys]
                step = self._step(tile.problem)
                out[batch, :, tile.queries], lse[batch, :, tile.queries] = step(*vectors, sinks, choosers)
        return out, lse

    def _step(self, problem: Problem) -> plain.Step:
        """Return the step of a tile, kept while there is room."""
        if (found := self.steps.get(id(problem))) is not None:
            return found
        step = plain.Step(problem, flash=self.flash)
        if (size := step.nbytes()) <= self.room:
            self.steps[id(problem)] = step
            self.room -= size
        return step


def _part(x: Problem, span: Span, queries: range | None = None, keys: range | None = None) -> tuple[Problem, slice]:
    """Return the problem of some queries and keys of a span, and where those keys lie."""
    queries, keys = queries or span.queries, keys or span.keys
    here, there = _slots(span.query, span.queries, queries), _slots(span.key, span.keys, keys)
    q, k, v = x.q[span.batch, :, here], x.k[span.batch, :, there], x.v[span.batch, :, there]
    bare = replace(x, query_mask=None, key_mask=None, query_placed=None, key_placed=None)
    return replace(bare, q=q, k=k, v=v, queries=queries, keys=keys), there


def _tiles(x: Problem, span: Span, rows: int) -> list[Tile]:
    made = []
    for a in range(0, len(span.queries), rows):
        queries = span.queries[a : a + rows]
        part, keys = _part(x, span, queries, span.keys[: max(1, queries.stop - span.keys.start)])
        made.append(Tile(_slots(span.query, span.queries, queries), keys, part))
    return made


def _slots(where: slice, positions: range, some: range) -> slice:
    """Return where some of the positions lie."""
    start = (where.start or 0) + some.start - positions.start
    return slice(start, start + len(some))
