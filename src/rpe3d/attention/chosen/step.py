# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""A decoding step whose queries choose their far keys, in Triton kernels that read a fraction of a cache.

    centre  the mean of the first keys, if it has changed; not for trusted keys, whose mean is made with the scores
    score   all blocks, by their summaries; those whose keys have changed are made again (`memory`)
    choose  the blocks of every query
    attend  to the near keys and the chosen blocks, split over the machine; the last split to finish merges

Where queries and keys stand is read on the device, and the grid depends on the size of the cache alone: a step can be
captured in a CUDA graph.
"""

from __future__ import annotations

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

from rpe3d.attention.chosen.memory import PRINTED, Memory
from rpe3d.attention.chosen.search import TOGETHER, WIDEST, _choosable, _level, _row_levels, _search
from rpe3d.attention.chosen.select import Selection, _halves, _in_bfloat16, _inverse, _load3, _square
from rpe3d.attention.decode.arrivals import zeros
from rpe3d.attention.decode.kernel import _optional
from rpe3d.attention.decode.loop import LOG2_E, _cdiv, _dot, _finish, _if, _leave, _merge, _partner, _power, _processors
from rpe3d.attention.problem import Problem
from rpe3d.geometry import Law
from rpe3d.rotation.launch import Launcher

_PRINTED = tl.constexpr(PRINTED)
LEAST_KEYS = 64  # of a split
PROGRAMS = 3  # that attend, on each processor: as many as have room for their registers


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
    query_positions, key_starts, query_mask, query_start, key_start, b, t, positions_b, positions_t, mask_b, mask_t
):
    """Return the position of a query (-1: padding), and that of slot 0."""
    p = tl.zeros([], tl.int64) + query_start + t
    if query_positions is not None:
        p = tl.load(query_positions + b * positions_b + t * positions_t).to(tl.int64)
    if query_mask is not None:
        p = tl.where(tl.load(query_mask + b * mask_b + t * mask_t) != 0, p, -1)
    offset = tl.zeros([], tl.int64) + key_start
    if key_starts is not None:
        offset = tl.load(key_starts + b)
    return p, offset


_PLACES = ["query_start", "key_start", "positions_b", "positions_t", "mask_b", "mask_t"]
_TENSORS = ["query_positions", "key_starts", "query_mask"]


@triton.jit
@no_type_check
def _first_mean(
    k, k_s, first, turn, scaling, one, two, rest, pairs, others,
    HALF: tl.constexpr, REST: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Return the mean of the `first` keys, bare of their positions."""
    ROWS: tl.constexpr = 32
    x = tl.zeros([ROWS, HALF], tl.float32)
    y = tl.zeros([ROWS, HALF], tl.float32)
    z = tl.zeros([ROWS, HALF if ROTATED else REST], tl.float32)
    for start in range(0, first, ROWS):
        p = (start + tl.arange(0, ROWS)).to(tl.int64)
        u, w, same = _load3(k + p[:, None] * k_s, (p < first)[:, None], one, two, rest, pairs, others, ROTATED)
        cos, sin = _cos_sin(turn * p.to(tl.float64)[:, None])
        x += u * cos + w * sin
        y += w * cos - u * sin
        if not ROTATED:
            z += same
    x = tl.sum(x, 0)[None, :] * scaling / first
    y = tl.sum(y, 0)[None, :] * scaling / first
    z = tl.zeros_like(x) if ROTATED else tl.sum(z, 0)[None, :] / first
    return x, y, z


@triton.jit
@no_type_check
def _store3(place, x, y, z, live, one, two, rest, pairs, others, ROTATED: tl.constexpr):
    """Write vectors that are three tensors."""
    tl.store(place + one, x, mask=live & pairs)
    tl.store(place + two, y, mask=live & pairs)
    if not ROTATED:
        tl.store(place + rest, z, mask=live & others)


@triton.jit(do_not_specialize=_PLACES, do_not_specialize_on_alignment=_TENSORS)
@no_type_check
def _centre_kernel(
    k, centre, centre_print, table, query_positions, key_starts, query_mask,
    query_start, key_start, positions_b, positions_t, mask_b, mask_t, scaling, first, k_b, k_h, k_s,
    QUERIES: tl.constexpr, CHUNK: tl.constexpr, NEAR: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the mean of the `first` keys of one key head per program, if they are not those it was made of."""
    group, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head = b * tl.num_programs(0) + group
    highest = tl.full([], -1, tl.int64)
    offset = tl.zeros([], tl.int64)
    for t in range(QUERIES):
        p, offset = _where(
            query_positions, key_starts, query_mask, query_start, key_start, b, t,
            positions_b, positions_t, mask_b, mask_t,
        )  # fmt: skip
        highest = tl.maximum(highest, p)
    if highest // CHUNK > NEAR:  # there are far keys, and so all the first ones
        k += b * k_b + group * k_h - offset * k_s  # the key at position p lies at k + p · k_s
        row = tl.arange(0, ROWS)
        print = tl.zeros([], tl.int64)
        for start in range(0, first, ROWS):
            p = (start + row).to(tl.int64)
            print += tl.sum(_print(k + p[:, None] * k_s, (p < first)[:, None], (start + row)[:, None]), 0)
        if print != tl.load(centre_print + head):
            one, two, rest, pairs, others = _halves(DIM, PAIRS, HALF, REST, INTERLEAVED)
            turn = tl.load(table + tl.arange(0, HALF)[None, :], mask=pairs, other=0.0)
            x, y, z = _first_mean(k, k_s, first, turn, scaling, one, two, rest, pairs, others, HALF, REST, ROTATED)
            _store3(centre + head * DIM, x, y, z, True, one, two, rest, pairs, others, ROTATED)
            tl.store(centre_print + head, print)


@triton.jit
@no_type_check
def _asked(
    q, k, p, turn, scaling, asking, log_decay, q_h, k_s, one, two, rest, pairs, others,
    GROUP: tl.constexpr, HEADS: tl.constexpr, RECENT: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Return of a query at p the weighted sum of the last keys, its square, its weight, and the query's share."""
    i = tl.arange(0, RECENT)
    there = (p >= i)[:, None]
    u, w, same = _load3(k + (p - i)[:, None] * k_s, there, one, two, rest, pairs, others, ROTATED)
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
def _summarize(
    rows, k, k_s, m, can, turn, scaling, middle_x, middle_y, middle_z, one, two, rest, pairs, others,
    SIZE: tl.constexpr, LEAD: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, ROTATED: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write the summaries of blocks m, of the first `can`, to `rows`."""
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
    whole = _square(x, y, z, ROTATED)
    x -= middle_x
    y -= middle_y
    if not ROTATED:
        z -= middle_z
    inverse = _inverse(_square(x, y, z, ROTATED), whole)[:, None]
    x, y, z = _in_bfloat16(x * inverse, WIDEN), _in_bfloat16(y * inverse, WIDEN), _in_bfloat16(z * inverse, WIDEN)
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


@triton.jit(do_not_specialize=[*_PLACES, "room"], do_not_specialize_on_alignment=_TENSORS)
@no_type_check
def _score_kernel(
    q, k, levels, highest, summaries, prints, centre, centre_print, room, table, query_positions, key_starts,
    query_mask, query_start, key_start, positions_b, positions_t, mask_b, mask_t, scaling, asking, log_decay, first,
    stride, q_b, q_h, q_t, k_b, k_h, k_s,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, RECENT: tl.constexpr, LEAD: tl.constexpr,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, NEAR: tl.constexpr, ALWAYS: tl.constexpr, TOGETHER: tl.constexpr,
    INVERSE_STEP: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, TRUSTED: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the blocks of one key head, BLOCK_M at a time: their levels for every query, and the highest of a few.

    Every program computes what the queries look for, which spares a launch. With TRUSTED, a print says only that
    something was made: 0. While the mean of the first keys was not, all programs make it, and one keeps it; that it is
    kept, `_choose_kernel` says, when all of them have ended.
    """
    group, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = b * tl.num_programs(1) + group
    can = tl.zeros([], tl.int32)
    p = tl.zeros([], tl.int64)
    offset = tl.zeros([], tl.int64)
    for t in range(QUERIES):
        p, offset = _where(
            query_positions, key_starts, query_mask, query_start, key_start, b, t,
            positions_b, positions_t, mask_b, mask_t,
        )  # fmt: skip
        can = tl.maximum(can, _choosable(p.to(tl.int32), CHUNK, NEAR, CHUNK // SIZE))
    if tl.program_id(0) * BLOCK_M < can:
        one, two, rest, pairs, others = _halves(DIM, PAIRS, HALF, REST, INTERLEAVED)
        turn = tl.load(table + tl.arange(0, HALF)[None, :], mask=pairs, other=0.0)
        made = tl.load(centre_print + head)
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        known = tl.load(prints + head * room + m, mask=m < can, other=0)
        middle = centre + head * DIM
        middle_x, middle_y, middle_z = _load3(middle, True, one, two, rest, pairs, others, ROTATED)
        k += b * k_b + group * k_h - offset * k_s
        q += b * q_b + group * GROUP * q_h
        if QUERIES == 1:
            u, w, same, whole, weight, a, c, e = _asked(
                q, k, p, turn, scaling, asking, log_decay, q_h, k_s, one, two, rest, pairs, others,
                GROUP, HEADS, RECENT, ROTATED,
            )  # fmt: skip
        if TRUSTED:  # noqa: SIM102 (a question to the compiler, then one to the device)
            if made != 0:
                middle_x, middle_y, middle_z = _first_mean(
                    k, k_s, first, turn, scaling, one, two, rest, pairs, others, HALF, REST, ROTATED
                )
                if tl.program_id(0) == 0:
                    _store3(middle, middle_x, middle_y, middle_z, True, one, two, rest, pairs, others, ROTATED)
        if QUERIES == 1:
            u, w, same = _aim(u, w, same, whole, weight, a, c, e, middle_x, middle_y, middle_z, ROTATED, WIDEN)
        for begin in range(tl.program_id(0) * BLOCK_M, can, tl.num_programs(0) * BLOCK_M):
            m = begin + tl.arange(0, BLOCK_M)
            live = m < can
            kept = prints + head * room + m
            rows = summaries + (head * room + m)[:, None] * DIM
            print = tl.zeros([BLOCK_M], tl.int64)
            if not TRUSTED:
                print += made * 31
                STEP: tl.constexpr = min(12, SIZE + LEAD)  # a divisor: SIZE is a power of two, and LEAD its half
                for start in range(0, SIZE + LEAD, STEP):
                    for i in tl.static_range(STEP):
                        at = m.to(tl.int64) * SIZE + start + i - LEAD
                        print += _print(k + at[:, None] * k_s, (live & (at >= 0))[:, None], start + i)
            misfit = tl.where(live & (known != print), 1, 0)
            if tl.max(misfit) > 0:
                SOME: tl.constexpr = 32
                misfits = tl.max(tl.reshape(misfit, [BLOCK_M // SOME, SOME]), 1)
                for i in range(BLOCK_M // SOME):
                    if tl.max(tl.where(tl.arange(0, BLOCK_M // SOME) == i, misfits, 0)) > 0:
                        n = begin + i * SOME + tl.arange(0, SOME)
                        _summarize(
                            summaries + (head * room + n)[:, None] * DIM, k, k_s, n, can, turn, scaling,
                            middle_x, middle_y, middle_z, one, two, rest, pairs, others,
                            SIZE, LEAD, HALF, REST, ROTATED, SOME, WIDEN,
                        )  # fmt: skip
                tl.store(kept, print, mask=live)
                tl.debug_barrier()
            x, y, z = _kept3(rows, live[:, None], one, two, rest, pairs, others, ROTATED)
            ahead = tl.num_programs(0) * BLOCK_M
            known = tl.load(kept + ahead, mask=m + ahead < can, other=0)
            for t in range(QUERIES):
                if QUERIES > 1:
                    p, _ = _where(
                        query_positions, key_starts, query_mask, query_start, key_start, b, t,
                        positions_b, positions_t, mask_b, mask_t,
                    )  # fmt: skip
                    u, w, same, whole, weight, a, c, e = _asked(
                        q + t * q_t, k, p, turn, scaling, asking, log_decay, q_h, k_s, one, two, rest, pairs, others,
                        GROUP, HEADS, RECENT, ROTATED,
                    )  # fmt: skip
                    u, w, same = _aim(u, w, same, whole, weight, a, c, e, middle_x, middle_y, middle_z, ROTATED, WIDEN)
                score = tl.sum(x.to(tl.float32) * u + y.to(tl.float32) * w, 1)
                if not ROTATED:
                    score += tl.sum(z.to(tl.float32) * same, 1)
                level = _level(score, m < ALWAYS, INVERSE_STEP)
                row = head * QUERIES + t
                tl.store(levels + row * stride + m, level, mask=live)
                n = begin // TOGETHER + tl.arange(0, BLOCK_M // TOGETHER)
                level = tl.max(tl.reshape(level.to(tl.int32), [BLOCK_M // TOGETHER, TOGETHER]), 1)
                tl.store(highest + row * (stride // TOGETHER) + n, level.to(tl.int16), mask=n * TOGETHER < can)


@triton.jit
@no_type_check
def _chosen(level, n, can, low, begin):
    """Say which blocks n a row chooses, by what `_search` found."""
    return ((n < can) & ((level > low) | ((level == low) & (n >= begin)))).to(tl.int32)


@triton.jit
@no_type_check
def _few(
    levels, highest, list, can, MOST: tl.constexpr, TOGETHER: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr
):
    """Write to `list` which MOST groups hold all blocks that a row chooses, in order; return how many there are.

    TOGETHER blocks are a group, and `highest` has the highest level of each. Blocks are chosen by level, of those that
    are level the last; let groups be chosen in the same way by their highest level. A block of any other group comes
    after the highest block of each of the chosen ones: after MOST blocks.
    """
    groups = can // TOGETHER
    low, begin = _search(highest + tl.zeros([1, 1], tl.int32), groups + tl.zeros([1], tl.int32), MOST, 1, ACROSS, TILES)
    low, begin = tl.max(low, 0), tl.max(begin, 0)
    count = tl.zeros([], tl.int32)
    for start in range(0, groups, ACROSS):
        n = start + tl.arange(0, ACROSS)
        some = _chosen(_row_levels(highest, n, groups), n, groups, low, begin)
        tl.store(list + count + tl.cumsum(some, 0) - some, n, mask=some != 0)
        count += tl.sum(some, 0)
    tl.debug_barrier()
    return count


@triton.jit(do_not_specialize=_PLACES, do_not_specialize_on_alignment=_TENSORS)
@no_type_check
def _choose_kernel(
    levels, highest, picked, counts, lists, centre_print, query_positions, key_starts, query_mask,
    query_start, key_start, positions_b, positions_t, mask_b, mask_t, stride,
    MOST: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, NEAR: tl.constexpr,
    TOGETHER: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr, WIDE: tl.constexpr, TRUSTED: tl.constexpr,
):  # fmt: skip
    """Compute one query of one key head per program: the blocks that it chooses, in order, and how many.

    WIDE: a power of two, from MOST groups on or from as many as there are.
    """
    t, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = b * tl.num_programs(1) + group
    row = head * QUERIES + t
    p, _ = _where(
        query_positions, key_starts, query_mask, query_start, key_start, b, t, positions_b, positions_t, mask_b, mask_t
    )
    can = _choosable(p.to(tl.int32), CHUNK, NEAR, CHUNK // SIZE)
    levels += row * stride
    lists += row * MOST
    few = _few(levels, highest + row * (stride // TOGETHER), lists, can, MOST, TOGETHER, ACROSS, TILES) * TOGETHER
    n = tl.arange(0, WIDE * TOGETHER)
    block = tl.load(lists + n // TOGETHER, mask=n < few, other=0) * TOGETHER + n % TOGETHER
    places = levels + (block - n)[None, :]
    low, begin = _search(places, few + tl.zeros([1], tl.int32), MOST, 1, WIDE * TOGETHER, 1)
    some = _chosen(_row_levels(levels + (block - n), n, few), n, few, tl.max(low, 0), tl.max(begin, 0))
    tl.store(picked + row * MOST + tl.cumsum(some, 0) - some, block, mask=some != 0)
    tl.store(counts + row, tl.sum(some, 0))
    if TRUSTED:
        tl.store(centre_print + head, tl.zeros([], tl.int64), mask=can > 0)


@triton.jit
@no_type_check
def _online(score, value, largest, total, acc, WIDEN: tl.constexpr):
    """Return one step of online softmax, in base 2; rows may have seen nothing yet."""
    larger = tl.maximum(largest, tl.max(score, 1))
    safe = tl.where(larger == float("-inf"), 0.0, larger)
    weight = tl.exp2(score - safe[:, None])
    kept = tl.exp2(largest - safe)
    return larger, total * kept + tl.sum(weight, 1), _dot(weight.to(value.dtype), value, acc * kept[:, None], WIDEN)


@triton.jit(do_not_specialize=[*_PLACES, "splits"], do_not_specialize_on_alignment=[*_TENSORS, "sinks"])
@no_type_check
def _attend_kernel(
    q, k, v, out, lse, parts, logs, arrivals, sinks, picked, counts, turns, query_positions, key_starts, query_mask,
    query_start, key_start, positions_b, positions_t, mask_b, mask_t, splits, scale,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_t,
    MOST: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    CHUNK: tl.constexpr, NEAR: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the heads of one key head for one query against a split of the blocks it chose and of its near keys.

    A tile of far keys has EACH blocks, and every head as many rows: each is turned as the law shows the query to one of
    them, all keys of a chunk alike, and attends to that one. Near keys are shared out among the rows in the same way.
    So keys go from memory to the product as they are, and the rows are what a product has to have anyway.
    """
    split, group, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, b = query % QUERIES, (query // QUERIES).to(tl.int64)
    p, offset = _where(
        query_positions, key_starts, query_mask, query_start, key_start, b, t, positions_b, positions_t, mask_b, mask_t
    )
    heads = tl.num_programs(1) * GROUP
    row = (b * tl.num_programs(1) + group) * QUERIES + t
    count = tl.load(counts + row)
    count = tl.where(p < 0, 0, count)
    chunk = tl.maximum(p, 0).to(tl.int32) // CHUNK
    low = tl.maximum(chunk - NEAR, 0).to(tl.int64) * CHUNK
    low = tl.maximum(low, offset)
    far_tiles = tl.cdiv(count * SIZE, BLOCK_N)
    tiles = far_tiles + tl.cdiv((p + 1 - low).to(tl.int32), BLOCK_N)
    tiles = tl.where(p < 0, 0, tiles)
    share = tl.maximum(tl.cdiv(tiles, splits), 1)
    begin = split * share
    end = tl.minimum(begin + share, tiles)

    EACH: tl.constexpr = BLOCK_N // SIZE
    PARTS: tl.constexpr = BLOCK_M // HEADS  # EACH, or more where a product has to have more rows
    part, member = tl.arange(0, BLOCK_M) // HEADS, tl.arange(0, BLOCK_M) % HEADS
    live = (member < GROUP)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    pair, partner, sign, pairs = _partner(DIM, WIDTH, PAIRS, INTERLEAVED)
    rows = q + b * q_b + (group * GROUP + member).to(tl.int64)[:, None] * q_h + t * q_t
    stock = tl.load(rows + d, mask=live & (d < DIM), other=0.0)
    across = tl.load(rows + partner, mask=live & pairs, other=0.0).to(tl.float32) * sign
    k += b * k_b + group.to(tl.int64) * k_h - offset * k_s
    v += b * v_b + group.to(tl.int64) * v_h - offset * v_s
    column = tl.arange(0, BLOCK_N)
    own = (column // SIZE)[None, :] == part[:, None]
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)

    picked += row * MOST
    for i in range(begin, tl.minimum(end, far_tiles)):
        entry = i * EACH + column // SIZE
        there = entry < count
        block = tl.load(picked + entry, mask=there, other=0)
        place = (block * SIZE + column % SIZE).to(tl.int64)[:, None]
        key = tl.load(k + place * k_s + d, mask=there[:, None] & (d < DIM), other=0.0)
        value = tl.load(v + place * v_s + d, mask=there[:, None] & (d < DIM), other=0.0)
        entry = i * EACH + part
        block = tl.load(picked + entry, mask=entry < count, other=0)
        turn = turns + (chunk - block * SIZE // CHUNK)[:, None] * (2 * PAIRS) + pair
        cos = tl.load(turn, mask=pairs, other=1.0)
        sin = tl.load(turn + PAIRS, mask=pairs, other=0.0)
        turned = (stock.to(tl.float32) * cos + across * sin).to(stock.dtype)
        score = _dot(turned, tl.trans(key), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), WIDEN)
        score = tl.where(own & there[None, :], score * scale, float("-inf"))
        largest, total, acc = _online(score, value, largest, total, acc, WIDEN)
    for i in range(tl.maximum(begin, far_tiles), end):
        place = low + (i - far_tiles) * BLOCK_N + column
        there = place <= p
        key = tl.load(k + place[:, None] * k_s + d, mask=there[:, None] & (d < DIM), other=0.0)
        value = tl.load(v + place[:, None] * v_s + d, mask=there[:, None] & (d < DIM), other=0.0)
        score = _dot(stock, tl.trans(key), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), WIDEN)
        score = tl.where(own & there[None, :], score * scale, float("-inf"))
        largest, total, acc = _online(score, value, largest, total, acc, WIDEN)

    # The rows of a head become one.
    largests = tl.reshape(largest, [PARTS, HEADS])
    largest = tl.max(largests, 0)
    weight = tl.exp2(largests - tl.where(largest == float("-inf"), 0.0, largest)[None, :])
    total = tl.sum(tl.reshape(total, [PARTS, HEADS]) * weight, 0)
    acc = tl.sum(tl.reshape(acc, [PARTS, HEADS, WIDTH]) * weight[:, :, None], 0)
    member = tl.arange(0, HEADS)
    live = member < GROUP
    head = group * GROUP + member
    at = query * heads + head
    out += b * out_b + t * out_t
    if SPLIT:
        sharing = tl.maximum(tl.cdiv(tiles, share), 1)  # without any keys, the first writes the zeros
        if split < sharing:
            _leave(parts, logs, at, split, splits, splits, _if(begin < tiles, live), largest, total, acc, DIM, WIDTH)
            tl.debug_barrier()  # all of this program's shares are on their way before it counts itself
            arrivals += query * tl.num_programs(1) + group
            if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == sharing - 1:
                tl.store(arrivals, 0)
                _merge(
                    parts, logs, splits, tl.cdiv(tiles, share), 0, out, lse, out_h, out_t, sinks,
                    query * heads, group * GROUP, 0, False, 1, GROUP, HEADS, DIM, WIDTH,
                )  # fmt: skip
    else:
        _finish(out + head.to(tl.int64) * out_h, lse + at, sinks, head, live, largest, total, acc, DIM, WIDTH)


_centre, _score = Launcher(_centre_kernel), Launcher(_score_kernel)
_choose, _attend = Launcher(_choose_kernel), Launcher(_attend_kernel)
INTERPRETED = _centre.interpreted


def wide(blocks: int, heads: int, processors: int) -> int:
    """Return how many blocks a program scores: the more, the less often the aims are computed, but all have work."""
    return next((n for n in (256, 128) if _cdiv(blocks, n) * heads >= processors), 64)


def tile(heads: int, width: int, itemsize: int, size: int) -> int:
    """Return how many keys a program attends to at a time: whole blocks, of which every head has a row each."""
    keys = max(size, 64 if width * itemsize <= 512 else 32)
    while keys > max(16, size) and heads * keys // size > 32:
        keys //= 2
    return keys


def turns(law: Law, chunks: int, device: torch.device) -> Float32[Tensor, "n 2 l"]:
    """Return cos and sin of the turn of a far query towards a key so many chunks before it, for `chunks` at least."""
    n = _power(chunks)

    def make() -> Tensor:
        turn = law.regions[-1].query
        apart = (turn.stride - turn.chunk) * torch.arange(n, dtype=torch.float64) + turn.start
        angle = apart[:, None] * law.frequencies()
        return torch.stack([angle.cos(), angle.sin()], 1).float().to(device)

    made: Tensor = law.kept(("chosen turns", n, device), make)
    return made


class Step:
    """A decoding step: all that is the same for every layer of a model, settled once.

    Made from the vectors of one layer, it takes those of any that have the same shapes, strides and types, each with
    the `Memory` of its own cache; without one, all summaries are made anew.
    """

    reason = "few queries: kernels read the near keys and the blocks that the queries choose"
    remembers = True

    def __init__(self, x: Problem, *, splits: int | None = None, trusted: bool = False) -> None:
        """Settle all but the vectors. trusted: keys that a memory has seen do not change, so nobody looks again."""
        (b, h, t, d), (g, s), device = x.q.shape, x.k.shape[1:3], x.q.device
        self.law, self.shape, self.groups = x.law, (b, h, t, d), g
        selection = Selection(x.law, 16, device)
        choice, chunk = selection.choice, selection.region.unit
        self.most = choice.most
        self.blocks = max(1, selection.choosable(s - 1 if isinstance(x.keys, Tensor) else x.keys[-1]))
        self.stride = _cdiv(self.blocks, 128) * 128
        heads, width = _power(h // g), max(16, _power(d))
        block_n = tile(heads, width, x.k.element_size(), choice.size)
        seen = _cdiv(min(s, chunk * (selection.near + 1) + choice.most * choice.size), max(block_n, LEAST_KEYS))
        self.splits = splits or max(1, min(PROGRAMS * _processors(device) // (b * g * t), seen))

        tensors, strides = _optional(x)
        starts = [y.start if isinstance(y, range) else 0 for y in (x.queries, x.keys)]
        places = (*tensors[:3], *starts, *strides[:4])
        scaling, vectors = 1 / x.law.attention_scaling, selection.vectors(d)
        law = {"SIZE": choice.size, "CHUNK": chunk, "NEAR": selection.near}
        first = min(choice.centre, chunk)
        self.centre = None
        if not trusted:
            self.centre = _centre.bind(
                device,
                (g, b, 1),
                (selection.table, *places, scaling, first, *x.k.stride()[:3]),
                {"QUERIES": t, "CHUNK": chunk, "NEAR": selection.near, **vectors, "ROWS": _power(first)},
                {"num_warps": 4},
            )
        blocks = wide(self.blocks, b * g, _processors(device))
        self.together = math.gcd(TOGETHER, chunk // choice.size)
        self.score = _score.bind(
            device,
            (max(1, min(_cdiv(self.blocks, blocks), 2 * _processors(device) // (b * g))), g, b),
            (
                selection.table, *places, scaling, choice.query, math.log2(choice.decay), first, self.stride,
                *x.q.stride()[:3], *x.k.stride()[:3],
            ),
            {
                "QUERIES": t, "GROUP": h // g, "HEADS": heads, "RECENT": choice.recent, "LEAD": choice.lead, **law,
                "ALWAYS": choice.always, "TOGETHER": self.together, "INVERSE_STEP": 1 / choice.STEP, **vectors,
                "BLOCK_M": blocks, "TRUSTED": trusted, "WIDEN": INTERPRETED,
            },
            {"num_warps": 4} if blocks < 128 else {"num_warps": 8, "maxnreg": 128},  # two on a processor
        )  # fmt: skip
        groups = max(1, self.blocks // self.together)
        across = min(WIDEST, max(256, _power(groups)))
        few = max(_power(min(choice.most, groups)), 256 // self.together)
        self.choose = _choose.bind(
            device,
            (t, g, b),
            (*places, self.stride),
            {
                "MOST": choice.most, "QUERIES": t, **law, "TOGETHER": self.together, "ACROSS": across,
                "TILES": _cdiv(groups, across), "WIDE": few, "TRUSTED": trusted,
            },
            {"num_warps": max(1, min(8, max(across, few * self.together) // 256))},
        )  # fmt: skip
        pairs = x.law.rotary.pairs
        self.attend = _attend.bind(
            device,
            (self.splits, g, b * t),
            (
                turns(x.law, s // chunk + 1, device), *places, self.splits, x.scale * LOG2_E, *x.q.stride()[:3],
                *x.k.stride()[:3], *x.v.stride()[:3], *torch.empty_like(x.q).stride()[:3],
            ),
            {
                "MOST": choice.most, "QUERIES": t, "GROUP": h // g, "HEADS": heads, **law, "WIDTH": width, "DIM": d,
                "PAIRS": pairs, "INTERLEAVED": x.law.rotary.interleaved,
                "BLOCK_M": max(16, heads * block_n // choice.size), "BLOCK_N": block_n, "SPLIT": self.splits > 1,
                "WIDEN": INTERPRETED,
            },
            {"num_warps": 4, "num_stages": 3 if width * x.k.element_size() <= 256 else 2},
        )  # fmt: skip

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp. memory: of these keys' cache."""
        (b, h, t, d), g, device = self.shape, self.groups, q.device
        memory = Memory() if memory is None else memory
        memory.prepare(self.law, k, self.blocks)
        first = memory.centre, memory.centre_print
        if self.centre is not None:
            self.centre(k, *first)
        levels = torch.empty(b, g, t, self.stride, dtype=torch.int16, device=device)
        highest = torch.empty(b, g, t, self.stride // self.together, dtype=torch.int16, device=device)
        self.score(q, k, levels, highest, memory.summaries, memory.prints, *first, memory.summaries.shape[2])
        rows = b * g * t
        chosen = torch.empty(rows * (2 * self.most + 1), dtype=torch.int32, device=device)
        picked, lists, counts = chosen.split((rows * self.most, rows * self.most, rows))
        self.choose(levels, highest, picked, counts, lists, memory.centre_print)
        out = torch.empty_like(q)
        lse = torch.empty(b, t, h, dtype=torch.float32, device=device)
        parts = logs = arrivals = None
        if self.splits > 1:
            shares = b * t * h * self.splits
            parts = torch.empty(shares * (d + 1), dtype=torch.float32, device=device)
            logs, arrivals = parts[shares * d :], zeros(b * t * g, device)
        sinks = None if sinks is None else sinks.contiguous()
        self.attend(q, k, v, out, lse, parts, logs, arrivals, sinks, picked, counts)
        return out, lse.transpose(1, 2)
