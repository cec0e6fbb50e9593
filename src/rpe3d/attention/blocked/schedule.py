"""Which library attention calls execute a law: every visible pair in exactly one call.

Queries are cut into blocks of rows. Within a block a chunk law needs few calls, each as large as it can be, because
what repeats from chunk to chunk is one batched call over overlapping views:

    near     own chunk            causal      c x c,    once per chunk of the block
             chunks before it     full        c x A c,  once per chunk
    far      what all rows share  full        the block x everything up to A + 1 chunks before its first row
             what later rows add  full        a staircase, cut into squares of c, 2c, 4c ... (log2 of them,
                                              and as many that the block's end cuts), or, where these are many,
                                  causal      all below its diagonal, once, and
                                  upper       what is left of every step, c x c, once per chunk

Distance laws (unit 1) have diagonal edges instead of stairs: causal squares, and for a window's far edge the upper
triangle, which is a causal one with both sides read backwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from rpe3d.geometry import Region
from rpe3d.rotation.table import Places

Shape = Literal["full", "causal", "upper"]
MOST_STAIRS = 5
"""Maximum squares of a staircase; beyond that there are two triangles, of which the upper ones are copied reversed."""


class Piece(NamedTuple):
    """Rows [query, query + rows) against keys [key, key + columns)."""

    query: int
    rows: int
    key: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """Rows [query, query + rows) against keys [key, key + columns), `times` times, both moved on by `step`.

    causal: column <= row, counted from the corner. upper: column >= row. Positions, not indices. With `pieces` it is
    these instead, each with its own corner and no row in two of them, and the rows and keys are all that there are.
    """

    region: int
    query: int
    rows: int
    key: int
    columns: int
    shape: Shape = "full"
    times: int = 1
    step: int = 0
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows of queries and the calls that complete them."""

    rows: range
    calls: tuple[Call, ...]


def schedule(regions: tuple[Region, ...], queries: range, keys: range, rows: int) -> tuple[Block, ...]:
    """Blocks of at most `rows` queries (more where nothing is far); none where a band has a form that no call has.

    Both ranges are consecutive positions, the keys' from 0, and every query is among the keys. No call knows a choice.
    """
    if any(region.choice is not None for region in regions):
        return ()
    if keys.start != 0 or not regions or not all(_has_calls(region, _near(regions)) for region in regions):
        return ()
    units = {region.unit for region in regions}
    if len(units) > 1:
        return ()
    if units == {1}:
        return tuple(_distance_blocks(regions, queries, keys, rows))
    return tuple(_chunk_blocks(regions, units.pop(), queries, keys, rows))


def skipping(regions: tuple[Region, ...], sequences: tuple[Places, ...]) -> tuple[Block, ...]:
    """Return one block for tokens at increasing positions with gaps, sequence after sequence; its calls count tokens.

    The tokens of a chunk have the same keys in every region but their own, and so, often, do those of many chunks. What
    one region has of one shape is one call, of many pieces. Returns None for bands of distances, where every token has
    its own keys.
    """
    banded = any(region.first is not None or region.last is not None for region in regions)
    units = {region.unit for region in regions}
    if any(region.choice is not None for region in regions):
        return ()
    bounded = any(region.first is None and (region.start or region.keys is not None) for region in regions)
    if len(units) > 1 or (units == {1} and banded) or bounded:
        return ()
    chunk = units.pop() if banded else max(places[-1].stop for places in sequences)
    pieces: dict[tuple[int, Shape], list[Piece]] = {}
    tokens = 0
    for places in sequences:
        for call in _skips(regions, chunk, places):
            piece = Piece(tokens + call.query, call.rows, tokens + call.key, call.columns)
            pieces.setdefault((call.region, call.shape), []).append(piece)
        tokens += sum(map(len, places))
    calls = (
        Call(region=i, query=0, rows=tokens, key=0, columns=tokens, shape=shape, pieces=tuple(found))
        for (i, shape), found in sorted(pieces.items())
    )
    return (Block(rows=range(tokens), calls=tuple(calls)),)


def _skips(regions: tuple[Region, ...], chunk: int, places: Places) -> Iterator[Call]:
    """Return the calls of one sequence: queries with the same keys go together."""

    def before(position: int) -> int:
        """Return the number of tokens before a position."""
        return sum(min(max(position - run.start, 0), len(run)) for run in places)

    def keys(region: Region, here: int) -> tuple[int, int | None]:
        """Return the keys that queries of a chunk have in a region; without an end: up to themselves."""
        first = before(max(region.start, 0 if region.last is None else (here - region.last) * chunk))
        if region.first is None:
            return first, None
        stop = (here - region.first + 1) * chunk
        return first, before(stop if region.keys is None else min(stop, region.keys))

    alike: list[tuple[list[tuple[int, int | None]], range]] = []
    for run in places:
        for here in range(run.start // chunk, (run.stop - 1) // chunk + 1):
            rows = range(before(max(run.start, here * chunk)), before(min(run.stop, (here + 1) * chunk)))
            found = [keys(region, here) for region in regions]
            if alike and alike[-1][0] == found:
                rows = range(alike.pop()[1].start, rows.stop)
            alike.append((found, rows))
    for found, rows in alike:
        for i, (key, stop) in enumerate(found):
            if stop is None:
                yield from _trapezoid(i, rows, key, rows.start, rows.stop)
            elif key < stop:
                yield Call(region=i, query=rows.start, rows=len(rows), key=key, columns=stop - key)


def _near(regions: tuple[Region, ...]) -> int | None:
    """Return the distance up to which nothing is far: the end of the nearest region, or what lies before it."""
    return regions[0].last if regions[0].first is None else regions[0].first - 1


def _has_calls(region: Region, near: int | None) -> bool:
    """Return whether calls can bound a region's keys: if it is all that is beyond; in chunks, by keys of the first."""
    if region.keys is None and not region.start:
        return True
    if region.first is None or region.last is not None:
        return False
    if region.unit == 1:
        return not region.start
    return near is not None and region.first == near + 1 and (region.keys or region.start) <= region.unit


def _distance_blocks(regions: tuple[Region, ...], queries: range, keys: range, rows: int) -> Iterator[Block]:
    """Blocks for bands of distances: everything, a window, a band, what is beyond it, the sinks beyond it."""
    windows = [r.last + 1 - (r.first or 0) for r in regions if r.last is not None]
    size = max(1, min([rows, *windows])) if windows else len(queries)
    for start in range(queries.start, queries.stop, size):
        block = range(start, min(start + size, queries.stop))
        calls = [call for i, region in enumerate(regions) for call in _distance_calls(i, region, block, keys)]
        yield Block(rows=block, calls=tuple(calls))


def _distance_calls(i: int, region: Region, block: range, keys: range) -> Iterator[Call]:
    if region.first is None:
        window = block.stop if region.last is None else region.last + 1
        yield from _trapezoid(i, block, max(0, block.stop - window), block.start, keys.stop)
        yield from _far_edge(i, block, window)
    elif region.last is not None and region.first < block.stop:
        # A window of the band's own width, for queries that stand `first` positions earlier.
        window = region.last + 1 - region.first
        moved = range(max(block.start, region.first) - region.first, block.stop - region.first)
        for call in (
            *_trapezoid(i, moved, max(0, moved.stop - window), moved.start, keys.stop),
            *_far_edge(i, moved, window),
        ):
            yield replace(call, query=call.query + region.first)
    elif region.last is None:
        start = max(block.start, region.first)
        if start < block.stop:
            stop = keys.stop if region.keys is None else min(keys.stop, region.keys)
            yield from _trapezoid(i, range(start, block.stop), 0, start - region.first, stop)


def _trapezoid(i: int, block: range, key: int, diagonal: int, stop: int) -> Iterator[Call]:
    """Keys [key, diagonal) for all rows, then a causal square whose corner is `diagonal`; none at or beyond `stop`."""
    if key < min(diagonal, stop):
        yield Call(region=i, query=block.start, rows=len(block), key=key, columns=min(diagonal, stop) - key)
    columns = min(diagonal + len(block), stop) - diagonal
    if columns > 0:
        yield Call(region=i, query=block.start, rows=len(block), key=diagonal, columns=columns, shape="causal")


def _far_edge(i: int, block: range, window: int) -> Iterator[Call]:
    """Keys that only the first rows still see: column > row in the square whose corner is query - window."""
    corner, side = block.start - window, len(block)
    cut = max(0, -corner)  # columns before position 0 do not exist
    if cut and min(cut, side) < side:
        yield Call(region=i, query=block.start, rows=cut, key=0, columns=side - cut)
    if (left := side - cut - 1) > 0:
        query, key = block.start + cut, corner + cut + 1
        yield Call(region=i, query=query, rows=left, key=key, columns=left, shape="upper")


def _chunk_blocks(regions: tuple[Region, ...], chunk: int, queries: range, keys: range, rows: int) -> Iterator[Block]:
    """Blocks for bands of chunk distances, the nearest region first."""
    near = _near(regions)
    head = queries.stop if near is None else min(queries.stop, (near + 1) * chunk)
    if queries.start < head:
        # Nothing is far yet: one causal square, and what was before it; no call at all where near keys are not seen.
        block = range(queries.start, head)
        seen = _trapezoid(0, block, 0, block.start, keys.stop) if regions[0].first is None else ()
        yield Block(rows=block, calls=tuple(seen))
    start = max(queries.start, head)
    # A long chunk is cut evenly, and not below twice the rows: its pieces share no calls, as chunks of a block do.
    piece = math.ceil(chunk / math.ceil(chunk / (2 * rows)))
    while start < queries.stop:
        whole = (queries.stop - start) // chunk if start % chunk == 0 else 0
        count = max(1, min(whole, rows // chunk))
        stop = min(queries.stop, (start // chunk + count) * chunk, start + max(rows, piece))
        block = range(start, stop)
        calls = [call for i, r in enumerate(regions) for call in _chunk_calls(i, r, chunk, block, count, keys)]
        yield Block(rows=block, calls=tuple(calls))
        start = stop


def _chunk_calls(i: int, region: Region, chunk: int, block: range, count: int, keys: range) -> Iterator[Call]:
    """Return the calls of one region in a block of `count` chunks, or of a part of one chunk."""
    first_chunk, per_chunk = block.start // chunk, len(block) // count
    repeat: dict[str, Any] = {"times": count, "step": chunk}
    first = region.first or 0
    if region.first is None and region.last is not None:
        key = (first_chunk - region.last) * chunk
        if key < block.start:
            columns = block.start - key
            yield Call(region=i, query=block.start, rows=per_chunk, key=key, columns=columns, **repeat)
        columns = min(per_chunk, keys.stop - block.start)
        yield Call(
            region=i, query=block.start, rows=per_chunk, key=block.start, columns=columns, shape="causal", **repeat
        )
    elif region.last is not None:
        key, stop = (first_chunk - region.last) * chunk, (first_chunk - first + 1) * chunk
        if key >= 0:
            yield Call(region=i, query=block.start, rows=per_chunk, key=key, columns=stop - key, **repeat)
        else:
            for n in range(count):
                stop = (first_chunk + n - first + 1) * chunk
                key = max(0, (first_chunk + n - region.last) * chunk)
                if key < stop:
                    rows = block.start + n * chunk
                    yield Call(region=i, query=rows, rows=per_chunk, key=key, columns=stop - key)
    else:
        shared = (first_chunk - first + 1) * chunk
        stop = shared if region.keys is None else min(shared, region.keys)
        stairs = [] if region.keys is not None else list(_stairs(i, chunk, block.start, shared, count))
        if len(stairs) > MOST_STAIRS:
            if shared - chunk >= region.start:  # the last of the shared chunks is the first chunk's step
                stop = shared - chunk
                stairs = list(_triangles(i, chunk, block.start, stop, count))
            else:  # that chunk has keys that are not of this region
                stairs = list(_triangles(i, chunk, block.start + chunk, shared, count - 1))
        if region.start < stop:
            yield Call(region=i, query=block.start, rows=len(block), key=region.start, columns=stop - region.start)
        yield from stairs


def _stairs(i: int, chunk: int, query: int, key: int, count: int) -> Iterator[Call]:
    """Chunk n of `count` sees the first n chunks of keys: of every two sides, the second sees the keys of the first."""
    side = 1
    while side < count:
        size, times = side * chunk, count // (2 * side)
        if times:
            repeated: dict[str, Any] = {"times": times, "step": 2 * size}
            yield Call(region=i, query=query + size, rows=size, key=key, columns=size, **repeated)
        cut = count - (2 * times + 1) * side
        if cut > 0:
            skipped = 2 * times * size
            yield Call(region=i, query=query + skipped + size, rows=cut * chunk, key=key + skipped, columns=size)
        side *= 2


def _triangles(i: int, chunk: int, query: int, key: int, count: int) -> Iterator[Call]:
    """Chunk n of `count` sees the first n + 1 chunks of keys: all below the diagonal, and the rest of every step."""
    side = count * chunk - 1
    yield Call(region=i, query=query + 1, rows=side, key=key, columns=side, shape="causal")
    yield Call(region=i, query=query, rows=chunk, key=key, columns=chunk, shape="upper", times=count, step=chunk)
