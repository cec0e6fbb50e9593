# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""What the decoding kernels share, with pages (`paged`) and without (`kernel`): the loop over the keys.

The queries of all heads that share a key head are the rows of one tile, so that every key and value is read once. For
one query row a region of a law is an interval of positions. The tiles of all regions, one after the other, are dealt
out evenly to the splits, which compute partial attentions; the last of a tile's splits to finish merges them. Which
keys there are to deal out, and to how many splits, follows from the positions, on the device: the grid depends on the
size of the cache alone.

Memory bound: at head dimension 128 in bf16 a key and its value are 512 bytes.
"""

from __future__ import annotations

import math
from functools import cache
from typing import no_type_check

import torch
import triton
import triton.language as tl

from rpe3d.attention.lowering import Plan

LEAST_KEYS = 256  # of a split: with fewer, merging costs more than it saves
ROW = tl.constexpr(15)  # numbers per region in the table
NEVER = tl.constexpr(2**31 - 1)
LOG2_E = math.log2(math.e)


@triton.jit
@no_type_check
def _band(BANDS: tl.constexpr, R: tl.constexpr, p, start, stop):
    """Return the keys [low, high) of [start, stop) that queries at p see in region R: Region.contains, causally."""
    UNIT: tl.constexpr = BANDS[R][0]
    chunk = (p.to(tl.int32) // UNIT).to(tl.int64)  # positions fit into 32 bits, where division is much cheaper
    low = tl.maximum((chunk - BANDS[R][2]) * UNIT, start)
    if BANDS[R][4] > 0:
        low = tl.maximum(low, BANDS[R][4])
    high = tl.minimum(tl.minimum((chunk - BANDS[R][1] + 1) * UNIT, p + 1), tl.minimum(stop, BANDS[R][3]))
    return low, high


@triton.jit
@no_type_check
def _tile_of(p, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the tile that holds position p; tiles count through the chunks, and none straddles two."""
    p = p.to(tl.int32)
    j = p // CHUNK
    return j * ((CHUNK + BLOCK_N - 1) // BLOCK_N) + (p - j * CHUNK) // BLOCK_N


@triton.jit
@no_type_check
def _tiles(
    BANDS: tl.constexpr, R: tl.constexpr, lowest, highest, start, stop, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return a region's keys [low, high) for queries at lowest .. highest, its first tile, and how many there are."""
    low, _ = _band(BANDS, R, lowest, start, stop)
    _, high = _band(BANDS, R, highest, start, stop)
    first_tile = _tile_of(low, CHUNK, BLOCK_N)
    last_tile = _tile_of(tl.maximum(high - 1, 0), CHUNK, BLOCK_N)
    return low, high, first_tile, tl.where(high > low, last_tile - first_tile + 1, 0)


@triton.jit
@no_type_check
def _query_turn(row, p):
    """Return Turn.position(p) - p less the key's start, and the phase in turns: what no key's chunk changes."""
    chunk = tl.load(row).to(tl.int32)
    j = (p.to(tl.int32) // chunk).to(tl.int64)
    x = tl.minimum(tl.load(row + 1) * (p - j * chunk).to(tl.float64), tl.load(row + 4))
    x += tl.load(row + 2) * j.to(tl.float64) + tl.load(row + 3) - p.to(tl.float64) - tl.load(row + 6)
    phase = tl.load(row + 7) * tl.exp2((-tl.load(row + 8) * j.to(tl.float64)).to(tl.float32)).to(tl.float64)
    return x, phase + tl.load(row + 11)


@triton.jit
@no_type_check
def _fade(row, p):
    """Return Fade.shift of queries at p, the loss in base 2."""
    span = tl.load(row + 14).to(tl.float32)
    beyond = tl.log2(tl.maximum(p.to(tl.float32) / span, 1.0))
    eased = 1.0 - tl.exp2(-tl.load(row + 13).to(tl.float32) * tl.log2(1.0 + beyond / tl.log2(span)))
    return eased, tl.load(row + 12).to(tl.float32) * beyond


@triton.jit
@no_type_check
def _partner(DIM: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return each dimension's pair, the other member of it, the sign of that one's share, and whether it turns."""
    d = tl.arange(0, WIDTH)[None, :]
    if INTERLEAVED:
        return d // 2, d + 1 - 2 * (d % 2), 2.0 * (d % 2) - 1.0, d < 2 * PAIRS
    return d % PAIRS, tl.where(d < PAIRS, d + PAIRS, d - PAIRS), tl.where(d < PAIRS, -1.0, 1.0), d < 2 * PAIRS


@triton.jit
@no_type_check
def _turned(here, there, sign, pairs, theta, x, phase, slope, key_phase, key_rate, j):
    """Return the query rows turned to where their region shows them to key chunk j: by θ (x - slope · j) + phases.

    Angles are float64 until whole turns are dropped. Everything is in registers: the loop over keys waits for this.
    """
    j = j.to(tl.float64)
    phase -= key_phase * tl.exp2((-key_rate * j).to(tl.float32)).to(tl.float64)
    turns = theta * (x - slope * j)[:, None] + phase[:, None]
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    cos = tl.where(pairs, tl.cos(angle), 1.0)
    return (here.to(tl.float32) * cos + there.to(tl.float32) * (tl.sin(angle) * sign)).to(here.dtype)


@triton.jit
@no_type_check
def _dot(a, b, acc, WIDEN: tl.constexpr):
    """Return a b + acc. WIDEN: for Triton's interpreter, which multiplies bf16 as integers; the product is the same."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
@no_type_check
def _finish(out, lse, sinks, head, live, largest, total, acc, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Write the output and the log-sum-exp (natural) of rows, with the sinks in them."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        larger = tl.maximum(largest, sink)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        kept = tl.exp2(largest - safe)
        total = total * kept + tl.exp2(sink - safe)
        acc *= kept[:, None]
        largest = larger
    divisor = tl.where(total == 0.0, 1.0, total)
    log = tl.where(total == 0.0, float("-inf"), largest + tl.log2(divisor))
    d = tl.arange(0, WIDTH)[None, :]
    tl.store(lse, log * 0.6931471805599453, mask=live)
    tl.store(out[:, None] + d, (acc / divisor[:, None]).to(out.dtype.element_ty), mask=live[:, None] & (d < DIM))


@triton.jit
@no_type_check
def _log(largest, total):
    """Return log2 of a sum that is total · 2^largest."""
    return tl.where(total == 0.0, float("-inf"), largest + tl.log2(tl.where(total == 0.0, 1.0, total)))


@triton.jit
@no_type_check
def _if(condition, live):
    """Return `live` where a condition holds for all rows, else nothing; the interpreter knows no `&` of a scalar."""
    return tl.where(condition, live.to(tl.int32), 0) != 0


@triton.jit
@no_type_check
def _leave(parts, logs, at, slot, slots, columns, written, largest, total, acc, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Write a share of rows `at` to a slot: `written` of them."""
    d = tl.arange(0, WIDTH)[None, :]
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(logs + at * columns + slot, _log(largest, total), mask=written)
    place = parts + (at * slots + slot)[:, None] * DIM + d
    tl.store(place, acc / divisor[:, None], mask=written[:, None] & (d < DIM))


@triton.jit
@no_type_check
def _end_of_faded(
    parts, logs, at, splits, begin, share, end, tiles, eased, loss, live, largest, total, acc,
    SPLIT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """After the region that fades, of `tiles`: what its keys weigh; the slot of what follows, and the sums so far.

    Splits leave what they weigh to the merge. The one at the region's end keeps the others' keys in the slot after all
    splits', and leaves the rows' shift after that.
    """
    slot = begin // share
    if SPLIT:
        across = (begin < tiles) & (end > tiles)
        _leave(
            parts, logs, at, slot, splits + 1, splits + 3, _if(across, live), largest, total, acc, DIM, WIDTH
        )  # fmt: skip
        last = tl.maximum(tiles - 1, 0)
        border = (begin <= last) & (last < begin + share)
        logs += at * (splits + 3) + splits
        none = tl.zeros_like(largest)
        tl.store(logs, none - float("inf"), mask=_if(border & ((begin >= tiles) | (end <= tiles)), live))
        tl.store(logs + 1, none + eased, mask=_if(border, live))
        tl.store(logs + 2, none + loss, mask=_if(border, live))
        slot = tl.where(across, splits, slot)
        largest = tl.where(across, float("-inf"), largest)
        total = tl.where(across, 0.0, total)
        acc = tl.where(across, 0.0, acc)
    else:
        largest -= eased * tl.where(total == 0.0, 0.0, _log(largest, total)) + loss
    return slot, largest, total, acc


@triton.jit
@no_type_check
def _merge(
    parts, logs, splits, written, faded, out, lse, out_h, out_t, sinks, first_head, first_of_group, first_row,
    FADES: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of the result from their splits: `written` have a share, the first `faded` one that fades.

    As many splits at a time as registers hold; what other programs wrote is read past the nearest cache.
    """
    STEP: tl.constexpr = max(1, min(16, 8192 // (ROWS * WIDTH)))
    m = first_row + tl.arange(0, ROWS)
    head, t, live = first_of_group + m // QUERIES, m % QUERIES, m < QUERIES * GROUP
    at = (first_head + head) * QUERIES + t
    d = tl.arange(0, WIDTH)[None, None, :]
    slots, columns, shares = splits, splits, written
    if FADES:
        slots, columns, shares = splits + 1, splits + 3, written + 1
        most = tl.full([ROWS], float("-inf"), tl.float32)
        sum = tl.zeros([ROWS], tl.float32)
        for first in range(0, faded, STEP):
            some = first + tl.arange(0, STEP)
            held = live[:, None] & (some < faded)[None, :]
            place = logs + at[:, None] * columns + some[None, :]
            log = tl.load(place, mask=held, other=float("-inf"), cache_modifier=".cg")
            larger = tl.maximum(most, tl.max(log, 1))
            safe = tl.where(larger == float("-inf"), 0.0, larger)
            sum = sum * tl.exp2(most - safe) + tl.sum(tl.exp2(log - safe[:, None]), 1)
            most = larger
        eased = tl.load(logs + at * columns + splits + 1, mask=live, other=0.0, cache_modifier=".cg")
        loss = tl.load(logs + at * columns + splits + 2, mask=live, other=0.0, cache_modifier=".cg")
        loss += eased * tl.where(sum == 0.0, 0.0, _log(most, sum))
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(0, shares, STEP):
        some = first + tl.arange(0, STEP)
        slot = some
        if FADES:
            slot = tl.where(some == written, splits, some)
        held = live[:, None] & (some < shares)[None, :]
        log = logs + at[:, None] * columns + slot[None, :]
        log = tl.load(log, mask=held, other=float("-inf"), cache_modifier=".cg")
        place = (at[:, None] * slots + slot[None, :])[:, :, None] * DIM + d
        part = tl.load(parts + place, mask=held[:, :, None] & (d < DIM), other=0.0, cache_modifier=".cg")
        part = tl.where((log == float("-inf"))[:, :, None], 0.0, part)  # perhaps never written
        if FADES:
            log -= tl.where((some < faded)[None, :], loss[:, None], 0.0)
        larger = tl.maximum(largest, tl.max(log, 1))
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp2(log - safe[:, None])
        kept = tl.exp2(largest - safe)
        total = total * kept + tl.sum(weight, 1)
        acc = acc * kept[:, None] + tl.sum(part * weight[:, :, None], 1)
        largest = larger
    _finish(out + head.to(tl.int64) * out_h + t * out_t, lse + at, sinks, head, live, largest, total, acc, DIM, WIDTH)


@triton.jit
@no_type_check
def _attend(
    q, k, v, pages, out, lse, parts, logs, arrivals, sinks, table, key_mask, key_mask_s,
    p, lowest, highest, start, stop, offset, group, m, head, t, live, splits, least_tiles, scale, softcap,
    q_h, q_t, k_p, k_s, v_p, v_s, out_h, out_t,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, BANDS: tl.constexpr, TURNING: tl.constexpr, FADES: tl.constexpr, CHUNK: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows (queries x heads of a group) at positions p against one split of the keys at start .. stop.

    The key at position x has index x - offset; with `pages` it lies in slot x mod PAGE of page pages[x div PAGE].
    With SPLIT, a split of at least `least_tiles` leaves its share in parts [b, h, t, splits, d] and logs
    [b, h, t, splits], in base 2, counts itself in `arrivals`, one zero per tile of rows, and merges if it is the last,
    which leaves the zero as it was; a split without keys does nothing. Where a region fades, parts have one slot more
    and logs three: see `_end_of_faded`.
    """
    split = tl.program_id(0)
    BLOCKS: tl.constexpr = (QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M
    PER_CHUNK: tl.constexpr = (CHUNK + BLOCK_N - 1) // BLOCK_N  # tiles
    b = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1) // BLOCKS * GROUP

    tiles = 0
    for r in tl.static_range(len(BANDS)):
        _, _, _, count = _tiles(BANDS, r, lowest, highest, start, stop, CHUNK, BLOCK_N)
        tiles += count
    share = tl.maximum(tl.cdiv(tiles, splits), least_tiles)
    begin = split * share
    end = tl.minimum(begin + share, tiles)

    d = tl.arange(0, WIDTH)[None, :]
    column = tl.arange(0, BLOCK_N)
    q += head[:, None].to(tl.int64) * q_h + t[:, None] * q_t
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
        for tile in range(first_tile + tl.maximum(begin - before, 0), first_tile + tl.minimum(end - before, count)):
            j = tile // PER_CHUNK
            within = (tile - j * PER_CHUNK) * BLOCK_N
            position = j.to(tl.int64) * CHUNK + within

            # Rows of the tile, as columns from `position` on: those that exist, and those that a query sees.
            left = tl.maximum(low - position, 0).to(tl.int32)
            right = tl.minimum(high - position, tl.minimum(CHUNK - within, BLOCK_N)).to(tl.int32)
            exist = (column >= left) & (column < right)
            index = position - offset
            if pages is None:
                key_place, value_place = index * k_s + column[:, None] * k_s, index * v_s + column[:, None] * v_s
            else:
                here = position.to(tl.int32) + column
                page = tl.load(pages + here // PAGE, mask=exist, other=0).to(tl.int64)
                cell = here % PAGE
                key_place, value_place = (page * k_p + cell * k_s)[:, None], (page * v_p + cell * v_s)[:, None]
            if key_mask is not None:  # asked for before the keys, which take as long
                mask = tl.load(key_mask + (index + column) * key_mask_s, mask=exist, other=0)
            if (TURNING >> r) & 1:  # noqa: SIM102 (a question to the compiler, then one to the device)
                if j != turned_for:
                    turned = _turned(stock, there, sign, pairs, theta, x, phase, slope, key_phase, key_rate, j)
                    turned_for = j

            rows = exist[:, None] & (d < DIM)
            key = tl.load(k + key_place + d, mask=rows, other=0.0)
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
            if key_mask is not None:
                seen = seen & (mask != 0)[None, :]
            score = tl.where(seen, score, float("-inf"))

            larger = tl.maximum(largest, tl.max(score, 1))
            safe = tl.where(larger == float("-inf"), 0.0, larger)
            weight = tl.exp2(score - safe[:, None])
            kept = tl.exp2(largest - safe)
            total = total * kept + tl.sum(weight, 1)
            value = tl.load(v + value_place + d, mask=rows, other=0.0)
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
        sharing = tl.maximum(tl.cdiv(tiles, share), 1)  # without any keys, the first writes the zeros
        if split < sharing:
            _leave(
                parts, logs, at, slot, splits + FADES, splits + 3 * FADES, _if(begin < tiles, live), largest, total,
                acc, DIM, WIDTH,
            )  # fmt: skip
            tl.debug_barrier()  # all of this program's shares are on their way before it counts itself
            arrivals += tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
            if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == sharing - 1:
                tl.store(arrivals, 0)
                first_row = (tl.program_id(1) % BLOCKS) * BLOCK_M
                _merge(
                    parts, logs, splits, tl.cdiv(tiles, share), tl.cdiv(faded, share), out, lse, out_h, out_t,
                    sinks, b * heads, group * GROUP, first_row, FADES, QUERIES, GROUP, ROWS, DIM, WIDTH,
                )  # fmt: skip
    else:
        out += head.to(tl.int64) * out_h + t * out_t
        _finish(out, lse + at, sinks, head, live, largest, total, acc, DIM, WIDTH)


def _cdiv(n: int, step: int) -> int:
    return -(-n // step)


def _power(n: int) -> int:
    """Return the power of two from n on. Triton's own functions for it take microseconds, several times a step."""
    return 1 << (n - 1).bit_length()


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def split(programs: int, keys: int, processors: int) -> int:
    """Into how many parts the keys of each of `programs` row tiles go: one program per multiprocessor in all.

    On an H200 two smaller programs on each were up to 2 % slower (docs/log.md).
    """
    return max(1, min(processors // programs, _cdiv(keys, LEAST_KEYS)))


def tile(rows: int, width: int, itemsize: int, chunk: int | None) -> dict[str, int]:
    """Blocks and launch options.

    A tile of keys and one of values are 64 KB; three stages keep two pairs of them in shared memory, so that a
    multiprocessor of an H200 has 128 KB on the way from memory, about twice what hides its latency.
    Eight warps where four would spill registers. A tile ends with its chunk, so a short chunk takes a short tile.
    """
    block_m = min(64, max(16, _power(rows)))
    block_n = max(16, min(128, 32768 // (width * itemsize)))
    if chunk is not None:
        block_n = min(block_n, _power(chunk))
    return {
        "block_m": block_m,
        "block_n": block_n,
        "num_warps": 4 if block_m == 16 and itemsize == 2 else 8,
        "num_stages": 3,
    }


def scratch(splits: int, plan: Plan) -> tuple[int, int]:
    """Say how many shares, and how many numbers about them, a row of the result leaves; none where nothing is split."""
    return (splits + plan.fades, splits + 3 * plan.fades) if splits > 1 else (0, 0)
