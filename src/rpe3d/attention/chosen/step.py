# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""A decoding step whose queries choose their far keys, in Triton kernels that read a fraction of a cache.

    centre  the mean of the first keys, if it has changed; not for trusted keys, whose mean is made with the scores
    score   all blocks, by their summaries; those whose keys have changed are made again (`memory`)
    choose  the blocks of every query
    attend  to the near keys and the chosen blocks, split over the machine; the last split to finish merges

Where queries and keys stand is read on the device, and the grid depends on the size of the cache alone: a step can be
captured in a CUDA graph. Keys lie in one piece, or in a server's pages, which hold their summaries (`paged`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rpe3d.attention.chosen.bare import (
    _aim,
    _asked,
    _at,
    _kept3,
    _kept_centre,
    _mean,
    _print,
    _store3,
    _summarize,
    _where,
)
from rpe3d.attention.chosen.memory import Memory
from rpe3d.attention.chosen.search import HELD, TOGETHER, _choosable, _level, _row_levels, _search
from rpe3d.attention.chosen.select import Selection
from rpe3d.attention.chosen.sizes import launch, shares, tile, turns, wide
from rpe3d.attention.chosen.vectors import _halves, _load3
from rpe3d.attention.decode.arrivals import zeros
from rpe3d.attention.decode.kernel import _optional
from rpe3d.attention.decode.loop import LOG2_E, _cdiv, _dot, _finish, _if, _leave, _merge, _partner, _power, _processors
from rpe3d.attention.problem import Problem
from rpe3d.geometry import Law
from rpe3d.rotation.launch import Launcher

UNPAGED = {"PAGE": 0, "LATER": 0, "START": 0, "EACH": 1}


_PLACES = ["query_start", "key_start", "positions_b", "positions_t", "mask_b", "mask_t"]
_TENSORS = ["query_positions", "key_starts", "query_mask"]


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
            positions_b, positions_t, mask_b, mask_t, 0,
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
            x, y, z = _mean(
                k, 0, k_s, None, 0, first, turn, scaling, one, two, rest, pairs, others, HALF, REST, ROTATED, 0
            )
            _store3(centre + head * DIM, x, y, z, True, one, two, rest, pairs, others, ROTATED)
            tl.store(centre_print + head, print)


@triton.jit(
    do_not_specialize=[*_PLACES, "room", "pages_b"],
    do_not_specialize_on_alignment=[*_TENSORS, "pages"],
)
@no_type_check
def _score_kernel(
    q, k, levels, highest, summaries, prints, centre, centre_print, room, summary_p, centre_p, pages, pages_b, table,
    query_positions, key_starts, query_mask, query_start, key_start, positions_b, positions_t, mask_b, mask_t,
    scaling, asking, log_decay, first, stride, q_b, q_h, q_t, k_b, k_h, k_s,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, RECENT: tl.constexpr, LEAD: tl.constexpr,
    SIZE: tl.constexpr, CHUNK: tl.constexpr, NEAR: tl.constexpr, ALWAYS: tl.constexpr, TOGETHER: tl.constexpr,
    INVERSE_STEP: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, TRUSTED: tl.constexpr,
    PAGE: tl.constexpr, LATER: tl.constexpr, START: tl.constexpr, EACH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the blocks of one key head, BLOCK_M at a time: their levels for every query, and the highest of a few.

    Every program computes what the queries look for, which spares a launch. With TRUSTED, a print says only that
    something was made: 0. While the mean of the first keys was not, all programs make it, and one keeps it; that it is
    kept, `_choose_kernel` says, when all of them have ended.

    With pages (PAGE tokens each, k_b apart), summaries and the mean of the first keys are kept by page and are taken
    as they are (`paged.Kept`): that of block m with block m + LATER.
    """
    group, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = b * tl.num_programs(1) + group
    can = tl.zeros([], tl.int32)
    p = tl.zeros([], tl.int64)
    offset = tl.zeros([], tl.int64)
    for t in range(QUERIES):
        p, offset = _where(
            query_positions, key_starts, query_mask, query_start, key_start, b, t,
            positions_b, positions_t, mask_b, mask_t, PAGE,
        )  # fmt: skip
        can = tl.maximum(can, _choosable(p.to(tl.int32), CHUNK, NEAR, CHUNK // SIZE))
    if tl.program_id(0) * BLOCK_M < can:
        one, two, rest, pairs, others = _halves(DIM, PAIRS, HALF, REST, INTERLEAVED)
        turn = tl.load(table + tl.arange(0, HALF)[None, :], mask=pairs, other=0.0)
        if PAGE > 0:
            pages += b * pages_b
            k += group * k_h
            middle_x = _kept_centre(centre, pages, one, pairs, centre_p, group, START, EACH)
            middle_y = _kept_centre(centre, pages, two, pairs, centre_p, group, START, EACH)
            middle_z = tl.zeros_like(middle_x)
            if not ROTATED:
                middle_z = _kept_centre(centre, pages, rest, others, centre_p, group, START, EACH)
        else:
            made = tl.load(centre_print + head)
            m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
            known = tl.load(prints + head * room + m, mask=m < can, other=0)
            middle = centre + head * DIM
            middle_x, middle_y, middle_z = _load3(middle, True, one, two, rest, pairs, others, ROTATED)
            k += b * k_b + group * k_h - offset * k_s
        q += b * q_b + group * GROUP * q_h
        if QUERIES == 1:
            u, w, same, whole, weight, a, c, e = _asked(
                q, k, pages, p, turn, scaling, asking, log_decay, q_h, k_b, k_s, one, two, rest, pairs, others,
                GROUP, HEADS, RECENT, ROTATED, PAGE,
            )  # fmt: skip
        if TRUSTED:  # noqa: SIM102 (a question to the compiler, then one to the device)
            if made != 0:
                middle_x, middle_y, middle_z = _mean(
                    k, 0, k_s, None, 0, first, turn, scaling, one, two, rest, pairs, others, HALF, REST, ROTATED, 0
                )
                if tl.program_id(0) == 0:
                    _store3(middle, middle_x, middle_y, middle_z, True, one, two, rest, pairs, others, ROTATED)
        if QUERIES == 1:
            u, w, same = _aim(u, w, same, whole, weight, a, c, e, middle_x, middle_y, middle_z, ROTATED, WIDEN)
        for begin in range(tl.program_id(0) * BLOCK_M, can, tl.num_programs(0) * BLOCK_M):
            m = begin + tl.arange(0, BLOCK_M)
            live = m < can
            if PAGE > 0:
                place = m + LATER
                page = tl.load(pages + place // (PAGE // SIZE), mask=live, other=0).to(tl.int64)
                within = (place % (PAGE // SIZE)) * tl.num_programs(1) + group
                rows = summaries + (page * summary_p + within * DIM)[:, None]
            else:
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
            if PAGE == 0:
                ahead = tl.num_programs(0) * BLOCK_M
                known = tl.load(kept + ahead, mask=m + ahead < can, other=0)
            for t in range(QUERIES):
                if QUERIES > 1:
                    p, _ = _where(
                        query_positions, key_starts, query_mask, query_start, key_start, b, t,
                        positions_b, positions_t, mask_b, mask_t, PAGE,
                    )  # fmt: skip
                    u, w, same, whole, weight, a, c, e = _asked(
                        q + t * q_t, k, pages, p, turn, scaling, asking, log_decay, q_h, k_b, k_s, one, two, rest,
                        pairs, others, GROUP, HEADS, RECENT, ROTATED, PAGE,
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
    PAGE: tl.constexpr,
):  # fmt: skip
    """Compute one query of one key head per program: the blocks that it chooses, in order, and how many.

    WIDE: a power of two, from MOST groups on or from as many as there are.
    """
    t, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = b * tl.num_programs(1) + group
    row = head * QUERIES + t
    p, _ = _where(
        query_positions, key_starts, query_mask, query_start, key_start, b, t, positions_b, positions_t, mask_b, mask_t,
        PAGE,
    )  # fmt: skip
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


@triton.jit(
    do_not_specialize=[*_PLACES, "splits", "pages_b"],
    do_not_specialize_on_alignment=[*_TENSORS, "sinks", "pages"],
)
@no_type_check
def _attend_kernel(
    q, k, v, out, lse, parts, logs, arrivals, sinks, picked, counts, pages, pages_b, turns, query_positions,
    key_starts, query_mask,
    query_start, key_start, positions_b, positions_t, mask_b, mask_t, splits, scale,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_t,
    MOST: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    CHUNK: tl.constexpr, NEAR: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the heads of one key head for one query against a split of the blocks it chose and of its near keys.

    A tile of far keys has EACH blocks, and every head as many rows: each is turned as the law shows the query to one of
    them, all keys of a chunk alike, and attends to that one. Near keys are shared out among the rows in the same way.
    So keys go from memory to the product as they are, and the rows are what a product has to have anyway.
    """
    split, group, query = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, b = query % QUERIES, (query // QUERIES).to(tl.int64)
    p, offset = _where(
        query_positions, key_starts, query_mask, query_start, key_start, b, t, positions_b, positions_t, mask_b, mask_t,
        PAGE,
    )  # fmt: skip
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
    if PAGE > 0:
        pages += b * pages_b
        k += group.to(tl.int64) * k_h
        v += group.to(tl.int64) * v_h
    else:
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
        key_place = _at(pages, place, there[:, None], k_b, k_s, PAGE)
        key = tl.load(k + key_place + d, mask=there[:, None] & (d < DIM), other=0.0)
        value_place = _at(pages, place, there[:, None], v_b, v_s, PAGE)
        value = tl.load(v + value_place + d, mask=there[:, None] & (d < DIM), other=0.0)
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
        key_place = _at(pages, place[:, None], there[:, None], k_b, k_s, PAGE)
        key = tl.load(k + key_place + d, mask=there[:, None] & (d < DIM), other=0.0)
        value_place = _at(pages, place[:, None], there[:, None], v_b, v_s, PAGE)
        value = tl.load(v + value_place + d, mask=there[:, None] & (d < DIM), other=0.0)
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


class Launches:
    """The three launches of a step, bound for vectors like the given ones, and the room that they need.

    keys: how many there are at most. places: where queries and keys stand, as the kernels take it; for keys in pages
    `paged` has the constants of the kernels, and the first of the places is still to come.
    """

    def __init__(
        self,
        law: Law,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        places: tuple[Any, ...],
        *,
        groups: int,
        keys: int,
        scale: float,
        splits: int | None = None,
        trusted: bool = False,
        paged: dict[str, int] | None = None,
        waves: int = 2,
    ) -> None:
        (b, h, t, d), g, device = q.shape, groups, q.device
        selection = Selection(law, 16, device)
        choice, chunk, processors = selection.choice, selection.region.unit, _processors(device)
        self.most = choice.most
        self.blocks = max(1, selection.choosable(keys - 1))
        self.stride = _cdiv(self.blocks, 128) * 128
        heads, width = _power(h // g), max(16, _power(d))
        block_n = tile(heads, width, k.element_size(), choice.size)
        self.splits = splits or shares(law, b * g * t, keys, block_n, processors)
        vectors = selection.vectors(d)
        given = {"SIZE": choice.size, "CHUNK": chunk, "NEAR": selection.near}
        page = {"PAGE": 0 if paged is None else paged["PAGE"]}
        first = min(choice.centre, chunk)
        blocks = wide(self.blocks, b * g, processors)
        self.together = math.gcd(TOGETHER, chunk // choice.size)
        self.table, self.turns = selection.table, turns(law, keys // chunk + 1, device)
        self.score = _score.bind(
            device,
            (max(1, min(_cdiv(self.blocks, blocks), waves * processors // (b * g))), g, b),
            (
                *(() if paged else (None, None, None, None, self.table)), *places, 1 / law.attention_scaling,
                choice.query, math.log2(choice.decay), first, self.stride, *q.stride()[:3], *k.stride()[:3],
            ),
            {
                "QUERIES": t, "GROUP": h // g, "HEADS": heads, "RECENT": choice.recent, "LEAD": choice.lead, **given,
                "ALWAYS": choice.always, "TOGETHER": self.together, "INVERSE_STEP": 1 / choice.STEP, **vectors,
                "BLOCK_M": blocks, "TRUSTED": trusted, **(paged or UNPAGED), "WIDEN": INTERPRETED,
            },
            {"num_warps": 4} if blocks < 128 else {"num_warps": 8, "maxnreg": 128},  # two on a processor
        )  # fmt: skip
        groups = max(1, self.blocks // self.together)
        across = min(HELD, max(256, _power(groups)))
        few = max(_power(min(choice.most, groups)), 256 // self.together)
        self.choose = _choose.bind(
            device,
            (t, g, b),
            (*places, self.stride),
            {
                "MOST": choice.most, "QUERIES": t, **given, "TOGETHER": self.together, "ACROSS": across,
                "TILES": _cdiv(groups, across), "WIDE": few, "TRUSTED": trusted, **page,
            },
            {"num_warps": max(1, min(8, max(across, few * self.together) // 256))},
        )  # fmt: skip
        self.attend = _attend.bind(
            device,
            (self.splits, g, b * t),
            (
                *(() if paged else (None, None, self.turns)), *places, self.splits, scale * LOG2_E, *q.stride()[:3],
                *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            ),
            {
                "MOST": choice.most, "QUERIES": t, "GROUP": h // g, "HEADS": heads, **given, "WIDTH": width, "DIM": d,
                "PAIRS": law.rotary.pairs, "INTERLEAVED": law.rotary.interleaved,
                "BLOCK_M": max(16, heads * block_n // choice.size), "BLOCK_N": block_n, "SPLIT": self.splits > 1,
                **page, "WIDEN": INTERPRETED,
            },
            launch(max(16, heads * block_n // choice.size), width * k.element_size(), paged is not None),
        )  # fmt: skip


class Room(NamedTuple):
    """What the launches of a step leave each other, and the log-sum-exp [b, t, h]."""

    levels: Tensor
    highest: Tensor
    picked: Tensor
    lists: Tensor
    counts: Tensor
    lse: Tensor
    parts: Tensor | None
    logs: Tensor | None
    arrivals: Tensor | None


class Step:
    """A decoding step: all that is the same for every layer of a model, settled once.

    Made from the vectors of one layer, it takes those of any that have the same shapes, strides and types, each with
    the `Memory` of its own cache; without one, all summaries are made anew.
    """

    reason = "few queries: kernels read the near keys and the blocks that the queries choose"
    remembers = True

    def __init__(self, x: Problem, *, splits: int | None = None, trusted: bool = False) -> None:
        """Settle all but the vectors. trusted: keys that a memory has seen do not change, so nobody looks again."""
        (b, _, t, d), (g, s), device = x.q.shape, x.k.shape[1:3], x.q.device
        self.law, self.shape, self.groups, self.device = x.law, x.q.shape, g, device
        self.kept: Room | None = None
        tensors, strides = _optional(x)
        starts = [y.start if isinstance(y, range) else 0 for y in (x.queries, x.keys)]
        places = (*tensors[:3], *starts, *strides[:4])
        keys = s if isinstance(x.keys, Tensor) else x.keys.stop
        out = torch.empty_like(x.q)
        self.made = Launches(
            x.law, x.q, x.k, x.v, out, places, groups=g, keys=keys, scale=x.scale, splits=splits, trusted=trusted
        )
        self.centre = None
        if not trusted:
            selection = Selection(x.law, 16, device)
            chunk = selection.region.unit
            first = min(selection.choice.centre, chunk)
            self.centre = _centre.bind(
                device,
                (g, b, 1),
                (selection.table, *places, 1 / x.law.attention_scaling, first, *x.k.stride()[:3]),
                {"QUERIES": t, "CHUNK": chunk, "NEAR": selection.near, **selection.vectors(d), "ROWS": _power(first)},
                {"num_warps": 4},
            )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp. memory: of these keys' cache."""
        room = self._room(zeros)
        return self._run(q, k, v, sinks, memory, room), room.lse.transpose(1, 2)

    def output(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, memory: Memory | None = None) -> Tensor:
        """Return the output alone, for layers that run one after the other: they share all other room.

        Not for launches that are captured in a CUDA graph, which may outlive this step.
        """
        if self.kept is None:  # with counters that nobody else has
            self.kept = self._room(lambda n, device: torch.zeros(n, dtype=torch.int32, device=device))
        return self._run(q, k, v, sinks, memory, self.kept)

    def _room(self, counters: Callable[[int, torch.device], Tensor]) -> Room:
        """Return room for what a step finds on its way, and for its log-sum-exp."""
        (b, h, t, d), g, made, device = self.shape, self.groups, self.made, self.device
        rows, levels = b * g * t, b * g * t * made.stride
        levelled = torch.empty(levels + levels // made.together, dtype=torch.int16, device=device)
        chosen = torch.empty(rows * (2 * made.most + 1), dtype=torch.int32, device=device)
        lse = torch.empty(b, t, h, dtype=torch.float32, device=device)
        parts = logs = arrivals = None
        if made.splits > 1:
            shares = b * t * h * made.splits
            parts = torch.empty(shares * (d + 1), dtype=torch.float32, device=device)
            logs, arrivals = parts[shares * d :], counters(b * t * g, device)
        picked, lists, counts = chosen.split((rows * made.most, rows * made.most, rows))
        return Room(levelled[:levels], levelled[levels:], picked, lists, counts, lse, parts, logs, arrivals)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, memory: Memory | None, room: Room) -> Tensor:
        memory, made = Memory() if memory is None else memory, self.made
        memory.prepare(self.law, k, made.blocks)
        first = memory.centre, memory.centre_print
        if self.centre is not None:
            self.centre(k, *first)
        summaries = memory.summaries
        made.score(q, k, room.levels, room.highest, summaries, memory.prints, *first, summaries.shape[2])
        made.choose(room.levels, room.highest, room.picked, room.counts, room.lists, memory.centre_print)
        out = torch.empty_like(q)
        shared = room.lse, room.parts, room.logs, room.arrivals
        sinks = None if sinks is None else sinks.contiguous()
        made.attend(q, k, v, out, *shared, sinks, room.picked, room.counts)
        return out
