# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""Attention of the queries of a prompt to the far blocks they chose, in one Triton kernel.

A program has a tile of neighbouring queries in the heads that choose together. It walks the blocks that any of its
queries chose, gathers their keys, and masks row by row. It begins with what the near keys gave, and so ends with the
result. Far keys come turned as the law shows them.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from rpe3d.attention.chosen.select import Selection, Unions, _cos_sin
from rpe3d.attention.decode.loop import _cdiv, _partner, _power
from rpe3d.attention.prefill.kernel import _dot
from rpe3d.rotation.launch import Launcher

LOG2_E = math.log2(math.e)
TILES = 2**15
"""Bytes of a program's queries, at most; half of that of the keys that it walks over at a time."""


@triton.jit(do_not_specialize=["first", "query_start", "queries", "room"])
@no_type_check
def _far_kernel(
    q, k, v, out, lse, picked, bits, counts, table, first, query_start, queries, room, scale,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_t, lse_b, lse_h,
    TILE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of queries in HEADS of the GROUP heads of a key head; `out` and `lse` hold the near part.

    The query at position p has index p - query_start. Its turn is that of its chunk i, θ (slope · i + start): both
    numbers follow the frequencies in the table.
    """
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    tile, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    group, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    r = tl.arange(0, BLOCK_M)
    t, head = r % TILE, part * HEADS + r // TILE
    index = first + tile * TILE + t - query_start
    live = (r < TILE * HEADS) & (head < GROUP) & (index >= 0) & (index < queries)
    head = (group * GROUP + head).to(tl.int64)
    groups = tl.num_programs(1) // PARTS
    list = (b * groups + group) * tl.num_programs(0) + tile
    count = tl.load(counts + list)
    picked += list * room
    bits += list * room

    d = tl.arange(0, WIDTH)[None, :]
    pair, partner, sign, pairs = _partner(DIM, WIDTH, PAIRS, INTERLEAVED)
    chunk = ((first + tile * TILE) // CHUNK).to(tl.float64)
    shift = tl.load(table + PAIRS) * chunk + tl.load(table + PAIRS + 1)
    turns = tl.load(table + pair, mask=pairs, other=0.0) * shift
    rows = q + b * q_b + head[:, None] * q_h + index.to(tl.int64)[:, None] * q_t
    here = tl.load(rows + d, mask=live[:, None] & (d < DIM), other=0.0)
    there = tl.load(rows + partner, mask=live[:, None] & pairs, other=0.0)
    cos, sin = _cos_sin(turns)
    query = (here.to(tl.float32) * cos + there.to(tl.float32) * (sin * sign)).to(here.dtype)

    result = out + b * out_b + head[:, None] * out_h + index.to(tl.int64)[:, None] * out_t + d
    log = lse + b * lse_b + head * lse_h + index
    acc = tl.load(result, mask=live[:, None] & (d < DIM), other=0.0).to(tl.float32)
    largest = tl.load(log, mask=live, other=0.0) * 1.4426950408889634
    total = tl.full([BLOCK_M], 1.0, tl.float32)
    k += b * k_b + group.to(tl.int64) * k_h
    v += b * v_b + group.to(tl.int64) * v_h
    column = tl.arange(0, BLOCK_N)
    mine = (1 << t.to(tl.int64)).to(tl.int32)
    for n in range(0, count * SIZE, BLOCK_N):
        entry = (n + column) // SIZE
        block = tl.load(picked + entry, mask=entry < count, other=0)
        bit = tl.load(bits + entry, mask=entry < count, other=0)
        place = (block * SIZE + (n + column) % SIZE).to(tl.int64)[:, None]
        if DIM < WIDTH:  # noqa: SIM108 (the compiler decides)
            key = tl.load(k + place * k_s + d, mask=d < DIM, other=0.0)
        else:
            key = tl.load(k + place * k_s + d)
        score = _dot(query, tl.trans(key), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), WIDEN, PRECISION)
        score = tl.where((bit[None, :] & mine[:, None]) != 0, score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1) * scale)  # scale > 0
        weight = tl.exp2(score * scale - larger[:, None])  # one instruction for both
        kept = tl.exp2(largest - larger)
        total = total * kept + tl.sum(weight, 1)
        if DIM < WIDTH:  # noqa: SIM108 (the compiler decides)
            value = tl.load(v + place * v_s + d, mask=d < DIM, other=0.0)
        else:
            value = tl.load(v + place * v_s + d)
        acc = _dot(weight.to(value.dtype), value, acc * kept[:, None], WIDEN, PRECISION)
        largest = larger
    tl.store(result, (acc / total[:, None]).to(out.dtype.element_ty), mask=live[:, None] & (d < DIM))
    tl.store(log, (largest + tl.log2(total)) * 0.6931471805599453, mask=live)


_far = Launcher(_far_kernel)
INTERPRETED = _far.interpreted


def tile(group: int) -> int:
    """Return how many neighbouring queries choose together, for so many heads to a key head."""
    return 32 if group <= 2 else 16


def most_rows(d: int, size: int) -> int:
    """Return how many rows of d numbers of `size` bytes a program may have."""
    return min(128, TILES // (max(16, _power(d)) * size))


def attend(
    selection: Selection,
    unions: Unions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    first: int,
    query_start: int,
    scale: float,
    **options: Any,
) -> None:
    """Add the far keys that queries chose to `out` and `lse`, which hold the near ones; k is turned already.

    Tile 0 of the unions begins at position `first`, the first query stands at `query_start`.
    """
    (b, h, t, d), g = q.shape, k.shape[1]
    group, tiles, room = h // g, unions.picked.shape[2], unions.picked.shape[3]
    rows = most_rows(d, q.element_size())
    parts = _cdiv(group, max(1, rows // selection.tile))
    heads = _cdiv(group, parts)
    block_m = max(16, _power(selection.tile * heads))
    chosen: dict[str, Any] = {"num_warps": 8 if block_m >= 128 else 4, "num_stages": 2} | options
    block_n = chosen.pop("block_n", max(16, min(64, rows // 2)))
    _far(
        q.device,
        (tiles, g * parts, b),
        (
            q, k, v, out, lse, *unions, selection.table, first, query_start, t, room, scale * LOG2_E,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride()[:2],
        ),
        {
            "TILE": selection.tile, "GROUP": group, "HEADS": heads, "SIZE": selection.choice.size,
            "CHUNK": selection.region.unit,
            "DIM": d, "WIDTH": max(16, _power(d)), "PAIRS": selection.law.rotary.pairs,
            "INTERLEAVED": selection.law.rotary.interleaved, "BLOCK_M": block_m, "BLOCK_N": block_n,
            "WIDEN": INTERPRETED, "PRECISION": "tf32x3",
        },
        chosen,
    )  # fmt: skip
