# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""Which far blocks the queries of a prompt choose: `Choice`, in five Triton kernels.

    means   the mean key of every block, bare of its position (in `aims`)
    aims    what every query looks for (there as well)
    levels  scores of all blocks for all queries, one product on tensor cores, as 16-bit multiples of `Choice.STEP`; and
            the highest of every few blocks that lie together, its top
    marks   a bit for every query and every block that it chooses: bisection, so that no row is sorted
    unions  of every tile of queries the blocks that any of them chooses, and the bits of those that do

A tile of queries lies within a chunk, so all of them may choose from the same blocks. `search` has the bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import BFloat16, Float32, Float64, Int, Int32
from torch import Tensor

from rpe3d.attention.chooser import direction
from rpe3d.attention.chosen.aims import _aims_kernel, _means_kernel, _turns_kernel
from rpe3d.attention.chosen.search import (
    HELD,
    TOGETHER,
    _above,
    _below,
    _choosable,
    _cut,
    _packed_level,
    _row_levels,
)
from rpe3d.attention.decode.loop import _cdiv, _power
from rpe3d.attention.prefill.kernel import _dot
from rpe3d.geometry import Law
from rpe3d.geometry.region import Choice
from rpe3d.rotation.launch import Launcher

# What follows was counted in compiled code, not timed; `benchmarks/chosen.py --parts variants` times it.
DIRECT = 2048
"""Blocks of a row that are searched as they are; of more, first the tops of groups, then `most` groups."""
PER_WARP = 2048
"""Levels that a warp searches: each of several warps would spend on a step what one does, but for the levels."""
REGISTERS = 168
"""Of a thread that searches, at most: twelve warps to a processor."""
ROWS = 128
"""Rows of a program that computes levels: with 64, twice as much is read for each level."""
COLUMNS = 64
"""Blocks that it takes at a time: with 128, one program fills a processor, and nothing runs beside its products."""
SPAN = 512
"""Blocks of a program that computes levels, at most."""
PROGRAMS = 1024
"""That compute levels, at least, before one of them has more than COLUMNS blocks."""
WORDS = 2048
"""Blocks of a tile that are united at a time: a launch has few tiles of a long text, and waits for the slowest."""
STAGES = 3
"""Of the loop that computes levels: how many summaries are on their way."""


@triton.jit(do_not_specialize=["first", "rows", "blocks", "row_start", "all_rows"])
@no_type_check
def _levels_kernel(
    aims, summaries, levels, tops, first, rows, blocks, row_start, stride, span, chunk, near, per_chunk, all_rows,
    all_blocks,
    DIM: tl.constexpr, WIDTH: tl.constexpr, INVERSE_STEP: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the levels of `span` blocks for BLOCK_M rows, BLOCK_N at a time, and the highest of every GROUP of them.

    Nothing is written where none of these rows may choose any of those blocks. Row 0 is row `row_start` of the aims.
    """
    across = tl.cdiv(blocks, span)
    top_row, left = tl.program_id(0) // across * BLOCK_M, tl.program_id(0) % across * span
    last = first + tl.minimum(top_row + BLOCK_M, rows) - 1
    right = tl.minimum(left + span, _choosable(last, chunk, near, per_chunk))
    if left < right:
        # Where the rows begin is one number; what lies within them needs 32 bits alone, and few registers.
        head = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        r, d = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, WIDTH)[None, :]
        live = r < rows - top_row
        aims += (head * all_rows + row_start + top_row) * DIM
        aim = tl.load(aims + r * DIM + d, mask=live & (d < DIM), other=0.0)
        summaries += head * all_blocks * DIM
        levels += (head * rows + top_row) * stride
        tops += (head * rows + top_row) * (stride // GROUP)
        for start in tl.range(left, right, BLOCK_N, num_stages=STAGES):
            c = start + tl.arange(0, BLOCK_N)
            there = (c < blocks)[:, None] & (d < DIM)
            summary = tl.load(summaries + c[:, None] * DIM + d, mask=there, other=0.0)
            score = _dot(aim, tl.trans(summary), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), WIDEN, "ieee")
            level = _packed_level(score, INVERSE_STEP, PTX)
            tl.store(levels + (r * stride + c[None, :]), level, mask=live)  # a row has room for whole tiles
            if GROUP > 1:
                top = tl.max(tl.reshape(level.to(tl.int32), [BLOCK_M, BLOCK_N // GROUP, GROUP]), 2).to(tl.int16)
                g = start // GROUP + tl.arange(0, BLOCK_N // GROUP)[None, :]
                tl.store(tops + (r * (stride // GROUP) + g), top, mask=live)


@triton.jit
@no_type_check
def _list(lists, count, n, some, ROWS: tl.constexpr, ACROSS: tl.constexpr, THREADS: tl.constexpr):
    """Append some of the numbers n to the list of each row, in any order; return how many it has then.

    Of THREADS numbers each is another thread's, which counts its own: threads then add up once, not for all numbers.
    """
    some = tl.reshape(some.to(tl.int32), [ROWS, ACROSS // THREADS, THREADS])
    each = tl.sum(some, 1)
    place = (count[:, None] + tl.cumsum(each, 1) - each - 1)[:, None, :] + tl.cumsum(some, 1)
    n = tl.broadcast_to(tl.reshape(n, [1, ACROSS // THREADS, THREADS]), some.shape)
    tl.store(lists[:, :, None] + place, n, mask=some != 0)
    return count + tl.sum(each, 1)


@triton.jit(do_not_specialize=["first", "rows", "tops_stride", "query_start", "end"])
@no_type_check
def _marks_kernel(
    levels, tops, groups, words, first, rows, stride, tops_stride, query_start, end, most, chunk, near, per_chunk,
    TILE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr, TILES: tl.constexpr,
    ROOM: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Mark the blocks that ROWS rows choose: bit r of a tile's word of a block where its row r chooses it.

    Of more than `most` groups of blocks it looks at those with the best tops alone, whose numbers it keeps in `groups`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    p = first + row
    live = (row < rows) & (p >= query_start) & (p < end)
    can = tl.where(live, _choosable(p, chunk, near, per_chunk), 0)
    at = (head * rows + row).to(tl.int64)
    levels += at[:, None] * stride
    words += (head * tl.cdiv(rows, TILE) + row // TILE)[:, None] * stride
    bit = (tl.full([ROWS], 1, tl.int64) << (row % TILE)).to(tl.int32)[:, None]
    n = tl.arange(0, ACROSS)[None, :]
    if GROUP == 1:
        level = _row_levels(levels, n, can[:, None])
        low, begin = _cut(level, levels, n, can, can, most, ROWS, ACROSS, TILES)
        some = _above(level, n, low, begin)
        tl.atomic_or(words + n, tl.broadcast_to(bit, some.shape), mask=some, sem="relaxed")
        if TILES > 1:
            for start in range(ACROSS, tl.max(can), ACROSS):
                level = _row_levels(levels, start + n, can[:, None])
                some = _above(level, start + n, low, begin)
                tl.atomic_or(words + start + n, tl.broadcast_to(bit, some.shape), mask=some, sem="relaxed")
    else:
        tops += at[:, None] * tops_stride
        groups += at[:, None] * ROOM
        whole = can // GROUP
        # As `_row_levels`, with one address for all levels of a thread.
        thread, step = tl.arange(0, THREADS)[None, None, :], THREADS * tl.arange(0, ACROSS // THREADS)[None, :, None]
        left = whole[:, None, None] - thread
        level = tl.load((tops[:, :, None] + thread) + step, mask=step < left, other=0)
        level = tl.reshape(_below(level, step, left), [ROWS, ACROSS])
        low, begin = _cut(level, tops, n, whole, whole, most, ROWS, ACROSS, TILES)
        count = tl.zeros([ROWS], tl.int32)
        count = _list(groups, count, n, _above(level, n, low, begin), ROWS, ACROSS, THREADS)
        if TILES > 1:
            for start in range(ACROSS, tl.max(whole), ACROSS):
                m = start + n
                some = _above(_row_levels(tops, m, whole[:, None]), m, low, begin)
                count = _list(groups, count, m, some, ROWS, ACROSS, THREADS)
        tl.debug_barrier()  # what other threads have written is read now
        slot = tl.arange(0, ROOM)[None, :]
        there = slot < count[:, None]
        group = tl.load(groups + slot, mask=there, other=0)
        block = group[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
        level = tl.load(levels[:, :, None] + block, mask=there[:, :, None], other=0)
        level = tl.reshape(_below(level, slot[:, :, None], count[:, None, None]), [ROWS, ROOM * GROUP])
        block = tl.reshape(block, [ROWS, ROOM * GROUP])
        low, begin = _cut(level, levels, block, count * GROUP, can, most, ROWS, ROOM * GROUP, 1)
        some = _above(level, block, low, begin)
        tl.atomic_or(words + block, tl.broadcast_to(bit, some.shape), mask=some, sem="relaxed")


@triton.jit(do_not_specialize=["first", "first_tile", "tiles", "room"])
@no_type_check
def _unions_kernel(
    words, picked, bits, ends, first, first_tile, stride, chunk, near, per_chunk, tiles, room,
    TILE: tl.constexpr, HALVES: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Compute TILE queries per program: the blocks that any of them chooses, with bit r where row r does.

    Blocks that both halves of a tile choose come first, then those of the first half alone, then those of the second;
    each of the three in order. They are written as tile `first_tile` and those after it, of `tiles` that there are.
    Words are all zero afterwards, as the next rows need them.
    """
    LOW: tl.constexpr = (1 << TILE // HALVES) - 1 if HALVES == 2 else 0
    tile = tl.program_id(0)
    head = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    can = _choosable(first + tile * TILE, chunk, near, per_chunk)  # the same for all, since a tile lies in a chunk
    words += (head * tl.num_programs(0) + tile) * stride
    place = head * tiles + first_tile + tile
    picked += place * room
    bits += place * room
    both, shared, lower = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    if HALVES == 2:
        for start in range(0, can, ACROSS):
            n = start + tl.arange(0, ACROSS)
            word = tl.load(words + n, mask=n < can, other=0)
            lower += tl.sum(((word & LOW) != 0).to(tl.int32), 0)
            shared += tl.sum((((word & LOW) != 0) & ((word & ~LOW) != 0)).to(tl.int32), 0)
    one, two = shared, lower  # where each of the three begins
    tl.store(ends + 3 * place, one)
    tl.store(ends + 3 * place + 1, two)
    for start in range(0, can, ACROSS):
        n = start + tl.arange(0, ACROSS)
        word = tl.load(words + n, mask=n < can, other=0)
        if HALVES == 2:
            # Three counts in one number: of both halves, of the first alone, of the second alone.
            kind = tl.where((word & LOW) == 0, 40, tl.where((word & ~LOW) == 0, 20, 0))
            each = (word != 0).to(tl.int64) << kind
            begin = tl.where(kind == 0, both, tl.where(kind == 20, one, two))
            entry = begin + ((tl.cumsum(each, 0) >> kind) & 0xFFFFF).to(tl.int32) - 1
            total = tl.sum(each, 0)
            both += (total & 0xFFFFF).to(tl.int32)
            one += ((total >> 20) & 0xFFFFF).to(tl.int32)
            two += (total >> 40).to(tl.int32)
        else:
            some = (word != 0).to(tl.int32)
            entry = two + tl.cumsum(some, 0) - 1
            two += tl.sum(some, 0)
        tl.store(picked + entry, n.to(picked.dtype.element_ty), mask=word != 0)
        tl.store(bits + entry, word, mask=word != 0)
        tl.store(words + n, tl.zeros_like(word), mask=word != 0)
    tl.store(ends + 3 * place + 2, two)


_means, _turns, _aims = Launcher(_means_kernel), Launcher(_turns_kernel), Launcher(_aims_kernel)
_levels, _marks, _unions = Launcher(_levels_kernel), Launcher(_marks_kernel), Launcher(_unions_kernel)
INTERPRETED = _means.interpreted


def _table(law: Law) -> Float64[Tensor, " n"]:
    """Return θ_l / 2π, and slope and start of the far queries' turn: x(p) - p = slope · (p div chunk) + start.

    In float64, because a kernel's own scalars are float32, whose steps at position 1,000,000 are 0.06.
    """
    turn = law.regions[-1].query
    shift = torch.tensor([turn.stride - turn.chunk, turn.start], dtype=torch.float64)
    return torch.cat([law.frequencies() / (2 * torch.pi), shift])


class Unions(NamedTuple):
    """Of every tile of queries: the blocks that some of them choose, a bit for each row that does, and where they end.

    Ends are those of the blocks that both halves choose, of those that the first half chooses, and of all.
    """

    picked: Int[Tensor, "b g tiles room"]
    bits: Int32[Tensor, "b g tiles room"]
    ends: Int32[Tensor, "b g tiles 3"]


Work: TypeAlias = Sequence[tuple[range, Sequence[range]]]
"""Positions of queries that have room for their aims, in order, each with its pieces that have room for scores."""


class Selection:
    """A law's region with a choice, as its kernels see it; `tile` queries choose at a time, all of one chunk."""

    def __init__(self, law: Law, tile: int, device: torch.device, halves: int = 1) -> None:
        self.law, self.tile, self.halves = law, tile, halves
        self.region = law.regions[-1]
        self.table: Float64[Tensor, " n"] = law.kept(("chosen", device), lambda: _table(law).to(device))

    @property
    def choice(self) -> Choice:
        """Return the region's choice."""
        assert self.region.choice is not None
        return self.region.choice

    @property
    def near(self) -> int:
        """Return how many chunks before its own a query does not choose from."""
        assert self.region.first is not None
        return self.region.first - 1

    def choosable(self, position: int) -> int:
        """Return how many blocks a query at a position may choose from."""
        return max(0, position // self.region.unit - self.near) * self._per_chunk

    @property
    def _per_chunk(self) -> int:
        return self.region.unit // self.choice.size

    @property
    def _bands(self) -> tuple[int, int, int]:
        return self.region.unit, self.near, self._per_chunk

    def vectors(self, dim: int) -> dict[str, Any]:
        """Return what kernels are compiled for of vectors with so many dimensions."""
        rotary = self.law.rotary
        rest = dim - 2 * rotary.pairs
        return {
            "DIM": dim, "PAIRS": rotary.pairs, "HALF": _power(rotary.pairs), "REST": _power(max(1, rest)),
            "ROTATED": rest == 0, "INTERLEAVED": rotary.interleaved,
        }  # fmt: skip

    def summaries(self, k: Tensor, blocks: int) -> tuple[BFloat16[Tensor, "b g m d"], Float32[Tensor, "b g d"]]:
        """Return the summaries of the first blocks of keys, and the centre of all keys.

        A block that is always chosen has none: what is not a number comes first.
        """
        first = min(self.choice.centre, self.region.unit) // self.choice.size
        centre = self._means(k, first, 0).mean(2)
        means = self._means(k, blocks, self.choice.lead)
        found = direction(means - centre[:, :, None], means).to(torch.bfloat16)
        found[:, :, : self.choice.always] = torch.nan
        return found, centre

    def _means(self, k: Tensor, blocks: int, lead: int) -> Float32[Tensor, "b g m d"]:
        """Return the mean of every one of the first blocks of keys, and of so many keys before it."""
        b, g, _, d = k.shape
        means = torch.empty(b, g, blocks, d, dtype=torch.float32, device=k.device)
        _means(
            k.device,
            (_cdiv(blocks, 16), g, b),
            (k, means, self.table, 1 / self.law.attention_scaling, blocks, *k.stride()[:3]),
            {"SIZE": self.choice.size, "LEAD": lead, **self.vectors(d), "BLOCK_M": 16},
            {"num_warps": 4},
        )
        return means

    def room(self, b: int, g: int, queries: range, device: torch.device) -> Unions:
        """Return room for what the queries at some positions choose, tile by tile."""
        tiles = _cdiv(len(queries), self.tile)
        most = min(self.choosable(queries[-1]), self.tile * self.choice.most)
        kinds = self.numbers(self.choosable(queries[-1])), torch.int32
        picked, bits = (torch.empty(b, g, tiles, most, dtype=kind, device=device) for kind in kinds)
        return Unions(picked, bits, torch.empty(b, g, tiles, 3, dtype=torch.int32, device=device))

    def list_bytes(self, blocks: int) -> int:
        """Return the bytes of a tile in `room`, for queries that choose from so many blocks."""
        return (self.numbers(blocks).itemsize + 4) * min(blocks, self.tile * self.choice.most) + 12

    def group(self, blocks: int) -> int:
        """Return how many blocks are a group, for rows that choose from so many; 1 where each is looked at."""
        return 1 if blocks <= DIRECT else math.gcd(TOGETHER, self._per_chunk)

    def row_bytes(self, blocks: int) -> int:
        """Return the bytes that a row needs until it has chosen, from so many blocks."""
        parts = self._scratch(self.tile, blocks)
        return _cdiv(sum(rows * columns * kind.itemsize for rows, columns, kind in parts), self.tile)

    def _scratch(self, rows: int, blocks: int) -> list[tuple[int, int, torch.dtype]]:
        """Return the sizes of levels, tops, words and the numbers of groups, of so many rows."""
        (group, _, _, few), stride = self._kind(blocks), _cdiv(blocks, 128) * 128
        grouped = rows if group > 1 else 0
        return [
            (rows, stride, torch.int16),
            (grouped, stride // group, torch.int16),
            (_cdiv(rows, self.tile), stride, torch.int32),
            (grouped, few, torch.int32),
        ]

    @staticmethod
    def numbers(blocks: int) -> torch.dtype:
        """Return the type of a list's numbers of blocks."""
        return torch.int16 if blocks <= 2**15 else torch.int32

    def aims(
        self, q: Tensor, k: Tensor, centre: Tensor, queries: range, *, start: int
    ) -> BFloat16[Tensor, "b g rows d"]:
        """Return what the queries at some positions look for; the first query of q stands at `start`.

        The positions may reach over the ends of q: what has no query looks for nothing.
        """
        aims = self._aims_room(q, k, len(queries))
        self._aiming(q, k, centre, aims, start)(queries)
        return aims

    @staticmethod
    def _aims_room(q: Tensor, k: Tensor, rows: int) -> Tensor:
        return torch.empty(q.shape[0], k.shape[1], rows, q.shape[3], dtype=torch.bfloat16, device=q.device)

    def _aiming(self, q: Tensor, k: Tensor, centre: Tensor, aims: Tensor, start: int) -> Callable[[range], None]:
        """Return launches that write the aims of queries at some positions in front of `aims`."""
        (b, h, t, d), g = q.shape, k.shape[1]
        series = _aims.series(
            q.device,
            (q, k, centre, aims, self.table, self._turns(q.device)),
            (
                aims.shape[2], start + t, start, 1 / self.law.attention_scaling, self.choice.decay, self.choice.query,
                *q.stride()[:3], *k.stride()[:3],
            ),
            {"GROUP": h // g, "RECENT": self.choice.recent, **self.vectors(d), "BLOCK_M": 64, "WIDEN": INTERPRETED},
            {"num_warps": 8},
        )  # fmt: skip
        return lambda queries: series((_cdiv(len(queries), 64), g, b), queries.start, len(queries))

    def _turns(self, device: torch.device) -> Float32[Tensor, "n 2 half"]:
        """Return cos and sin of what pairs turn by over the distances of recent keys, as a kernel computes them."""
        recent, sizes = self.choice.recent, {name: self.vectors(0)[name] for name in ("PAIRS", "HALF")}

        def compute() -> Tensor:
            turns = torch.empty(recent, 2, sizes["HALF"], dtype=torch.float32, device=device)
            _turns(device, (recent, 1, 1), (self.table, turns), sizes, {"num_warps": 1})
            return turns

        found: Tensor = self.law.kept(("turns", device), compute)
        return found

    def unite(
        self, unions: Unions, q: Tensor, k: Tensor, centre: Tensor, summaries: Tensor, work: Work, *, first: int,
        there: range,
    ) -> None:  # fmt: skip
        """Write what the queries at some positions choose into `unions`, whose first tile begins at `first`.

        The first query of q is the first of `there`. Positions are of whole tiles, and may reach over those where
        there are queries: what has no query chooses nothing.
        """
        aims = self._aims_room(q, k, max(len(part) for part, _ in work))
        aim = self._aiming(q, k, centre, aims, there.start)
        every = [piece for _, pieces in work for piece in pieces]
        kinds = {piece: self._kind(self.choosable(piece[-1])) for piece in every}
        last, launch = None, None
        for part, pieces in work:
            aim(part)
            for piece in pieces:
                if kinds[piece] != last:
                    last, launch = kinds[piece], None  # which frees its room
                    alike = [one for one in every if kinds[one] == last]
                    launch = self._launches(unions, aims, summaries, alike, last, there)
                assert launch is not None
                launch(piece, first, part.start)

    def _kind(self, blocks: int) -> tuple[int, int, int, int]:
        """Return what the search of a row is compiled for: blocks in a group, levels at a time, how often, and room."""
        group = self.group(blocks)
        across = min(HELD, max(128, _power(blocks // group)))
        return group, across, _cdiv(blocks // group, across), _power(min(self.choice.most, blocks // group))

    def _launches(
        self,
        unions: Unions,
        aims: Tensor,
        summaries: Tensor,
        pieces: Sequence[range],
        kind: tuple[int, int, int, int],
        there: range,
    ) -> Callable[[range, int, int], None]:
        """Return three launches for pieces of a kind, in room that they share; a piece costs the host little more."""
        (b, g, all_rows, d), device = aims.shape, aims.device
        choice, tile, (group, across, times, few) = self.choice, self.tile, kind
        block_m = ROWS if d <= 128 else ROWS // 2
        needs = zip(*(self._scratch(len(piece), self.choosable(piece[-1])) for piece in pieces), strict=True)
        levels, tops, words, groups = (
            torch.empty(b * g * max(rows * columns for rows, columns, _ in some), dtype=some[0][2], device=device)
            for some in needs
        )
        words.zero_()
        scoring = _levels.series(
            device,
            (aims, summaries, levels, tops),
            (*self._bands, all_rows, summaries.shape[2]),
            {
                "DIM": d, "WIDTH": max(16, _power(d)), "INVERSE_STEP": 1 / choice.STEP, "GROUP": group,
                "BLOCK_M": block_m, "BLOCK_N": COLUMNS, "STAGES": STAGES if d <= 128 else 2,
                "PTX": not INTERPRETED and torch.version.hip is None, "WIDEN": INTERPRETED,
            },
            {"num_warps": 8, "maxnreg": 128},
        )  # fmt: skip
        widest = across if group == 1 else max(across, few * group)
        each = max(1, 8192 // widest) if INTERPRETED else 1
        warps = max(1, min(8, widest // PER_WARP))
        marking = _marks.series(
            device,
            (levels, tops, groups, words),
            (there.start, there.stop, choice.most, *self._bands),
            {
                "TILE": tile, "GROUP": group, "ROWS": each, "ACROSS": across, "TILES": times, "ROOM": few,
                "THREADS": min(across, 32 * warps),
            },
            {"num_warps": warps, "maxnreg": REGISTERS},
        )  # fmt: skip
        _, _, tiles, room = unions.picked.shape
        wide = min(WORDS, across * group)
        uniting = _unions.series(
            device,
            (words, *unions),
            (*self._bands, tiles, room),
            {"TILE": tile, "HALVES": self.halves, "ACROSS": wide},
            {"num_warps": max(1, wide // 256)},
        )

        def launch(piece: range, first: int, aimed: int) -> None:
            start, rows, blocks = piece.start, len(piece), self.choosable(piece[-1])
            stride, tall = 128 * _cdiv(blocks, 128), _cdiv(rows, block_m)
            span = COLUMNS * max(1, min(SPAN, tall * g * b * blocks // PROGRAMS) // COLUMNS)
            scoring((tall * _cdiv(blocks, span), g, b), start, rows, blocks, start - aimed, stride, span)
            marking((_cdiv(rows, each), g, b), start, rows, stride, stride // group)
            uniting((_cdiv(rows, tile), g, b), start, (start - first) // tile, stride)

        return launch
