# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""Flash-decoding under a law: one Triton kernel. `decode` says what it computes and for which problems.

`loop` has how. Here a step finds its queries and keys: by where they begin, or by positions and masks.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rpe3d.attention.decode.launch import Launch, scales
from rpe3d.attention.decode.loop import NEVER, _attend
from rpe3d.attention.lowering import table
from rpe3d.attention.problem import Problem
from rpe3d.rotation.launch import Bound, Launcher

# What changes from step to step must not compile a new kernel in the middle of a text.
_STEPS = ["query_start", "key_start", "keys", "query_positions_b", "query_mask_b", "key_mask_b"]
_UNALIGNED = ["lse", "query_positions", "key_starts", "query_mask", "key_mask", "sinks"]


@triton.jit(
    do_not_specialize=[*_STEPS, "query_positions_t", "query_mask_t", "splits"],
    do_not_specialize_on_alignment=_UNALIGNED,
)
@no_type_check
def _decode_kernel(
    q,
    k,
    v,
    out,
    sinks,
    lse,
    parts,
    logs,
    arrivals,
    table,
    query_positions,
    key_starts,
    query_mask,
    key_mask,
    query_start,
    key_start,
    keys,
    splits,
    scale,
    softcap,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    out_b,
    out_h,
    out_t,
    query_positions_b,
    query_positions_t,
    query_mask_b,
    query_mask_t,
    key_mask_b,
    key_mask_s,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BANDS: tl.constexpr,
    TURNING: tl.constexpr,
    FADES: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute the rows of one tile, and where their keys are: see `_attend`."""
    BLOCKS: tl.constexpr = (QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M
    group = tl.program_id(1) // BLOCKS
    b = tl.program_id(2).to(tl.int64)

    # Rows: the queries of a head follow each other. Their positions: one for all rows where there is one query.
    m = (tl.program_id(1) % BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
    head, t = group * GROUP + m // QUERIES, m % QUERIES
    live = m < QUERIES * GROUP
    if QUERIES == 1:
        query = tl.arange(0, 1)
        token = query == 0
    else:
        query = t
        token = live
    if query_positions is None:
        p = query_start + query.to(tl.int64)
    else:
        p = tl.load(query_positions + b * query_positions_b + query * query_positions_t, mask=token, other=-1)
    if query_mask is not None:
        token = token & (tl.load(query_mask + b * query_mask_b + query * query_mask_t, mask=token, other=0) != 0)
    p = tl.where(token, p, -1)  # sees nothing
    highest = tl.max(p, 0)
    lowest = highest if QUERIES == 1 else tl.min(tl.where(token, p, NEVER), 0)

    # Keys: those at positions start .. stop exist, the one at p has index p - offset.
    offset = tl.zeros([], tl.int64) + key_start
    if key_starts is not None:
        offset = tl.load(key_starts + b)
    if key_mask is not None:
        key_mask += b * key_mask_b
    _attend(
        q + b * q_b, k + b * k_b + group.to(tl.int64) * k_h, v + b * v_b + group.to(tl.int64) * v_h, None,
        out + b * out_b, lse, parts, logs, arrivals, sinks, table, key_mask, key_mask_s,
        p, lowest, highest, tl.maximum(offset, 0), offset + keys, offset, group, m, head, t, live,
        splits, LEAST_TILES, scale, softcap, q_h, q_t, 0, k_s, 0, v_s, out_h, out_t,
        QUERIES, GROUP, DIM, WIDTH, PAIRS, INTERLEAVED, BANDS, TURNING, FADES, CHUNK, 1, SPLIT, ROWS, BLOCK_M, BLOCK_N,
        WIDEN,
    )  # fmt: skip


_decode = Launcher(_decode_kernel)
INTERPRETED = _decode.interpreted
"""The kernel runs in Triton's interpreter, and so takes CPU tensors."""


class Step:
    """A decoding step: all that is the same for every layer of a model, settled once.

    Made from the vectors of one layer, it takes those of any that have the same shapes, strides and types; `options`
    are those of `Launch`.
    """

    reason = "few queries: one kernel reads every key once"

    def __init__(self, x: Problem, **options: int) -> None:
        g, s = x.k.shape[1:3]
        self.made = Launch(x.law, x.q, g, s, **options)
        tensors, strides = _optional(x)
        self.arguments = (
            table(x.law, x.q.device),
            *tensors,
            x.queries.start if isinstance(x.queries, range) else 0,
            x.keys.start if isinstance(x.keys, range) else 0,
            s,
            self.made.splits,
            *scales(x.scale, x.softcap),
            *x.q.stride()[:3],
            *x.k.stride()[:3],
            *x.v.stride()[:3],
            *torch.empty_like(x.q).stride()[:3],
            *strides,
        )
        self.launch: Bound | None = None
        self.layer: Bound | None = None
        """A launch with room that the layers of a forward share."""

    def _bind(self, *room: Tensor | None) -> Bound:
        constants = self.made.constants | {"WIDEN": INTERPRETED}
        return _decode.bind(self.made.device, self.made.grid, (*room, *self.arguments), constants, self.made.options)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        if self.launch is None:
            self.launch = self._bind()
        out = torch.empty_like(q)
        lse, *scratch = self.made.results()
        self.launch(q, k, v, out, None if sinks is None else sinks.contiguous(), lse, *scratch)
        return out, lse

    def output(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the output alone, for layers that run one after the other: they share all other room.

        Not for a launch that is captured in a CUDA graph, which may outlive this step.
        """
        if self.layer is None:
            self.layer = self._bind(*self.made.kept_results())
        out = torch.empty_like(q)
        self.layer(q, k, v, out, None if sinks is None else sinks.contiguous())
        return out


def _optional(x: Problem) -> tuple[list[Tensor | None], list[int]]:
    """Positions and masks that are tensors, each None where it is not; and the two strides of those with two."""
    queries = x.queries if isinstance(x.queries, Tensor) else None
    starts = x.key_starts if isinstance(x.keys, Tensor) else None
    # Masks as bytes, which is what a kernel loads; a view, no copy.
    masks = [None if y is None else y.view(torch.uint8) for y in (x.query_mask, x.key_mask)]
    strides = [stride for y in (queries, *masks) for stride in ((0, 0) if y is None else y.stride())]
    return [queries, None if starts is None else starts.contiguous(), *masks], strides
