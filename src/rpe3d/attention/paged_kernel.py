# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""The decoding step over a paged cache: `decode_kernel` with a block table between a key's position and its place.

A server keeps the keys and values of all its sequences in pages of a few tokens, and for each sequence a row of page
numbers. Everything else is `decode_kernel`'s, whose functions it is made of; keys are turned by stock RoPE, as there.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rpe3d.attention.counters import zeros
from rpe3d.attention.decode import plan, table
from rpe3d.attention.decode_kernel import (
    LEAST_KEYS,
    LOG2_E,
    NEVER,
    ROW,
    _band,
    _cdiv,
    _dot,
    _end_of_faded,
    _fade,
    _finish,
    _if,
    _leave,
    _merge,
    _partner,
    _power,
    _processors,
    _query_turn,
    _tiles,
    _turned,
    scratch,
    split,
    tile,
)
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
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """BLOCK_M rows (queries x heads of one group) against one split of a sequence's keys; see `_decode_kernel`.

    The queries of sequence b are its last tokens, at lengths[b] - QUERIES and on; its key at position p lies in slot
    p mod PAGE of page pages[b, p div PAGE]. A sequence of length 0 sees nothing.
    """
    split = tl.program_id(0)
    BLOCKS: tl.constexpr = (QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M
    PER_CHUNK: tl.constexpr = (CHUNK + BLOCK_N - 1) // BLOCK_N  # tiles
    group = tl.program_id(1) // BLOCKS
    b = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1) // BLOCKS * GROUP
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
    k += group.to(tl.int64) * k_h
    v += group.to(tl.int64) * v_h
    pages += b * pages_b

    tiles = 0
    for r in tl.static_range(len(BANDS)):
        _, _, _, count = _tiles(BANDS, r, lowest, highest, start, stop, CHUNK, BLOCK_N)
        tiles += count
    share = tl.maximum(tl.cdiv(tiles, splits), LEAST_TILES)
    begin = split * share
    end = tl.minimum(begin + share, tiles)

    d = tl.arange(0, WIDTH)[None, :]
    column = tl.arange(0, BLOCK_N)
    q += b * q_b + head[:, None].to(tl.int64) * q_h + t[:, None] * q_t
    stock = tl.load(q + d, mask=live[:, None] & (d < DIM), other=0.0)
    if TURNING:
        pair, partner, sign, pairs = _partner(DIM, WIDTH, PAIRS, INTERLEAVED)
        there = tl.load(q + partner, mask=live[:, None] & pairs, other=0.0)
        theta = tl.load(table + len(BANDS) * ROW + pair, mask=pairs, other=0.0)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)

    at = (b * heads + head) * QUERIES + t
    before, faded, slot = 0, 0, split
    for r in tl.static_range(len(BANDS)):
        row = table + r * ROW
        low, high, first_tile, count = _tiles(BANDS, r, lowest, highest, start, stop, CHUNK, BLOCK_N)
        row_low, row_high = _band(BANDS, r, p, start, stop)
        turned = stock
        turned_for = -1
        if (TURNING >> r) & 1:
            x, phase = _query_turn(row, p)
            slope, key_phase, key_rate = tl.load(row + 5), tl.load(row + 9), tl.load(row + 10)
        if FADES and r == 0:
            eased, loss = _fade(row, p)
            sharp = 1.0 / (1.0 - eased)
        for n in range(first_tile + tl.maximum(begin - before, 0), first_tile + tl.minimum(end - before, count)):
            j = n // PER_CHUNK
            within = (n - j * PER_CHUNK) * BLOCK_N
            position = j.to(tl.int64) * CHUNK + within
            left = tl.maximum(low - position, 0).to(tl.int32)
            right = tl.minimum(high - position, tl.minimum(CHUNK - within, BLOCK_N)).to(tl.int32)
            exist = (column >= left) & (column < right)
            here = position.to(tl.int32) + column
            page = tl.load(pages + here // PAGE, mask=exist, other=0).to(tl.int64)
            cell = here % PAGE
            if (TURNING >> r) & 1:  # noqa: SIM102 (a question to the compiler, then one to the device)
                if j != turned_for:
                    turned = _turned(stock, there, sign, pairs, theta, x, phase, slope, key_phase, key_rate, j)
                    turned_for = j

            rows = exist[:, None] & (d < DIM)
            key = tl.load(k + (page * k_p + cell * k_s)[:, None] + d, mask=rows, other=0.0)
            score = _dot(turned, tl.trans(key), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), WIDEN) * scale
            if softcap is not None:
                fall = tl.exp2(-2.8853900817779268 * tl.abs(score))
                score = softcap * tl.where(score < 0, -1.0, 1.0) * (1.0 - fall) / (1.0 + fall)
            if FADES and r == 0:
                score *= sharp[:, None]
            seen = exist[None, :]
            if QUERIES > 1:
                seen = seen & (column[None, :] >= (row_low - position)[:, None])
                seen = seen & (column[None, :] < (row_high - position)[:, None])
            score = tl.where(seen, score, float("-inf"))

            larger = tl.maximum(largest, tl.max(score, 1))
            safe = tl.where(larger == float("-inf"), 0.0, larger)
            weight = tl.exp2(score - safe[:, None])
            kept = tl.exp2(largest - safe)
            total = total * kept + tl.sum(weight, 1)
            value = tl.load(v + (page * v_p + cell * v_s)[:, None] + d, mask=rows, other=0.0)
            acc = _dot(weight.to(value.dtype), value, acc * kept[:, None], WIDEN)
            largest = larger
        before += count
        if FADES and r == 0:
            faded = count
            slot, largest, total, acc = _end_of_faded(
                parts, logs, at, splits, begin, share, end, count, eased, loss, live, largest, total, acc,
                SPLIT, DIM, WIDTH,
            )  # fmt: skip

    if SPLIT:
        _leave(
            parts, logs, at, slot, splits + FADES, splits + 3 * FADES, _if(begin < tiles, live), largest, total, acc,
            DIM, WIDTH,
        )  # fmt: skip
        tl.debug_barrier()  # all of this program's shares are on their way before it counts itself
        arrivals += tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(arrivals, 0)
            first_row = (tl.program_id(1) % BLOCKS) * BLOCK_M
            _merge(
                parts, logs, splits, tl.cdiv(tiles, share), tl.cdiv(faded, share), out + b * out_b, lse, out_h, out_t,
                sinks, b * heads, group * GROUP, first_row, FADES, QUERIES, GROUP, ROWS, DIM, WIDTH,
            )  # fmt: skip
    else:
        out += b * out_b + head.to(tl.int64) * out_h + t * out_t
        _finish(out, lse + at, sinks, head, live, largest, total, acc, DIM, WIDTH)


_paged = Launcher(_paged_kernel)
# Two stages more than without pages: their numbers are loaded ahead, and as many keys shall be on the way. Twice the
# warps: a thread then holds half as many addresses; with four, registers spilled under `dca`, at a fifth of the speed.
OPTIONS = {"num_stages": 5, "num_warps": 8}


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
    """The last t tokens of every sequence against all of it: the output [b, h, t, d] and the log-sum-exp [b, h, t].

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
    width, rows, device = _power(d), h // g * t, q.device
    options = tile(rows, width, q.element_size(), made.chunk) | OPTIONS | options
    block_m, block_n = options.pop("block_m"), options.pop("block_n")
    least_tiles = options.pop("least_tiles", max(1, LEAST_KEYS // block_n))
    blocks = _cdiv(rows, block_m)
    splits = splits or split(b * g * blocks, pages.shape[1] * page, _processors(device))
    out = torch.empty((b, t, h, d), dtype=q.dtype, device=device).transpose(1, 2)
    lse = torch.empty((b, h, t), dtype=torch.float32, device=device)
    parts = logs = arrivals = None
    slots, columns = scratch(splits, made)
    if slots:
        shares = b * h * t * slots * d
        parts = torch.empty(shares + b * h * t * columns, dtype=torch.float32, device=device)
        logs, arrivals = parts[shares:], zeros(b * g * blocks, device)
    launch = _paged.bind(
        device,
        (splits, g * blocks, b),
        (
            table(law, device),
            splits,
            scale / softcap if softcap else scale * LOG2_E,
            softcap * LOG2_E if softcap else None,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *out.stride()[:3],
            pages.stride(0),
            lengths.stride(0),
        ),
        {
            "QUERIES": t,
            "GROUP": h // g,
            "DIM": d,
            "WIDTH": width,
            "PAIRS": law.rotary.pairs,
            "INTERLEAVED": law.rotary.interleaved,
            "BANDS": made.bands,
            "TURNING": sum(turns << r for r, turns in enumerate(made.turning)),
            "FADES": made.fades,
            "CHUNK": block_n if made.chunk is None else made.chunk,
            "PAGE": page,
            "SPLIT": splits > 1,
            "LEAST_TILES": least_tiles,
            "ROWS": min(block_m, _power(rows)),
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "WIDEN": _paged.interpreted,
        },
        options,
    )
    launch(q, k, v, pages, lengths, out, lse, parts, logs, arrivals, None if sinks is None else sinks.contiguous())
    return out, lse
