# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""The decoding step over a paged cache: `loop` with a block table between a key's position and its place.

A server keeps the keys and values of all its sequences in pages of a few tokens, and for each sequence a row of page
numbers. Everything else is as in `kernel`; keys are turned by stock RoPE, as there.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rpe3d.attention.decode.launch import Launch, scales
from rpe3d.attention.decode.loop import NEVER, _attend
from rpe3d.attention.lowering import plan, table
from rpe3d.config import ConfigError
from rpe3d.geometry import Law
from rpe3d.rotation.launch import Launcher


@triton.jit(
    do_not_specialize=["splits", "pages_b", "lengths_b"], do_not_specialize_on_alignment=["pages", "lengths", "sinks"]
)
@no_type_check
def _paged_kernel(
    q,
    k,
    v,
    pages,
    lengths,
    out,
    lse,
    parts,
    logs,
    arrivals,
    sinks,
    table,
    splits,
    scale,
    softcap,
    q_b,
    q_h,
    q_t,
    k_p,
    k_s,
    k_h,
    v_p,
    v_s,
    v_h,
    out_b,
    out_h,
    out_t,
    pages_b,
    lengths_b,
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
    PAGE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute BLOCK_M rows (queries x heads of a group) against one split of a sequence's keys; see `_decode_kernel`.

    The queries of sequence b are its last tokens, at lengths[b] - QUERIES and on; its key at position p lies in slot
    p mod PAGE of page pages[b, p div PAGE]. A sequence of length 0 sees nothing.
    """
    BLOCKS: tl.constexpr = (QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M
    group = tl.program_id(1) // BLOCKS
    b = tl.program_id(2).to(tl.int64)
    stop = tl.load(lengths + b * lengths_b).to(tl.int64)
    start = tl.zeros([], tl.int64)

    m = (tl.program_id(1) % BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
    head, t = group * GROUP + m // QUERIES, m % QUERIES
    live = m < QUERIES * GROUP
    if QUERIES == 1:
        p = stop - 1 + tl.arange(0, 1)
        highest = stop - 1
        lowest = highest
    else:
        p = tl.where(live, stop - QUERIES + t, -1)
        highest = tl.max(p, 0)
        lowest = tl.min(tl.where(p >= 0, p, NEVER), 0)
    _attend(
        q + b * q_b, k + group.to(tl.int64) * k_h, v + group.to(tl.int64) * v_h, pages + b * pages_b,
        out + b * out_b, lse, parts, logs, arrivals, sinks, table, None, 0,
        p, lowest, highest, start, stop, start, group, m, head, t, live,
        splits, scale, softcap, q_h, q_t, k_p, k_s, v_p, v_s, out_h, out_t,
        QUERIES, GROUP, DIM, WIDTH, PAIRS, INTERLEAVED, BANDS, TURNING, FADES, CHUNK, PAGE, SPLIT, LEAST_TILES, ROWS,
        BLOCK_M, BLOCK_N, WIDEN,
    )  # fmt: skip


_paged = Launcher(_paged_kernel)
STAGES = 5
"""Two more than without pages: their numbers are loaded ahead, and as many keys shall be on the way."""


def warps(ways: int) -> int:
    """Return the warps for a law with so many turns: four, and where their registers would spill (`dca`) eight."""
    return 8 if ways > 2 else 4


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    law: Law,
    *,
    pages: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
    **options: int,
) -> tuple[Tensor, Tensor]:
    """Attend from the last t tokens of every sequence to all of it; return the output [b, h, t, d] and the log-sum-exp.

    q is [b, h, t, d]; k and v are the cache [pages, tokens per page, g, d], turned by stock RoPE; `pages` [b, n] holds
    the page numbers of every sequence and `lengths` [b] its tokens, those of the queries included (at least t, or 0
    for a row that is not in use). Nothing is read from the device, so that a step can be captured in a CUDA graph.
    """
    made = plan(law)
    if made.refusal is not None:
        raise ConfigError(
            f"the paged kernel cannot run {law.name}: {made.refusal}", "gather the keys, and use attention"
        )
    (b, h, t, d), (_, page, g, _) = q.shape, k.shape
    options = {"num_stages": STAGES, "num_warps": warps(made.ways)} | options
    launch = Launch(law, q, g, pages.shape[1] * page, splits=splits, **options)
    out = torch.empty((b, t, h, d), dtype=q.dtype, device=q.device).transpose(1, 2)
    lse, *scratch = launch.results()
    bound = _paged.bind(
        q.device,
        launch.grid,
        (
            table(law, q.device),
            launch.splits,
            *scales(scale, softcap),
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *out.stride()[:3],
            pages.stride(0),
            lengths.stride(0),
        ),
        launch.constants | {"PAGE": page, "WIDEN": _paged.interpreted},
        launch.options,
    )
    bound(q, k, v, pages, lengths, out, lse, *scratch, None if sinks is None else sinks.contiguous())
    return out, lse
