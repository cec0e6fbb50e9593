# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""What queries look for and what there is to be found, in Triton kernels: means of blocks, turns of keys, and aims."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from rpe3d.attention.chosen.vectors import _cos_sin, _halves, _in_bfloat16, _inverse, _load3, _square


@triton.jit(do_not_specialize=["blocks"])
@no_type_check
def _means_kernel(
    k, means, table, scaling, blocks, k_b, k_h, k_s,
    SIZE: tl.constexpr, LEAD: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M blocks of one key head per program. Equals `Chooser._means` for keys at positions 0, 1, ..."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    group, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    one, two, rest, pairs, others = _halves(DIM, PAIRS, HALF, REST, INTERLEAVED)
    turn = tl.load(table + tl.arange(0, HALF)[None, :], mask=pairs, other=0.0)
    live = (m < blocks)[:, None]
    k += b * k_b + group * k_h
    x = tl.zeros([BLOCK_M, HALF], tl.float32)
    y = tl.zeros([BLOCK_M, HALF], tl.float32)
    z = tl.zeros([BLOCK_M, HALF if ROTATED else REST], tl.float32)
    for i in range(SIZE + LEAD):
        p = m.to(tl.int64) * SIZE + i - LEAD
        u, w, same = _load3(k + p[:, None] * k_s, live & (p >= 0)[:, None], one, two, rest, pairs, others, ROTATED)
        cos, sin = _cos_sin(turn * p.to(tl.float64)[:, None])
        x += u * cos + w * sin  # turned back
        y += w * cos - u * sin
        z += same
    means += ((b * tl.num_programs(1) + group) * blocks + m)[:, None] * DIM
    count = tl.where(m == 0, SIZE, SIZE + LEAD)[:, None].to(tl.float32)
    tl.store(means + one, x * scaling / count, mask=live & pairs)
    tl.store(means + two, y * scaling / count, mask=live & pairs)
    if not ROTATED:
        tl.store(means + rest, z / count, mask=live & others)


@triton.jit
@no_type_check
def _turns_kernel(table, turns, PAIRS: tl.constexpr, HALF: tl.constexpr):
    """Compute cos and sin of what pairs turn by over a distance: one distance per program."""
    i, pair = tl.program_id(0), tl.arange(0, HALF)[None, :]
    cos, sin = _cos_sin(tl.load(table + pair, mask=pair < PAIRS, other=0.0) * i)
    tl.store(turns + 2 * i * HALF + pair, cos)
    tl.store(turns + (2 * i + 1) * HALF + pair, sin)


@triton.jit(do_not_specialize=["first", "rows", "all_rows", "end", "query_start"])
@no_type_check
def _aims_kernel(
    q, k, centre, aims, table, turns, first, rows, all_rows, end, query_start, scaling, decay, asking,
    q_b, q_h, q_t, k_b, k_h, k_s,
    GROUP: tl.constexpr, RECENT: tl.constexpr,
    DIM: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the aims of BLOCK_M queries at positions first, first + 1, ...; the first of q stands at query_start.

    Equals `Chooser.aims`. Σ decay^i R(-(p - i)) k_{p-i} = R(-p) Σ decay^i R(i) k_{p-i}: each key is turned by its
    distance, the same for all rows (`turns`), and the sum by its position. Rows that no query stands at are zeros.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    group, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    p = first + row
    one, two, rest, pairs, others = _halves(DIM, PAIRS, HALF, REST, INTERLEAVED)
    turn = tl.load(table + tl.arange(0, HALF)[None, :], mask=pairs, other=0.0)
    live = (row < rows) & (p >= query_start) & (p < end)
    k += b * k_b + group * k_h
    x = tl.zeros([BLOCK_M, HALF], tl.float32)
    y = tl.zeros([BLOCK_M, HALF], tl.float32)
    z = tl.zeros([BLOCK_M, HALF if ROTATED else REST], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    share = 1.0
    for i in range(RECENT):
        there = live & (p >= i)
        place = k + (p - i).to(tl.int64)[:, None] * k_s
        u, w, same = _load3(place, there[:, None], one, two, rest, pairs, others, ROTATED)
        cos = tl.load(turns + 2 * i * HALF + tl.arange(0, HALF)[None, :])
        sin = tl.load(turns + (2 * i + 1) * HALF + tl.arange(0, HALF)[None, :])
        x += share * (u * cos - w * sin)
        y += share * (w * cos + u * sin)
        z += share * same
        weight += tl.where(there, share, 0.0)
        share *= decay
    cos, sin = _cos_sin(turn * p.to(tl.float64)[:, None])
    cos, sin = cos * scaling, sin * scaling
    x, y = x * cos + y * sin, y * cos - x * sin
    whole = _square(x, y, z, ROTATED)
    centre += (b * tl.num_programs(1) + group) * DIM
    x -= weight[:, None] * tl.load(centre + one, mask=pairs, other=0.0)
    y -= weight[:, None] * tl.load(centre + two, mask=pairs, other=0.0)
    if not ROTATED:
        z -= weight[:, None] * tl.load(centre + rest, mask=others, other=0.0)
    inverse = _inverse(_square(x, y, z, ROTATED), whole)[:, None]

    a = tl.zeros([BLOCK_M, HALF], tl.float32)
    c = tl.zeros([BLOCK_M, HALF], tl.float32)
    e = tl.zeros([BLOCK_M, HALF if ROTATED else REST], tl.float32)
    q += b * q_b + group * GROUP * q_h
    for _ in range(GROUP):
        place = q + (p - query_start).to(tl.int64)[:, None] * q_t
        u, w, same = _load3(place, live[:, None], one, two, rest, pairs, others, ROTATED)
        a += u
        c += w
        e += same
        q += q_h  # head by head, since so many heads of a long text are more than 32 bits count
    a, c = a * cos + c * sin, c * cos - a * sin
    square = _square(a, c, e, ROTATED)
    asked = asking * _inverse(square, square)[:, None]
    aims += ((b * tl.num_programs(1) + group) * all_rows + row).to(tl.int64)[:, None] * DIM
    there = (row < rows)[:, None]
    tl.store(aims + one, _in_bfloat16(x * inverse + a * asked, WIDEN), mask=there & pairs)
    tl.store(aims + two, _in_bfloat16(y * inverse + c * asked, WIDEN), mask=there & pairs)
    if not ROTATED:
        tl.store(aims + rest, _in_bfloat16(z * inverse + e * asked, WIDEN), mask=there & others)
