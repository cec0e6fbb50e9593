# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""Attention of the queries of a prompt to the far blocks they chose, in one Triton kernel.

A program has a tile of neighbouring queries in the heads that choose together. It walks the blocks that any of its
queries chose, gathers their keys, and masks row by row. A tile may have two halves: the program walks the blocks that
both chose, then those of the first half alone, then those of the second. So a key is loaded once for both halves, and
multiplied with those of them that chose it. It begins with what the near keys gave, and so ends with the result. Far
keys come turned as the law shows them.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from rpe3d.attention.chosen.select import Selection, Unions
from rpe3d.attention.chosen.vectors import _cos_sin
from rpe3d.attention.decode.loop import _cdiv, _partner, _power
from rpe3d.attention.prefill.kernel import _dot
from rpe3d.rotation.launch import Launcher

LOG2_E = math.log2(math.e)
TILES = 2**15
"""Bytes of a program's queries, at most; half of that of the keys that it walks over at a time."""


@triton.jit
@no_type_check
def _rows(first, query_start, queries, PART: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
          PARTS: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Say of each row of a half which query and head it is, whether there is one, and its bit in a block's word."""
    r = tl.arange(0, BLOCK_M)
    t, head = HALF * PART + r % PART, tl.program_id(1) % PARTS * HEADS + r // PART
    index = first + t - query_start
    live = (r < PART * HEADS) & (head < GROUP) & (index >= 0) & (index < queries)
    head = (tl.program_id(1) // PARTS * GROUP + head).to(tl.int64)
    return index, head, live, (1 << t.to(tl.int64)).to(tl.int32)


@triton.jit
@no_type_check
def _begin(q, out, lse, at, cos, sin, partner, pairs, q_h, q_t, out_h, out_t, lse_h, DIM: tl.constexpr,
           WIDTH: tl.constexpr):  # fmt: skip
    """Load a half: its queries, turned, and what near keys gave, as one weight of 1."""
    index, head, live, _ = at
    d = tl.arange(0, WIDTH)[None, :]
    there = live[:, None] & (d < DIM)
    rows = q + head[:, None] * q_h + index.to(tl.int64)[:, None] * q_t
    own = tl.load(rows + d, mask=there, other=0.0)
    other = tl.load(rows + partner, mask=live[:, None] & pairs, other=0.0)
    query = (own.to(tl.float32) * cos + other.to(tl.float32) * sin).to(own.dtype)
    acc = tl.load(out + head[:, None] * out_h + index.to(tl.int64)[:, None] * out_t + d, mask=there, other=0.0)
    largest = tl.load(lse + head * lse_h + index, mask=live, other=0.0) * 1.4426950408889634
    return query, acc.to(tl.float32), largest, tl.full(largest.shape, 1.0, tl.float32)


@triton.jit
@no_type_check
def _end(out, lse, at, acc, largest, total, out_h, out_t, lse_h, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store a half's result."""
    index, head, live, _ = at
    d = tl.arange(0, WIDTH)[None, :]
    out += head[:, None] * out_h + index.to(tl.int64)[:, None] * out_t + d
    tl.store(out, (acc / total[:, None]).to(out.dtype.element_ty), mask=live[:, None] & (d < DIM))
    tl.store(lse + head * lse_h + index, (largest + tl.log2(total)) * 0.6931471805599453, mask=live)


@triton.jit
@no_type_check
def _gather(k, v, picked, bits, n, end, k_s, v_s, SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
            BLOCK_N: tl.constexpr, LONG: tl.constexpr):  # fmt: skip
    """Load keys and values from key n of a list of blocks on, and the words of their blocks; 0 from block `end` on.

    LONG: offsets need 64 bits. Words are read one by one, since every thread needs those of all blocks, and a compiler
    that knows the columns of a thread has no more than that to do.
    """
    BLOCKS: tl.constexpr = (BLOCK_N + SIZE - 1) // SIZE
    column, d = tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)[None, :]
    entry = (n + column) // SIZE
    block = tl.load(picked + entry, mask=entry < end, other=0).to(tl.int32)
    place = (block * SIZE + (n + column) % SIZE)[:, None]
    if LONG:
        place = place.to(tl.int64)
    if DIM < WIDTH:
        key = tl.load(k + place * k_s + d, mask=d < DIM, other=0.0)
        value = tl.load(v + place * v_s + d, mask=d < DIM, other=0.0)
    else:
        key = tl.load(k + (place * k_s + d))
        value = tl.load(v + (place * v_s + d))
    word = tl.zeros([BLOCK_N], tl.int32)
    for i in tl.static_range(BLOCKS):
        one = tl.load(bits + n // SIZE + i, mask=n // SIZE + i < end, other=0)
        word = tl.where(column // SIZE == i, one, word)
    return key, value, word


@triton.jit
@no_type_check
def _add(query, key, value, word, mine, acc, largest, total, scale, WIDEN: tl.constexpr, PRECISION: tl.constexpr):
    """Return one step of online softmax for the rows of a half, over those of the keys that they chose."""
    score = tl.zeros([query.shape[0], key.shape[0]], tl.float32)
    score = _dot(query, tl.trans(key), score, WIDEN, PRECISION)
    score = tl.where((word[None, :] & mine[:, None]) != 0, score, float("-inf"))
    larger = tl.maximum(largest, tl.max(score, 1) * scale)  # scale > 0
    weight = tl.exp2(score * scale - larger[:, None])  # one instruction for both
    kept = tl.exp2(largest - larger)
    acc = _dot(weight.to(value.dtype), value, acc * kept[:, None], WIDEN, PRECISION)
    return acc, larger, total * kept + tl.sum(weight, 1)


@triton.jit(do_not_specialize=["first", "query_start", "queries", "room", "again"])
@no_type_check
def _far_kernel(
    q, k, v, out, lse, picked, bits, ends, table, first, query_start, queries, room, again, scale,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_t, lse_b, lse_h,
    TILE: tl.constexpr, HALVES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    CHUNK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LONG: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of queries in HEADS of the GROUP heads of a key head; `out` and `lse` hold the near part.

    The query at position p has index p - query_start. Its turn is that of its chunk i, θ (slope · i + start): both
    numbers follow the frequencies in the table. The last tiles, which walk over most blocks, come first. `again` is
    query_start, which the compiler does not know: where rows lie is computed anew at the end, and leaves the loops
    their registers.
    """
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    PART: tl.constexpr = TILE // HALVES
    tile, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2).to(tl.int64)
    group = tl.program_id(1) // PARTS
    list = (b * (tl.num_programs(1) // PARTS) + group) * tl.num_programs(0) + tile
    both = tl.load(ends + 3 * list)
    one = tl.load(ends + 3 * list + 1)
    end = tl.load(ends + 3 * list + 2)
    picked += list * room
    bits += list * room
    q += b * q_b
    k += b * k_b + group.to(tl.int64) * k_h
    v += b * v_b + group.to(tl.int64) * v_h
    out += b * out_b
    lse += b * lse_b

    first += tile * TILE
    pair, partner, sign, pairs = _partner(DIM, WIDTH, PAIRS, INTERLEAVED)
    shift = tl.load(table + PAIRS) * (first // CHUNK).to(tl.float64) + tl.load(table + PAIRS + 1)
    cos, sin = _cos_sin(tl.load(table + pair, mask=pairs, other=0.0) * shift)
    sin *= sign
    at = _rows(first, query_start, queries, PART, 0, GROUP, HEADS, PARTS, BLOCK_M)
    query, acc, largest, total = _begin(
        q, out, lse, at, cos, sin, partner, pairs, q_h, q_t, out_h, out_t, lse_h, DIM, WIDTH
    )
    if HALVES == 1:
        for n in range(0, end * SIZE, BLOCK_N):
            key, value, word = _gather(k, v, picked, bits, n, end, k_s, v_s, SIZE, DIM, WIDTH, BLOCK_N, LONG)
            acc, largest, total = _add(query, key, value, word, at[3], acc, largest, total, scale, WIDEN, PRECISION)
    else:
        at2 = _rows(first, query_start, queries, PART, 1, GROUP, HEADS, PARTS, BLOCK_M)
        query2, acc2, largest2, total2 = _begin(
            q, out, lse, at2, cos, sin, partner, pairs, q_h, q_t, out_h, out_t, lse_h, DIM, WIDTH
        )
        for n in range(0, both * SIZE, BLOCK_N):
            key, value, word = _gather(k, v, picked, bits, n, both, k_s, v_s, SIZE, DIM, WIDTH, BLOCK_N, LONG)
            acc, largest, total = _add(query, key, value, word, at[3], acc, largest, total, scale, WIDEN, PRECISION)
            acc2, largest2, total2 = _add(
                query2, key, value, word, at2[3], acc2, largest2, total2, scale, WIDEN, PRECISION
            )
        for n in range(both * SIZE, one * SIZE, BLOCK_N):
            key, value, word = _gather(k, v, picked, bits, n, one, k_s, v_s, SIZE, DIM, WIDTH, BLOCK_N, LONG)
            acc, largest, total = _add(query, key, value, word, at[3], acc, largest, total, scale, WIDEN, PRECISION)
        for n in range(one * SIZE, end * SIZE, BLOCK_N):
            key, value, word = _gather(k, v, picked, bits, n, end, k_s, v_s, SIZE, DIM, WIDTH, BLOCK_N, LONG)
            acc2, largest2, total2 = _add(
                query2, key, value, word, at2[3], acc2, largest2, total2, scale, WIDEN, PRECISION
            )
        at2 = _rows(first, again, queries, PART, 1, GROUP, HEADS, PARTS, BLOCK_M)
        _end(out, lse, at2, acc2, largest2, total2, out_h, out_t, lse_h, DIM, WIDTH)
    at = _rows(first, again, queries, PART, 0, GROUP, HEADS, PARTS, BLOCK_M)
    _end(out, lse, at, acc, largest, total, out_h, out_t, lse_h, DIM, WIDTH)


_far = Launcher(_far_kernel)
INTERPRETED = _far.interpreted


def most_rows(d: int, size: int) -> int:
    """Return how many rows of d numbers of `size` bytes a program may have."""
    return min(128, TILES // (max(16, _power(d)) * size))


def shape(group: int, d: int, size: int) -> tuple[int, int]:
    """Return how many neighbouring queries choose together, and in how many halves.

    group: heads to a key head. Hopper multiplies 64 rows at a time, and keys come from the L2 cache, which 64 rows keep
    waiting: two halves of 64 rows share what both choose. On an H200 128 rows at once took 1.7 times as
    long (4 heads to a key head).
    """
    if group <= 2:
        return 32, 1
    halved = [queries for queries in (32, 16) if 64 < queries * group <= most_rows(d, size)]
    return (halved[0], 2) if halved else (16, 1)


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
    rows, halves = most_rows(d, q.element_size()), selection.halves
    part = selection.tile // halves
    parts = _cdiv(group, max(1, rows // part))
    heads = _cdiv(group, parts)
    block_m, width = max(16, _power(part * heads)), max(16, _power(d))
    chosen: dict[str, Any] = {"num_warps": 4 if block_m * width <= 8192 else 8, "num_stages": 2} | options
    block_n = chosen.pop("block_n", max(16, min(64, rows // 2)))
    _far(
        q.device,
        (tiles, g * parts, b),
        (
            q, k, v, out, lse, *unions, selection.table, first, query_start, t, room, query_start, scale * LOG2_E,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride()[:2],
        ),
        {
            "TILE": selection.tile, "HALVES": halves, "GROUP": group, "HEADS": heads, "SIZE": selection.choice.size,
            "CHUNK": selection.region.unit,
            "DIM": d, "WIDTH": width, "PAIRS": selection.law.rotary.pairs,
            "INTERLEAVED": selection.law.rotary.interleaved, "BLOCK_M": block_m, "BLOCK_N": block_n,
            "LONG": k.shape[2] * max(k.stride(2), v.stride(2)) >= 2**31, "WIDEN": INTERPRETED, "PRECISION": "tf32x3",
        },
        chosen,
    )  # fmt: skip
