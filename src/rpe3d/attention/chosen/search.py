# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""How a kernel finds the best blocks of a query among their levels: scores in 16 bits, searched and not sorted.

Blocks are ordered by level, and of level ones by place. A row chooses the `most` best of them: those above a cut.

Of many blocks, most levels are never looked at. Blocks that lie together are a group, and the highest of their levels
is its top. The `most` best blocks lie in the `most` groups with the best tops: these tops are as many blocks, so
whatever is better than the last of them is in one of these groups.

What a search costs is instructions: the counts here are those of compiled kernels (sm_90, docs/log.md).
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

HIGHEST = tl.constexpr(32767)  # of a level: the first blocks, and what is not a number
LOWEST = tl.constexpr(-32768)
TOGETHER = 8
"""Blocks in a group, or as many as divide those of a chunk."""
HELD = 16384
"""Levels of a row that are kept in registers; of longer rows they are read anew in every step of a search."""


@triton.jit
@no_type_check
def _level(score, always, INVERSE_STEP: tl.constexpr):
    """Return a score as a multiple of `Choice.STEP`, cut at ±2; the highest where a block is always chosen."""
    level = tl.minimum(tl.maximum(tl.floor(score * INVERSE_STEP + 0.5), LOWEST), HIGHEST - 1)
    return tl.where((score == score) & (always == 0), level, HIGHEST).to(tl.int16)


@triton.jit
@no_type_check
def _packed_level(score, INVERSE_STEP: tl.constexpr, PTX: tl.constexpr):
    """Return `_level` of scores. PTX: in five instructions each, none of them one of the slow ones that convert.

    Beside 1.5 · 2^23 + 2^15, rounding down is floor, and the last 16 bits are a level above the lowest. What is not a
    number has ones there: the highest.
    """
    if not PTX:
        return _level(score, False, INVERSE_STEP)
    x = tl.maximum(score * INVERSE_STEP + 0.5, LOWEST, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, HIGHEST - 1, propagate_nan=tl.PropagateNan.ALL)
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b;
        add.rm.f32 a, $1, 0f4B408000;
        add.rm.f32 b, $2, 0f4B408000;
        prmt.b32 a, a, b, 0x5410;
        xor.b32 $0, a, 0x80008000; }""",
        "=r,f,f", [x], dtype=tl.int16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
@no_type_check
def _choosable(p, chunk, near, per_chunk):
    """Say how many blocks a query at p may choose from: those of chunks more than `near` before its own."""
    return tl.maximum(p // chunk - near, 0) * per_chunk


@triton.jit
@no_type_check
def _below(level, n, can):
    """Return levels that are 0 where there is no block n as below all: less the sign of a difference, times as much.

    A mask that is kept for so many numbers costs more than all else, since a thread has seven bits for masks. They are
    not loaded as the lowest: where a mask is the same for neighbours, Triton 3.6 gives every other number of 16 bits
    below 0 as -1.
    """
    return level.to(tl.int32) + ((can - 1 - n).to(tl.uint32, bitcast=True) >> 31).to(tl.int32) * (LOWEST - 1)


@triton.jit
@no_type_check
def _row_levels(levels, n, can):
    """Levels of rows for blocks n; below all where there is no such block."""
    return _below(tl.load(levels + n, mask=n < can, other=0), n, can)


@triton.jit
@no_type_check
def _reaching(level, least):
    """Say how many levels of each row reach a least one: the signs of differences, which add up in one instruction."""
    return tl.sum(((least[:, None] - 1 - level).to(tl.uint32, bitcast=True) >> 31).to(tl.int32), 1)


@triton.jit
@no_type_check
def _count(level, levels, n, can, least, tiles, ACROSS: tl.constexpr, TILES: tl.constexpr):
    """Say how many blocks of each row have at least a level; those of the first ACROSS blocks are in `level`."""
    count = _reaching(level, least)
    if TILES > 1:
        for i in range(1, tiles):
            count += _reaching(_row_levels(levels, n + i * ACROSS, can), least)
    return count


@triton.jit
@no_type_check
def _tail(level, can, most, ACROSS: tl.constexpr):
    """Return the level that `most` blocks of a row lie above if levels are normal, and how much lower twice as many do.

    The lowest and the highest level are left out. Sums are of integers, of squares in units of 128: a search begins
    here, and ends where it must. The tail of a normal distribution by formula 26.2.22 of Abramowitz and Stegun.
    """
    x = tl.where((level > LOWEST) & (level < HIGHEST), level, 0)
    number = tl.maximum(tl.minimum(can, ACROSS), 1).to(tl.float32)
    mean = tl.sum(x, 1).to(tl.float32) / number
    x = (x + 64) >> 7
    square = tl.sum(x * x, 1).to(tl.float32) * 16384.0 / number
    deviation = tl.sqrt(tl.maximum(square - mean * mean, 0.0)) + 1.0
    t = tl.sqrt(2.0 * tl.log(tl.maximum(can.to(tl.float32) / most, 1.0)) + 1e-6)
    z = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
    return mean + z * deviation, 0.6931472 * deviation / tl.maximum(z, 0.5)


@triton.jit
@no_type_check
def _cut(level, levels, block, can, end, most, ROWS: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr):
    """Of every row the lowest level that it chooses, and the first block that it chooses of those at that level.

    A row chooses `most` blocks of the first `can`: those above the level, and of those at it the last ones. One that
    has no more to choose from takes all: the lowest. The level is searched for between one that too few blocks
    have and one that enough have: where a normal distribution has it, then by interpolating the logarithm of their
    number, and if that takes long by halving every other time.
    `level` holds those of the first ACROSS blocks; where there are more TILES of them, others are read anew each time.
    block: the numbers of the first ACROSS, all below `end`. They are 0, 1, ... or there is one of TILES.
    """
    searches = can > most
    low = tl.full([ROWS], LOWEST - 1, tl.int32)
    begin = tl.zeros([ROWS], tl.int32)
    if tl.max(can) > most:
        tiles = tl.cdiv(tl.max(can), ACROSS)
        n = tl.arange(0, ACROSS)[None, :]
        high = tl.full([ROWS], HIGHEST + 1, tl.int32)
        enough, few = can, tl.zeros([ROWS], tl.int32)
        guess, width = _tail(level, can, most, ACROSS)
        wanted = tl.log2(most - 0.5)
        over = tl.log2(tl.maximum(can, most).to(tl.float32)) - wanted
        under = tl.zeros([ROWS], tl.float32) + wanted + 1.0
        turn = 0
        while tl.max(tl.where(searches & (enough != most), high - low, 0)) > 1:
            share = tl.where((turn > 6) & (turn % 2 == 1), 0.5, over / (over + under))
            middle = tl.where(turn < 2, guess.to(tl.int32), low + ((high - low).to(tl.float32) * share).to(tl.int32))
            middle = tl.minimum(tl.maximum(middle, low + 1), tl.maximum(high - 1, low + 1))
            count = _count(level, levels, n, can[:, None], middle, tiles, ACROSS, TILES)
            excess = tl.log2(tl.maximum(count.to(tl.float32), 0.5)) - wanted
            guess = middle + width * excess
            open = (high - low > 1) & (enough != most)
            up, down = open & (count >= most), open & (count < most)
            low, enough, over = tl.where(up, middle, low), tl.where(up, count, enough), tl.where(up, excess, over)
            high, few, under = tl.where(down, middle, high), tl.where(down, count, few), tl.where(down, -excess, under)
            turn += 1
        if tl.max(tl.where(searches, enough, 0)) > most:  # blocks are level, and the last of them are chosen
            last = most - few
            while tl.max(end - begin) > 1:
                middle = (begin + end) >> 1
                count = tl.sum(((level == low[:, None]) & (block >= middle[:, None])).to(tl.int32), 1)
                if TILES > 1:
                    for i in range(1, tiles):
                        more = _row_levels(levels, n + i * ACROSS, can[:, None])
                        later = (more == low[:, None]) & (n + i * ACROSS >= middle[:, None])
                        count += tl.sum(later.to(tl.int32), 1)
                open = end - begin > 1
                begin = tl.where(open & (count >= last), middle, begin)
                end = tl.where(open & (count < last), middle, end)
            begin = tl.where(enough > most, begin, 0)
    return tl.where(searches, low, LOWEST), tl.where(searches, begin, 0)


@triton.jit
@no_type_check
def _search(levels, can, most, ROWS: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr):
    """Load the levels of rows and return their `_cut`."""
    n = tl.arange(0, ACROSS)[None, :]
    level = _row_levels(levels, n, can[:, None])
    return _cut(level, levels, n, can, can, most, ROWS, ACROSS, TILES)


@triton.jit
@no_type_check
def _above(level, n, low, begin):
    """Say which of the blocks n of rows lie within a cut. Those that do not exist are below all levels."""
    return level > tl.where(n >= begin[:, None], low[:, None] - 1, low[:, None])
