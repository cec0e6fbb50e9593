"""Computes attention where queries choose their far keys (`Choice`), for prompts; on a GPU with exact gradients.

Chosen for prompts under a law that gives a choice, and for training on a GPU. Equals `reference`.

On a GPU near keys go through `blocked`, or `prefill` in short prompts; `select` finds what the queries choose, and
`far` adds it: the cost is linear in the length of a text but for the scores of blocks, one product for every block of
keys. `backward` has the gradient, exact for the choice made. Elsewhere `tiles` does it in plain PyTorch, where every
far key is multiplied; forward only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rpe3d.attention import blocked, prefill
from rpe3d.attention.chosen.tiles import Tiles
from rpe3d.attention.lowering import whole_chunks
from rpe3d.attention.problem import Prepared, Problem, rotated
from rpe3d.attention.spans import Span, spans
from rpe3d.config import choice
from rpe3d.geometry import Law, Region
from rpe3d.rotation import rotate
from rpe3d.rotation.table import Tables

if TYPE_CHECKING:
    from rpe3d.attention.chosen.select import Unions

LEVELS = 2**28
"""Bytes of scores at a time, and of what is made of them: so many rows that a search keeps all processors busy."""
AIMS = 2**23
"""Bytes of aims at a time."""
ROOM = 2**27
"""Bytes of turned far keys and of what tiles of queries have chosen, at a time."""
SHARES = 7 / 320, 23 / 320
"""Of the bytes of vectors and output: what scores have, and keys and lists, so that short prompts too need little more
memory. With the log-sum-exp, a tenth. Scores also have what keys and lists leave."""
LEAST = 2**22
"""Bytes that scores always have; keys and lists have three times as many."""
FLOPS_PER_CALL = 3e10
"""Of near keys, up to which one kernel takes them instead of library calls: those of small blocks keep the host busier
than the GPU. Below `choose.FLOPS_PER_CALL`, because there is other work to launch meanwhile."""
WIDEST = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HAS_TRITON = find_spec("triton") is not None


def refusal(problem: Problem) -> str | None:
    """Return why a problem cannot run here; None if it can."""
    if not problem.law.chooses:
        return "no query has a choice of keys"
    if problem.needs_gradient and (reason := _gradient_refusal(problem)):
        return f"it has no gradient here: {reason}"
    if not problem.rotated and (not problem.q.is_cuda or kernels_refusal(problem)):
        return "its keys must have been rotated by stock RoPE"
    found = list(spans(problem))
    if None in found or any(span.places for span in found if span is not None):
        return "its positions are not consecutive"
    return None


def _gradient_refusal(problem: Problem) -> str | None:
    """Return why a problem that has spans has no gradient; None if it has one. Tiles in plain PyTorch have none.

    In float32 some gradients on an H200 failed tests that they pass in Triton's interpreter (docs/log.md).
    """
    if not problem.q.is_cuda:
        return f"its kernels run on a GPU, not on {problem.q.device}"
    if problem.q.dtype == torch.float32:
        return "the kernels' gradient is for float16 and bfloat16"
    return kernels_refusal(problem)


def kernels_refusal(problem: Problem) -> str | None:
    """Return why the kernels do not run a problem that has spans; None if they do."""
    if reason := vectors_refusal(problem):
        return reason
    if any(span is not None and span.keys.start for span in spans(problem)):
        return "its keys do not begin at position 0"
    return None


def vectors_refusal(problem: Problem) -> str | None:
    """Return why no kernel of a choice runs a problem here, whatever its positions; None if they do."""
    if not _HAS_TRITON:
        return "Triton is not installed"
    d, e = problem.q.shape[3], problem.v.shape[3]
    if problem.q.dtype not in _DTYPES:
        return f"they compute in float32, not in {str(problem.q.dtype).removeprefix('torch.')}"
    if d > WIDEST or e != d:
        return f"head dimensions are {d} and {e}, not one of up to {WIDEST}"
    if problem.softcap is not None:
        return "scores have a softcap"
    if not problem.scale > 0:
        return f"scores are multiplied by {problem.scale:g}, which is not positive"
    if reason := law_refusal(problem.law):
        return reason
    if not problem.q.is_cuda:
        from rpe3d.attention.chosen import far

        if not far.INTERPRETED:
            return f"they run on a GPU, not on {problem.q.device}"
    return None


def law_refusal(law: Law) -> str | None:
    """Return why the kernels do not run a law with a choice; None if they do."""
    near, *others = law.regions
    if len(others) != 1 or others[0].fade is not None or near != Region(unit=near.unit, last=near.last):
        return "its far keys fade"
    (region,) = others
    assert region.choice is not None
    size, chunk = region.choice.size, region.unit
    if size & (size - 1) or not 4 <= size <= 128:
        return f"blocks of {size} keys are not a power of two from 4 to 128"
    if chunk % 32:
        return f"chunks of {chunk} tokens are not a multiple of 32"
    if not (whole_chunks(region.query) and whole_chunks(region.key)):
        return "its far keys rotate token by token"
    return None


def prepare(problem: Problem, **options: Any) -> Prepared:
    """Return the kernels or tiles for a problem that is not refused, for the vectors of any layer of the same shape."""
    if problem.q.is_cuda and kernels_refusal(problem) is None:
        return Kernels(problem, **options)
    return Tiles(problem)


class Few(NamedTuple):
    """Some key heads of a span: which, and their query heads; their keys as given, and what is made of the far ones."""

    keys: slice
    heads: slice
    k: Tensor
    turned: Tensor
    summaries: Tensor
    centre: Tensor


class Kernels:
    """A prompt as kernels, settled once for all layers: near keys first, then far ones as they were chosen."""

    def __init__(
        self, x: Problem, shape: tuple[int, int] | None = None, near: str | None = None, **options: Any
    ) -> None:
        """Prepare a problem. near: "calls" or "kernel" for near keys; default: the faster one."""
        from rpe3d.attention.chosen import far, select

        self.far, self.options = far, options
        self.given = None if x.rotated else x.hollow()
        x = replace(x.hollow(), rotated=True)
        self.problem = x
        first, self.region = x.law.regions
        queries, own = x.q.nbytes, 2 * x.q.nbytes + x.k.nbytes + x.v.nbytes
        part = max(2 * LEAST, own // 40)  # of what near keys give to some queries; at a time there are two
        rows = max(1024, part * x.q.shape[0] * x.q.shape[2] // max(1, queries))
        self.calls = blocked.Calls(x, regions=(first,), rows=rows)
        self.spans = [span for span in spans(x) if span is not None]
        number, flops = self.calls.work()
        small = number > 1 and flops * x.q.shape[3] < FLOPS_PER_CALL * number
        kernel = small and x.q.element_size() == 2 and x.q.device.type != "cpu"
        self.near: Prepared = self.calls
        if self.spans and (kernel if near is None else choice("near", near, ("calls", "kernel")) == "kernel"):
            self.near = prefill.Step(x, self.spans, (first,))
        shape = shape or far.shape(x.q.shape[1] // x.k.shape[1], x.q.shape[3], x.q.element_size())
        self.selection = select.Selection(x.law, shape[0], x.q.device, shape[1])
        self.tables = Tables()
        self.room = min(ROOM, max(3 * LEAST, int(own * SHARES[1])))
        self.levels = min(LEVELS, max(LEAST, int(own * SHARES[0]), int(own * sum(SHARES)) - self.room))
        self.aims = min(AIMS, self.levels // 4)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        if self.given is not None:
            q, k = rotated(self.given, q, k)
        q, k, v = (y if y.stride(3) == 1 else y.contiguous() for y in (q, k, v))
        if not self.spans:  # padding alone
            return self.calls(q, k, v, sinks)
        if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in (q, k, v, sinks)):
            from rpe3d.attention.chosen import backward

            out, lse = backward.Attend.apply(q, k, v, sinks, self)  # type: ignore[no-untyped-call]
            return out, lse
        return self.attend(q, k, v, sinks)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp of rotated vectors, without a gradient."""
        out, lse = self.near(q, k, v, sinks)
        for span in self.spans:
            here = q[span.batch, :, span.query], k[span.batch, :, span.key], v[span.batch, :, span.key]
            self._add_far(span, *here, out[span.batch, :, span.query], lse[span.batch, :, span.query])
        return out, lse

    def _add_far(self, span: Span, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Add the far keys of a span's queries to `out` and `lse`, a few key heads at a time."""
        for few in self.few_heads(span, q, k):
            room = self._left(few.turned.nbytes)
            for some_queries in self._stretches(span.queries, q.shape[0] * few.k.shape[1], room):
                unions = self.unions(span, few, q, some_queries)
                self.far.attend(
                    self.selection, unions, q[:, few.heads], few.turned, v[:, few.keys],
                    out[:, few.heads], lse[:, few.heads],
                    first=some_queries.start, query_start=span.queries.start, scale=self.problem.scale, **self.options,
                )  # fmt: skip
                del unions  # before the next are made
            del few

    def few_heads(self, span: Span, q: Tensor, k: Tensor) -> Iterator[Few]:
        """Yield a span's key heads, as many at a time as `_together` says; none if none of its keys is far."""
        blocks = self.selection.choosable(span.queries[-1])
        if not blocks:
            return
        h, g = q.shape[1], k.shape[1]
        step = self._together(span.queries, q.shape[0], g, blocks * self.selection.choice.size * k[0, 0, 0].nbytes)
        for start in range(0, g, step):
            keys = slice(start, start + step)
            heads = slice(start * (h // g), (start + step) * (h // g))
            some = k[:, keys]
            yield Few(keys, heads, some, self._turned(some, blocks), *self.selection.summaries(some, blocks))

    def _turned(self, k: Tensor, blocks: int) -> Tensor:
        """Return the keys of the first blocks as far queries see them, turned by a table of chunks, not of tokens."""
        turn = self.region.key
        tokens = blocks * self.selection.choice.size
        each = replace(turn, chunk=1, offset=0.0, stride=turn.stride - turn.chunk + 1)  # its position i is chunk i
        places = (range(tokens // turn.chunk),)
        table = self.tables(each, None, places, self.problem.frequencies, torch.float32)
        cos, sin = (x[:, None].expand(-1, turn.chunk, -1) for x in table)
        interleaved = self.problem.law.rotary.interleaved
        chunks = k[:, :, :tokens].unflatten(2, (-1, turn.chunk)).transpose(1, 2)
        made = [rotate(one, None, cos, sin, interleaved=interleaved)[0].transpose(0, 1).flatten(1, 2) for one in chunks]
        return made[0][None] if len(made) == 1 else torch.stack(made)

    def unions(self, span: Span, few: Few, q: Tensor, some_queries: range) -> Unions:
        """Return what the queries at some positions choose, tile by tile."""
        heads = q.shape[0] * few.k.shape[1]
        unions = self.selection.room(q.shape[0], few.k.shape[1], some_queries, q.device)
        spare = self._left(few.turned.nbytes) - sum(x.nbytes for x in unions)
        levels = min(LEVELS, self.levels + max(0, spare))
        parts = self._cut(some_queries, self.aims, heads * 2 * q.shape[3])
        work = [(part, self._pieces(part, heads, levels)) for part in parts]
        given = unions, q[:, few.heads], few.k, few.centre, few.summaries, work
        self.selection.unite(*given, first=some_queries.start, there=span.queries)
        return unions

    def _together(self, queries: range, b: int, g: int, each: int) -> int:
        """Return how many key heads go together: so many that attention is fewest launches in the room there is.

        each: bytes of a head's turned keys. A launch ends with processors that have nothing left to do.
        """

        def launches(heads: int) -> int:
            stretches = self._stretches(queries, b * heads, self._left(heads * b * each))
            return -(-g // heads) * len(stretches)

        return min((n for n in range(1, g + 1) if n == 1 or n * b * each < self.room), key=launches)

    def _left(self, turned: int) -> int:
        """Return the bytes that turned keys leave for lists, and what makes them; a third where keys need all."""
        return max(self.room - turned - self.aims, self.room // 3)

    def _stretches(self, queries: range, heads: int, room: int, more: int = 0) -> list[range]:
        """Cut the positions of queries that have something to choose into whole tiles, as many as have room for lists.

        more: bytes for each tile and key head, beside the list of what it has chosen.
        """
        tile = self.selection.tile
        start = max(queries.start, (self.selection.near + 1) * self.region.unit) // tile * tile
        stop = -(-queries.stop // tile) * tile
        each = self.selection.list_bytes(self.selection.choosable(queries[-1])) + more
        return self._cut(range(start, stop), room, heads * each, tile)

    def _pieces(self, queries: range, heads: int, room: int) -> list[range]:
        """Cut positions into whole tiles, as many as have room for their scores."""
        each = self.selection.row_bytes(self.selection.choosable(queries[-1]))
        return self._cut(queries, room, heads * each)

    def _cut(self, positions: range, room: int, each: int, rows: int = 1) -> list[range]:
        """Cut positions into as few parts as have room, of whole tiles and about the same length.

        each: bytes of so many rows.
        """
        tile = self.selection.tile
        most = max(tile, room // each * rows // tile * tile)
        parts = max(1, -(-len(positions) // most))
        length = max(1, -(-len(positions) // (parts * tile))) * tile
        return [positions[a : a + length] for a in range(0, len(positions), length)]
