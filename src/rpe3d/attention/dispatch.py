"""Which implementation runs a problem, and how a batch becomes tasks of consecutive positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rpe3d.attention import decode, reference
from rpe3d.attention.blocked import Blocked, Task
from rpe3d.attention.contract import Inputs, placed
from rpe3d.attention.library import backend_for
from rpe3d.config import ConfigError, choice
from rpe3d.geometry.plan import STOCK
from rpe3d.rotation import cos_sin, rotate

IMPLS = ("auto", "reference", "blocked", "decode")


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
    return _blocked(x, backend)


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
    return "blocked", f"{backend_for(x.q, x.v).name} attention calls, merged"


@dataclass(frozen=True)
class Span:
    """Sequences of the batch with the same consecutive tokens: where they lie in the tensors, and their positions."""

    batch: slice
    query: slice
    key: slice
    queries: range
    keys: range


def _blocked(x: Inputs, backend: str | None) -> tuple[Tensor, Tensor]:
    spans = list(_spans(x))
    # No library has softcap, few have values of another size; these, and positions without a schedule, are tiled.
    if x.softcap is not None or x.v.shape[3] != x.q.shape[3] or any(span is None for span in spans):
        return _tiled(x)
    if not x.turned:
        x = _stock(x)
    # PyTorch's CPU attention takes vectors that are scattered in memory, and misreads them.
    x = replace(x, q=_unscattered(x.q), k=_unscattered(x.k), v=_unscattered(x.v))
    theta, library = x.frequencies, backend_for(x.q, x.v, backend)
    results = []
    for span in spans:
        assert span is not None
        task = Task(
            law=x.law,
            queries=span.queries,
            keys=span.keys,
            frequencies=theta,
            scale=x.scale,
            backend=library,
            rows=_rows(x.q, len(span.keys)),
        )
        if not task.blocks:
            return _tiled(x)
        repeats = any(call.times > 1 for block in task.blocks for call in block.calls)
        rows = range(*span.batch.indices(x.q.shape[0]))
        for batch in [slice(b, b + 1) for b in rows] if repeats else [span.batch]:
            q, k, v = x.q[batch, :, span.query], x.k[batch, :, span.key], x.v[batch, :, span.key]
            out, lse = Blocked.apply(q, k, v, x.sinks, task)  # type: ignore[no-untyped-call]
            results.append((batch, span, out, lse))
    return _gathered(x, results)


def _unscattered(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _rows(q: Tensor, keys: int) -> int:
    """Queries in a block. On a GPU a part of it has 64 MiB in bf16; 16 MiB where the text is long, and memory counts.

    A small model thus has one block, and the host, which needs 60 µs and more for a call, keeps up with the device.
    """
    if q.device.type == "cpu":
        return 4096
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


def _spans(x: Inputs) -> Iterator[Span | None]:
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
