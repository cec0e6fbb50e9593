"""Compute attention from library attention calls, merged exactly, with exact gradients and memory linear in length.

It is chosen for prompts and for training, and equals `reference`.

`schedule` says which calls execute a law, `backends` has the libraries' calls, `run` makes and merges them, `ragged`
joins many small ones where positions skip. A problem that no schedule fits runs the reference, a tile of queries at a
time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rpe3d.attention import reference
from rpe3d.attention.blocked.backends import backend_for, without_plans
from rpe3d.attention.blocked.run import Blocked, backward
from rpe3d.attention.blocked.task import LEAST_BACKWARD, Task
from rpe3d.attention.problem import Prepared, Problem, rotated
from rpe3d.attention.spans import Span, spans
from rpe3d.geometry import Region
from rpe3d.rotation.table import Tables

ROWS_ON_CPU = 4096
"""Queries per block on a CPU."""
PART = 2**25
"""Maximum number of elements in a part of the result."""
Done = list[tuple[slice, Span, Tensor, Tensor]]


def refusal(problem: Problem) -> str | None:
    """Return None: every problem can run."""
    return None


def prepare(problem: Problem, backend: str | None = None) -> Prepared:
    """Return the calls for a problem, for any layer of the same shape; `backend` is the library to call."""
    return Calls(problem, backend)


class Calls:
    """A problem as library calls: schedules and cos/sin tables, made once for all layers of a forward pass."""

    def __init__(
        self,
        x: Problem,
        backend: str | None = None,
        regions: tuple[Region, ...] | None = None,
        rows: int | None = None,
    ) -> None:
        """Schedule the calls. `regions` are the regions of the law to attend to; None: all.

        `rows` is the maximum number of queries in a block on a GPU; a block briefly needs twice its output.
        """
        self.problem = x.hollow()
        self.rows = rows
        self.regions = x.law.regions if regions is None else regions
        self.library = backend_for(x.q, x.v, backend)
        found = list(spans(x))
        # No library has softcap, few values of another size, none float64 on CUDA; these, positions without a schedule,
        # and a batch of padding alone are tiled.
        foreign = x.softcap is not None or x.v.shape[3] != x.q.shape[3] or (x.q.is_cuda and x.q.dtype == torch.float64)
        known = [] if foreign or None in found else [span for span in found if span is not None]
        if backend is None and any(span.places for span in known):
            self.library = backend_for(x.q, x.v, without_plans(self.library.name))
        tables = Tables()
        self.tasks = [(span, self._task(span, tables)) for span in known]
        if not all(task.blocks for _, task in self.tasks):
            self.tasks = []

    @property
    def name(self) -> str:
        """Name of the library."""
        return self.library.name

    @property
    def reason(self) -> str:
        """How the problem runs: library calls, or the reference in tiles."""
        return f"{self.name} attention calls, merged" if self.tasks else "the reference, a tile of queries at a time"

    def _task(self, span: Span, tables: Tables) -> Task:
        x = self.problem
        far = any(region.last is None for region in self.regions)
        rows = _rows(x.q, len(span.keys) if far else 0)
        if self.rows is not None and x.q.device.type != "cpu":
            rows = min(rows, self.rows)
        return Task(
            law=x.law,
            regions=self.regions,
            queries=span.queries,
            keys=span.keys,
            frequencies=x.frequencies,
            scale=x.scale,
            backend=self.library,
            precision=torch.promote_types(x.q.dtype, torch.float32),
            rows=rows,
            backward_rows=max(rows, LEAST_BACKWARD),
            places=span.places,
            tables=tables,
        )

    def batches(self, span: Span, task: Task) -> list[slice]:
        """Return which sequences run together: if calls repeat over chunks, as many as fit, as further heads."""
        b, h, _, d = self.problem.q.shape
        first, stop, _ = span.batch.indices(b)
        if stop - first == 1 or not task.repeats:
            return [span.batch]
        most = max(1, PART // (h * d * len(span.keys)))
        return [slice(n, min(n + most, stop)) for n in range(first, stop, most)]

    def work(self) -> tuple[int, int]:
        """Return the number of library calls (0 if none fits), and their floating point operations per dimension."""
        calls = flops = 0
        b = self.problem.q.shape[0]
        for span, task in self.tasks:
            every = [call for block in task.blocks for call in block.calls]
            calls += len(every) * len(self.batches(span, task))
            each = sum((4 if call.shape == "full" else 2) * call.times * call.rows * call.columns for call in every)
            flops += each * len(range(*span.batch.indices(b)))
        return calls, flops * self.problem.q.shape[1]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        x = self.problem
        if q.shape != x.q.shape:
            raise ValueError(f"calls for queries {tuple(x.q.shape)} are given {tuple(q.shape)}")
        if not self.tasks:
            return tiled(replace(x, q=q, k=k, v=v, sinks=sinks))
        if not x.rotated:
            q, k = rotated(x, q, k)
        # PyTorch's CPU attention takes vectors that are scattered in memory, and misreads them.
        q, k, v = (y if y.stride(3) == 1 else y.contiguous() for y in (q, k, v))
        done: Done = []
        for span, task in self.tasks:
            if span.places is not None:
                out, lse = Blocked.apply(*map(_in_a_row, (q, k, v)), sinks, task)  # type: ignore[no-untyped-call]
                out, lse = (part[0].unflatten(1, (q.shape[0], -1)).transpose(0, 1) for part in (out, lse))
                return out, lse
            for batch in self.batches(span, task):
                here = q[batch, :, span.query], k[batch, :, span.key], v[batch, :, span.key]
                out, lse = Blocked.apply(*here, sinks, task)  # type: ignore[no-untyped-call]
                done.append((batch, span, out, lse))
        return _gathered(q, v, sinks, done)

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of rotated q, k and v; `out` and `lse` are of whole rows, which may see other keys."""
        if not self.tasks or any(span.places is not None for span, _ in self.tasks):
            raise ValueError("there are no calls of consecutive tokens")
        works = [(batch, span, task) for span, task in self.tasks for batch in self.batches(span, task)]
        if len(works) == 1 and works[0][1].query == slice(None):  # all tokens of all sequences
            return backward(works[0][2], q, k, v, out, lse, do, far=None)
        dq, dk, dv = (torch.zeros_like(y) for y in (q, k, v))
        for batch, span, task in works:
            here, there = (batch, slice(None), span.query), (batch, slice(None), span.key)
            found = backward(task, q[here], k[there], v[there], out[here], lse[here], do[here], far=None)
            dq[here], dk[there], dv[there] = found
        return dq, dk, dv


def _in_a_row(x: Float[Tensor, "b h t d"]) -> Float[Tensor, "1 h b*t d"]:
    """Return all sequences as one: a view if the heads of a token are contiguous."""
    return x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


def _rows(q: Tensor, keys: int) -> int:
    """Return the queries per block: 64 MiB of a part in bf16 on a GPU, or 16 MiB for a long text, where memory counts.

    A small model thus has one block, and the host, which needs 60 µs and more for a call, keeps up with the device.
    """
    if q.device.type == "cpu":
        return ROWS_ON_CPU
    elements = PART if keys <= 65536 else PART // 4
    return max(1024, elements // (q.shape[1] * q.shape[3]))


def _gathered(q: Tensor, v: Tensor, sinks: Tensor | None, done: Done) -> tuple[Tensor, Tensor]:
    """Return the results of all spans in one tensor; rows of no span are zeros."""
    if len(done) == 1 and done[0][2].shape[:3] == q.shape[:3]:
        return done[0][2], done[0][3]
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = torch.full(q.shape[:3], -torch.inf, dtype=done[0][3].dtype, device=q.device)
    if sinks is not None:
        lse = sinks.to(lse.dtype)[None, :, None].expand_as(lse).clone()
    for batch, span, o, s in done:
        out[batch, :, span.query] = o
        lse[batch, :, span.query] = s
    return out, lse


def tiled(x: Problem, rows: int = 256) -> tuple[Tensor, Tensor]:
    """Run the reference a tile of queries at a time: memory linear in length, gradients recomputed."""
    outs, lses = [], []
    queries, keys = x.positions()
    choosers = reference.choosers_of(replace(x, k=x.k.detach()))
    for a in range(0, x.q.shape[2], rows):
        tile = slice(a, a + rows)
        end = x.k.shape[2]
        # No tile sees what comes after it; a law whose frequencies grow with the text takes them from all of it.
        if isinstance(x.keys, range) and isinstance(x.queries, range) and not x.law.grows:
            end = min(end, max(1, x.queries[tile][-1] + 1 - x.keys.start))
        masks = (
            None if x.query_mask is None else x.query_mask[:, tile],
            None if x.key_mask is None else x.key_mask[:, :end],
        )
        here = replace(x, queries=queries[:, tile], keys=keys[:, :end], query_mask=masks[0], key_mask=masks[1])
        here = replace(here, query_placed=None, key_placed=None)

        def part(q: Tensor, k: Tensor, v: Tensor, here: Problem = here) -> tuple[Tensor, Tensor]:
            return reference.attend(replace(here, q=q, k=k, v=v), choosers)

        out, lse = checkpoint(part, x.q[:, :, tile], x.k[:, :, :end], x.v[:, :, :end], use_reentrant=False)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)
