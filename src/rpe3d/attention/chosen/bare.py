# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""What the kernels of decoding steps share: where queries and keys stand, means of keys bare of it, summaries and aims.

Keys lie in one piece or in pages: `_at` says where.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from rpe3d.attention.chosen.memory import PRINTED
from rpe3d.attention.chosen.vectors import _in_bfloat16, _inverse, _load3, _square

_PRINTED = tl.constexpr(PRINTED)


@triton.jit
@no_type_check
def _cos_sin(turns):
    """Return cos and sin of so many whole turns, in float64, by the polynomials of Cephes for an eighth of a turn.

    Triton's own are correct for any angle, in so many instructions that a program that runs once waits to read them.
    """
    x = (turns - tl.floor(turns + 0.5)).to(tl.float32)
    n = tl.floor(4.0 * x + 0.5)
    x = (x - 0.25 * n) * 6.283185307179586
    z = x * x
    sin = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x
    cos = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    odd, sign = n * n == 1.0, 1.0 - tl.abs(n)
    return tl.where(odd, -n * sin, sign * cos), tl.where(odd, n * cos, sign * sin)


@triton.jit
@no_type_check
def _at(pages, p, there, k_p, k_s, PAGE: tl.constexpr):
    """Return how far from the first the keys at p lie; with pages, of which k_p is the stride, that of page 0."""
    if PAGE > 0:
        page = tl.load(pages + p.to(tl.int32) // PAGE, mask=there, other=0).to(tl.int64)
        place = page * k_p + (p.to(tl.int32) % PAGE) * k_s
    else:
        place = p * k_s
    return place


@triton.jit
@no_type_check
def _mean(
    k, k_p, k_s, pages, begin, end, turn, scaling, one, two, rest, pairs, others,
    HALF: tl.constexpr, REST: tl.constexpr, ROTATED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Return the mean of the keys at positions begin .. end - 1, bare of their positions."""
    ROWS: tl.constexpr = 32
    x = tl.zeros([ROWS, HALF], tl.float32)
    y = tl.zeros([ROWS, HALF], tl.float32)
    z = tl.zeros([ROWS, HALF if ROTATED else REST], tl.float32)
    for start in range(begin, end, ROWS):
        p = (start + tl.arange(0, ROWS)).to(tl.int64)
        place = _at(pages, p[:, None], p[:, None] < end, k_p, k_s, PAGE)
        u, w, same = _load3(k + place, (p < end)[:, None], one, two, rest, pairs, others, ROTATED)
        cos, sin = _cos_sin(turn * p.to(tl.float64)[:, None])
        x += u * cos + w * sin
        y += w * cos - u * sin
        if not ROTATED:
            z += same
    x = tl.sum(x, 0)[None, :] * scaling / (end - begin)
    y = tl.sum(y, 0)[None, :] * scaling / (end - begin)
    z = tl.zeros_like(x) if ROTATED else tl.sum(z, 0)[None, :] / (end - begin)
    return x, y, z


@triton.jit
@no_type_check
def _store3(place, x, y, z, live, one, two, rest, pairs, others, ROTATED: tl.constexpr):
    """Write vectors that are three tensors."""
    tl.store(place + one, x, mask=live & pairs)
    tl.store(place + two, y, mask=live & pairs)
    if not ROTATED:
        tl.store(place + rest, z, mask=live & others)


@triton.jit
@no_type_check
def _asked(
    q, k, pages, p, turn, scaling, asking, log_decay, q_h, k_p, k_s, one, two, rest, pairs, others,
    GROUP: tl.constexpr, HEADS: tl.constexpr, RECENT: tl.constexpr, ROTATED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Return of a query at p the weighted sum of the last keys, its square, its weight, and the query's share."""
    i = tl.arange(0, RECENT)
    there = (p >= i)[:, None]
    place = _at(pages, (p - i)[:, None], there, k_p, k_s, PAGE)
    u, w, same = _load3(k + place, there, one, two, rest, pairs, others, ROTATED)
    member = tl.arange(0, HEADS)
    rows = q + member.to(tl.int64)[:, None] * q_h
    a, c, e = _load3(rows, (member < GROUP)[:, None], one, two, rest, pairs, others, ROTATED)
    cos, sin = _cos_sin(turn * (p - i).to(tl.float64)[:, None])
    share = tl.where(there, tl.exp2(log_decay * i.to(tl.float32))[:, None], 0.0)
    x = tl.sum((u * cos + w * sin) * share, 0)[None, :] * scaling
    y = tl.sum((w * cos - u * sin) * share, 0)[None, :] * scaling
    a = tl.sum(a, 0)[None, :]
    c = tl.sum(c, 0)[None, :]
    if ROTATED:
        z, e = tl.zeros_like(x), tl.zeros_like(x)
    else:
        z, e = tl.sum(same * share, 0)[None, :], tl.sum(e, 0)[None, :]
    cos, sin = _cos_sin(turn * p.to(tl.float64))
    a, c = (a * cos + c * sin) * scaling, (c * cos - a * sin) * scaling
    square = _square(a, c, e, ROTATED)
    asked = asking * _inverse(square, square)[:, None]
    return x, y, z, _square(x, y, z, ROTATED), tl.sum(tl.sum(share, 1), 0), a * asked, c * asked, e * asked


@triton.jit
@no_type_check
def _aim(
    x, y, z, whole, weight, a, c, e, middle_x, middle_y, middle_z, ROTATED: tl.constexpr, WIDEN: tl.constexpr
):  # fmt: skip
    """Return what a query looks for, from what `_asked` says and the mean of the first keys."""
    x -= weight * middle_x
    y -= weight * middle_y
    if not ROTATED:
        z -= weight * middle_z
    inverse = _inverse(_square(x, y, z, ROTATED), whole)[:, None]
    x = _in_bfloat16(x * inverse + a, WIDEN).to(tl.float32)
    y = _in_bfloat16(y * inverse + c, WIDEN).to(tl.float32)
    return x, y, _in_bfloat16(z * inverse + e, WIDEN).to(tl.float32)


@triton.jit
@no_type_check
def _summary(x, y, z, middle_x, middle_y, middle_z, ROTATED: tl.constexpr, WIDEN: tl.constexpr):
    """Return the summaries of blocks with mean keys x, y and z, from the mean of the first keys."""
    whole = _square(x, y, z, ROTATED)
    x -= middle_x
    y -= middle_y
    if not ROTATED:
        z -= middle_z
    inverse = _inverse(_square(x, y, z, ROTATED), whole)[:, None]
    return _in_bfloat16(x * inverse, WIDEN), _in_bfloat16(y * inverse, WIDEN), _in_bfloat16(z * inverse, WIDEN)


@triton.jit
@no_type_check
def _summarize(
    rows, k, k_s, m, can, turn, scaling, middle_x, middle_y, middle_z, one, two, rest, pairs, others,
    SIZE: tl.constexpr, LEAD: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, ROTATED: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write the summaries of blocks m, of the first `can`, to `rows`. Not for keys in pages."""
    live = m < can
    x = tl.zeros([BLOCK_M, HALF], tl.float32)
    y = tl.zeros([BLOCK_M, HALF], tl.float32)
    z = tl.zeros([BLOCK_M, HALF if ROTATED else REST], tl.float32)
    for i in range(SIZE + LEAD):
        p = m.to(tl.int64) * SIZE + i - LEAD
        there = (live & (p >= 0))[:, None]
        u, w, same = _load3(k + p[:, None] * k_s, there, one, two, rest, pairs, others, ROTATED)
        cos, sin = _cos_sin(turn * p.to(tl.float64)[:, None])
        x += u * cos + w * sin
        y += w * cos - u * sin
        if not ROTATED:
            z += same
    count = tl.where(m == 0, SIZE, SIZE + LEAD)[:, None].to(tl.float32)
    x, y = x * scaling / count, y * scaling / count
    if not ROTATED:
        z /= count
    x, y, z = _summary(x, y, z, middle_x, middle_y, middle_z, ROTATED, WIDEN)
    _store3(rows, x, y, z, live[:, None], one, two, rest, pairs, others, ROTATED)


@triton.jit
@no_type_check
def _kept3(rows, live, one, two, rest, pairs, others, ROTATED: tl.constexpr):
    """Return summaries as three tensors, as they are kept."""
    x = tl.load(rows + one, mask=live & pairs, other=0.0)
    y = tl.load(rows + two, mask=live & pairs, other=0.0)
    z = x
    if not ROTATED:
        z = tl.load(rows + rest, mask=live & others, other=0.0)
    return x, y, z


@triton.jit
@no_type_check
def _print(rows, live, i):
    """Return what key i adds to a print: the bits of its first numbers, times odd numbers that differ by place."""
    x = tl.load(rows + tl.arange(0, _PRINTED)[None, :], mask=live, other=0.0)
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = x.to(tl.int32, bitcast=True)
        bits ^= (bits >> 16) & 0xFFFF  # or two signs that change would be missed: each product changes by 2^31
    place = tl.arange(0, _PRINTED)[None, :] + i * _PRINTED + 1
    one = tl.sum(bits * ((place * 0x2C1B3C6D) | 1), 1)
    two = tl.sum(bits * ((place * 0x297A2D39 + 0x165667B1) | 1), 1)
    return (one.to(tl.int64) << 32) ^ two.to(tl.int64)


@triton.jit
@no_type_check
def _where(
    query_positions, key_starts, query_mask, query_start, key_start, b, t, positions_b, positions_t, mask_b, mask_t,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Return the position of a query (-1: padding), and that of slot 0.

    With pages, `query_positions` says how many tokens there are, of which the query is the last.
    """
    p = tl.zeros([], tl.int64) + query_start + t
    if query_positions is not None:
        p = tl.load(query_positions + b * positions_b + t * positions_t).to(tl.int64)
        if PAGE > 0:
            p -= 1
    if query_mask is not None:
        p = tl.where(tl.load(query_mask + b * mask_b + t * mask_t) != 0, p, -1)
    offset = tl.zeros([], tl.int64) + key_start
    if key_starts is not None:
        offset = tl.load(key_starts + b)
    return p, offset


@triton.jit
@no_type_check
def _kept_centre(centre, pages, place, live, centre_p, group, START: tl.constexpr, EACH: tl.constexpr):
    """Return numbers of the mean of the first keys: `place` // EACH says in which page from START on they are kept."""
    page = tl.load(pages + START + place // EACH, mask=live, other=0).to(tl.int64)
    return tl.load(centre + page * centre_p + group * EACH + place % EACH, mask=live, other=0.0)
