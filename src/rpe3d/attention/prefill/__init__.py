"""Compute attention of a whole prompt in one kernel; forward only.

It is chosen on a GPU if `blocked` would make dozens of library calls that the host must launch; if calls are large, the
library's are faster. It equals `reference`.

q and k come rotated by stock RoPE. For each region of the law that rotates them differently a rotated copy is made, and
one launch of `kernel` walks the regions. Triton is imported with the kernel, on the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from rpe3d.attention.problem import Prepared, Problem, rotated
from rpe3d.attention.spans import Span, spans
from rpe3d.geometry import Region, Turn
from rpe3d.geometry.region import STOCK
from rpe3d.rotation.table import table

WIDEST = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HAS_TRITON = find_spec("triton") is not None


def refusal(problem: Problem) -> str | None:
    """Return why the kernel cannot run a problem here; None if it can."""
    if reason := vectors_refusal(problem):
        return reason
    found = list(spans(problem))
    if not found or None in found or any(span.places for span in found if span is not None):
        return "its positions are not consecutive, or a query is not among the keys"
    return None


def vectors_refusal(problem: Problem) -> str | None:
    """Return why the kernel cannot run a problem here whatever its positions; None if it can."""
    if not _HAS_TRITON:
        return "Triton is not installed"
    d, e = problem.q.shape[3], problem.v.shape[3]
    if problem.needs_gradient:
        return "it has no gradient"
    if problem.law.chooses:
        return "its far keys are chosen"
    if problem.q.dtype not in _DTYPES:
        return f"it computes in float32, not in {str(problem.q.dtype).removeprefix('torch.')}"
    if d > WIDEST or e != d:
        return f"head dimensions are {d} and {e}, not one of up to {WIDEST}"
    if not problem.q.is_cuda:
        from rpe3d.attention.prefill import kernel

        if not kernel.INTERPRETED:
            return f"it runs on a GPU, not on {problem.q.device}"
    return None


def prepare(problem: Problem, **options: Any) -> Prepared:
    """Return the kernel for a problem that is not refused, for the vectors of any layer of the same shape."""
    found = [span for span in spans(problem) if span is not None]
    step = Step(problem, found, **options)
    if problem.rotated:
        return step
    hollow = problem.hollow()

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k = rotated(hollow, q, k)
        return step(q, k, v, sinks)

    return run


class Step:
    """A prefill without its vectors: all that is the same for every layer of a model, settled once.

    Made from one layer's problem, which nothing refuses, and its spans, it takes the vectors of any that have the same
    shapes, strides and types, turned by stock RoPE. It holds the tables of the law's turns, so it should go when the
    forward does.
    """

    def __init__(
        self, x: Problem, found: Sequence[Span], regions: Sequence[Region] | None = None, **options: Any
    ) -> None:
        """Prepare a problem, or the part of it that lies in some regions of its law."""
        from rpe3d.rotation.kernel import Turning

        regions = x.law.regions if regions is None else regions
        self.regions = tuple(sorted(regions, key=lambda region: region.fade is None))  # as the kernel wants them
        same = _same(x, found)
        query, key = (same.queries, same.keys) if same else x.positions()
        theta = x.frequencies
        everything = range(min(span.keys.start for span in found), max(span.keys.stop for span in found))
        at = {(0, STOCK): 0, (1, STOCK): 1}  # where among the vectors of a call q and k are, as each region turns them
        self.turnings = []
        for pair in _launches(self.regions, together=x.q.shape[2] == x.k.shape[2]):
            tables = [_table(turn, (query, key)[side], theta, everything) for side, turn in pair]
            self.turnings.append(([side for side, _ in pair], Turning(*tables, interleaved=x.law.rotary.interleaved)))
            at |= {one: len(at) + i for i, one in enumerate(pair)}
        self.regions_at = [(at[0, region.query], at[1, region.key]) for region in self.regions]
        self.options = options | {
            "regions": self.regions,
            "spans": None if same else _on_device(found, x.q.shape[0], x.q.device),
            "starts": (same.queries.start, same.keys.start) if same else (0, 0),
            "scale": x.scale,
            "softcap": x.softcap,
        }
        self.launch: Any = None
        self.strides: list[tuple[int, ...]] = []
        """Strides of the vectors that the launch is bound for."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        q, k, v = (y if y.stride(3) == 1 else y.contiguous() for y in (q, k, v))
        vectors = [q, k]
        for sides, turning in self.turnings:
            vectors += turning(*(vectors[side] for side in sides))
        qs = tuple(vectors[i] for i, _ in self.regions_at)
        ks = tuple(vectors[i] for _, i in self.regions_at)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        strides = [y.stride() for y in (*qs, *ks, v, out)]
        if strides != self.strides:
            from rpe3d.attention.prefill import kernel

            self.launch, self.strides = kernel.bind(qs, ks, v, out, **self.options), strides
        self.launch(qs, ks, v, out, lse, None if sinks is None else sinks.contiguous())
        return out, lse


def _same(x: Problem, spans: Sequence[Span]) -> Span | None:
    """Return the span of all sequences, if they have the same and it leaves out no slot."""
    first, (b, _, t, _), s = spans[0], x.q.shape, x.k.shape[2]
    if (len(first.queries), len(first.keys)) != (t, s):
        return None
    return first if first.batch.indices(b) == (0, b, 1) else None


def _launches(regions: Sequence[Region], *, together: bool) -> list[list[tuple[int, Turn]]]:
    """Return what is turned, queries (0) and keys (1), and how: two at a time where their tokens are as many."""
    queries = [(0, turn) for turn in dict.fromkeys(region.query for region in regions) if not turn.is_stock]
    keys = [(1, turn) for turn in dict.fromkeys(region.key for region in regions) if not turn.is_stock]
    if not together:
        return [[one] for one in queries + keys]
    return [[one for one in pair if one is not None] for pair in zip_longest(queries, keys)]


def _table(
    turn: Turn, positions: range | Int[Tensor, "b n"], theta: Float64[Tensor, " l"], everything: range
) -> tuple[Tensor, Tensor]:
    """Return cos and sin from stock RoPE to `turn`, at every token; padding may get any position."""
    if isinstance(positions, range):
        return table(turn, positions, theta, torch.float32)
    cos, sin = table(turn, everything, theta, torch.float32)
    row = (positions - everything.start).clamp(0, len(everything) - 1)
    return cos[row], sin[row]


def _on_device(spans: Sequence[Span], b: int, device: torch.device) -> Int[Tensor, "b 6"]:
    """Return what the kernel reads of each sequence; zeros for one without tokens."""
    numbers = torch.zeros(b, 6, dtype=torch.int32)
    for span in spans:
        query = (span.query.start, len(span.queries), span.queries.start)
        numbers[span.batch] = torch.tensor((*query, span.key.start, len(span.keys), span.keys.start), dtype=torch.int32)
    return numbers.to(device, non_blocking=True)
