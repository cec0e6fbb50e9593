"""Which implementation runs a problem."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rpe3d.attention import decode, prefill, reference
from rpe3d.attention.blocked import Blocked
from rpe3d.attention.contract import Inputs
from rpe3d.attention.library import backend_for, without_plans
from rpe3d.attention.schedule import schedule
from rpe3d.attention.spans import Span, spans
from rpe3d.attention.task import LEAST_BACKWARD, Task
from rpe3d.config import ConfigError, choice
from rpe3d.geometry import Law
from rpe3d.geometry.region import STOCK
from rpe3d.rotation import cos_sin, rotate

IMPLS = ("auto", "reference", "blocked", "decode", "prefill")
NARROW = 64
ROWS_ON_CPU = 4096
FLOPS_PER_CALL = {True: 3e11, False: 5e10}
"""What the prefill kernel may compute for every library call that it saves, in heads of at most NARROW dimensions and
in wider ones: each call takes 60 µs of the host's time and, at a new length, the making of a plan; but the library
computes faster. On an H200 the kernel is as fast as all calls together up to 64k tokens of 9 heads of dimension 64; at
dimension 128 it has 440 of cuDNN's 600 TFLOP/s (docs/log.md)."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run(x: Inputs, impl: str = "auto", backend: str | None = None) -> tuple[Tensor, Tensor]:
    """The problem, by the implementation asked for."""
    chosen, _ = explain(x) if choice("impl", impl, IMPLS) == "auto" else (impl, "asked for")
    if chosen == "reference":
        return reference.attend(x)
    if chosen == "decode":
        if impl == "decode" and (refusal := decode.supports(x)):
            raise ConfigError(f"a decoding step cannot run this: {refusal}", 'use impl="auto"')
        return decode.attend(x)
    if chosen == "prefill" and (impl == "prefill" or backend is None):
        return _prefill(x, asked=impl == "prefill")
    out, lse = _blocked(x, backend)
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in (x.q, x.k, x.sinks)):
        lse = WithGradient.apply(lse, x.q, x.k, x.sinks, x)  # type: ignore[no-untyped-call]
    return out, lse


class WithGradient(torch.autograd.Function):
    """The log-sum-exp as it is, with the gradient that library calls leave out: recomputed, where it is asked for."""

    @staticmethod
    def forward(ctx: Any, lse: Tensor, q: Tensor, k: Tensor, sinks: Tensor | None, x: Inputs) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, sinks)
        ctx.problem = replace(x, q=q.detach(), k=k.detach(), v=x.v.detach(), sinks=None)
        return lse.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        given = [y if y is None else y.detach().requires_grad_() for y in ctx.saved_tensors]
        with torch.enable_grad():
            _, lse = _tiled(replace(ctx.problem, q=given[0], k=given[1], sinks=given[2]))
            leaves = [y for y in given if y is not None]
            # A row that sees nothing is -inf whatever the vectors.
            found = iter(torch.autograd.grad(lse, leaves, gradient.masked_fill(lse == -torch.inf, 0.0)))
        return None, *(None if y is None else next(found) for y in given), None


def explain(x: Inputs) -> tuple[str, str]:
    """What impl="auto" takes, and why."""
    if x.q.shape[2] <= decode.MOST_QUERIES and x.q.shape[2] < x.k.shape[2]:
        if refusal := decode.supports(x):
            return "reference", f"few queries, but no decoding step: {refusal}"
        if lack := decode.kernel_lacks(x):
            return "decode", f"few queries: plain PyTorch (the kernel: {lack})"
        return "decode", "few queries: one kernel reads every key once"
    if x.q.dtype == torch.float64 and x.q.device.type == "cuda":
        return "reference", "no library attention takes float64 on CUDA"
    library = f"{backend_for(x.q, x.v).name} attention calls, merged"
    return choose_prompt(x, library) if x.q.is_cuda else ("blocked", library)


def choose_prompt(x: Inputs, library: str) -> tuple[str, str]:
    """What a GPU runs a prompt with, and why: `library` calls or the prefill kernel."""
    if lack := prefill.lacks(x):
        return "blocked", f"{library} (the prefill kernel: {lack})"
    (b, h, t, d), s = x.q.shape, x.k.shape[2]
    # As if the queries were the last tokens: to ask the device where they stand would take longer.
    calls, flops = (0, 0) if x.softcap else _work(x.law, range(max(0, s - t), s), range(s), _rows(x.q, s), b)
    flops *= b * h * d
    if calls == 0:
        return "prefill", "one kernel: no library call fits"
    if calls == 1 or x.q.dtype == torch.float32 or flops > FLOPS_PER_CALL[d <= NARROW] * calls:
        return "blocked", library
    return "prefill", f"one kernel instead of {calls} library calls"


@lru_cache(maxsize=64)  # the layers of a model ask for the same
def _work(law: Law, queries: range, keys: range, rows: int, batch: int) -> tuple[int, int]:
    """Library calls that `blocked` makes, none where no schedule fits; and floating point operations per dimension."""
    calls = [call for block in schedule(law.regions, queries, keys, rows) for call in block.calls]
    alone = any(call.times > 1 for call in calls)  # then sequences go one by one
    flops = sum((4 if call.shape == "full" else 2) * call.times * call.rows * call.columns for call in calls)
    return len(calls) * (batch if alone else 1), flops


def step(x: Inputs) -> decode.Step | None:
    """The kernel that "auto" takes, as a function of the vectors; None where it takes none."""
    chosen = explain(x)[0]
    if chosen == "decode":
        return decode.step(x)
    made = prefill_step(x) if chosen == "prefill" and x.turned else ""
    return None if isinstance(made, str) else made


def prefill_step(x: Inputs) -> prefill.Step | str:
    """The prefill kernel for this problem and others like it, turned by stock RoPE; or why there is none."""
    if lack := prefill.lacks(x):
        return lack
    runs = list(spans(x))
    known = [span for span in runs if span is not None]
    if not known or len(known) < len(runs) or any(span.places for span in known):
        return "its positions are not consecutive, or a query is not among the keys"
    return prefill.Step(x, known)


def _prefill(x: Inputs, *, asked: bool) -> tuple[Tensor, Tensor]:
    step = prefill_step(x)
    if not isinstance(step, str):
        x = x if x.turned else _stock(x)
        return step(x.q, x.k, x.v, x.sinks)
    if asked:
        raise ConfigError(f"the prefill kernel cannot run this: {step}", 'use impl="auto"')
    return _blocked(x, None)


def _blocked(x: Inputs, backend: str | None) -> tuple[Tensor, Tensor]:
    runs = list(spans(x))
    # No library has softcap, few values of another size, none float64 on CUDA; these, positions without a schedule,
    # and a batch of padding alone are tiled.
    foreign = x.softcap is not None or x.v.shape[3] != x.q.shape[3] or (x.q.is_cuda and x.q.dtype == torch.float64)
    if foreign or None in runs or not runs:
        return _tiled(x)
    if not x.turned:
        x = _stock(x)
    # PyTorch's CPU attention takes vectors that are scattered in memory, and misreads them.
    x = replace(x, q=_unscattered(x.q), k=_unscattered(x.k), v=_unscattered(x.v))
    if backend is None and any(span.places for span in runs if span is not None):
        backend = without_plans(backend_for(x.q, x.v).name)
    theta, library = x.frequencies, backend_for(x.q, x.v, backend)
    results = []
    for span in runs:
        assert span is not None
        rows = _rows(x.q, len(span.keys))
        task = Task(
            law=x.law,
            queries=span.queries,
            keys=span.keys,
            frequencies=theta,
            scale=x.scale,
            backend=library,
            rows=rows,
            backward_rows=max(rows, LEAST_BACKWARD),
            places=span.places,
        )
        if not task.blocks:
            return _tiled(x)
        if span.places is not None:
            out, lse = Blocked.apply(*map(_in_a_row, (x.q, x.k, x.v)), x.sinks, task)  # type: ignore[no-untyped-call]
            return tuple(part[0].unflatten(1, (x.q.shape[0], -1)).transpose(0, 1) for part in (out, lse))
        repeats = any(call.times > 1 for block in task.blocks for call in block.calls)
        every = range(*span.batch.indices(x.q.shape[0]))
        for batch in [slice(b, b + 1) for b in every] if repeats else [span.batch]:
            q, k, v = x.q[batch, :, span.query], x.k[batch, :, span.key], x.v[batch, :, span.key]
            out, lse = Blocked.apply(q, k, v, x.sinks, task)  # type: ignore[no-untyped-call]
            results.append((batch, span, out, lse))
    return _gathered(x, results)


def _in_a_row(x: Float[Tensor, "b h t d"]) -> Float[Tensor, "1 h b*t d"]:
    """All sequences as one: a view where a token's heads lie together."""
    return x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


def _unscattered(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _rows(q: Tensor, keys: int) -> int:
    """Queries in a block. On a GPU a part of it has 64 MiB in bf16; 16 MiB where the text is long, and memory counts.

    A small model thus has one block, and the host, which needs 60 µs and more for a call, keeps up with the device.
    """
    if q.device.type == "cpu":
        return ROWS_ON_CPU
    elements = 2**25 if keys <= 65536 else 2**23
    return max(1024, elements // (q.shape[1] * q.shape[3]))


def _gathered(x: Inputs, results: list[tuple[slice, Span, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The results of all spans in one tensor; rows of no span are zeros."""
    if len(results) == 1 and results[0][2].shape[:3] == x.q.shape[:3]:
        return results[0][2], results[0][3]
    out = x.q.new_zeros(*x.q.shape[:3], x.v.shape[3])
    lse = torch.full(x.q.shape[:3], -torch.inf, dtype=results[0][3].dtype, device=x.q.device)
    if x.sinks is not None:
        lse = x.sinks.detach().to(lse.dtype)[None, :, None].expand_as(lse).clone()
    for batch, span, o, s in results:
        out[batch, :, span.query] = o
        lse[batch, :, span.query] = s
    return out, lse


def _stock(x: Inputs) -> Inputs:
    """Turned by stock RoPE, as the blocks expect them."""
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    vectors = []
    for y, p in zip((x.q, x.k), x.positions(), strict=True):
        cos, sin = cos_sin(x.angles(STOCK, p, x.frequencies), scaling=x.scaling, dtype=dtype)
        vectors.append(rotate(y, None, cos, sin, interleaved=x.law.rotary.interleaved)[0])
    q, k = vectors
    return replace(x, q=q, k=k, turned=True)


def _tiled(x: Inputs, rows: int = 256) -> tuple[Tensor, Tensor]:
    """The reference a tile of queries at a time: memory linear in length, gradients recomputed."""
    outs, lses = [], []
    queries, keys = x.positions()
    for a in range(0, x.q.shape[2], rows):
        tile = slice(a, a + rows)
        mask = None if x.query_mask is None else x.query_mask[:, tile]

        def part(
            q: Tensor, k: Tensor, v: Tensor, tile: slice = tile, mask: Tensor | None = mask
        ) -> tuple[Tensor, Tensor]:
            return reference.attend(replace(x, q=q, k=k, v=v, queries=queries[:, tile], keys=keys, query_mask=mask))

        out, lse = checkpoint(part, x.q[:, :, tile], x.k, x.v, use_reentrant=False)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)
