"""One attention problem as library calls see it: which tokens, at which positions, in which blocks, rotated how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rpe3d.attention.blocked.backends import Backend
from rpe3d.attention.blocked.ragged import Pack, pack
from rpe3d.attention.blocked.schedule import Block, Call, Piece, schedule, skipping
from rpe3d.config import freeze
from rpe3d.geometry import Fade, Law, Region, Turn
from rpe3d.geometry.region import STOCK
from rpe3d.rotation import rotate
from rpe3d.rotation.table import Places, Table, Tables, positions_of

LEAST_BACKWARD = 32768
"""Minimum queries in a block of the backward, if the forward has fewer in its own."""


Kind = tuple[Turn, Fade | None]
"""What is done to vectors that stock RoPE has rotated: a turn to where it puts them, and the sharpness of a focus."""
PLAIN: Kind = (STOCK, None)


@dataclass(frozen=True, kw_only=True)
class Task:
    """Consecutive queries against consecutive keys under a law. `blocks` is its schedule.

    With `places`, one for each of several sequences in a row, these are the positions of queries and keys, and the
    ranges count tokens; without, the ranges are positions.
    """

    law: Law
    regions: tuple[Region, ...]
    """Regions of the law that the task attends to."""
    queries: range
    keys: range
    frequencies: Float64[Tensor, " l"]
    scale: float
    backend: Backend
    precision: torch.dtype
    """dtype of the log-sum-exp."""
    rows: int
    """Queries in a block of the forward."""
    backward_rows: int = LEAST_BACKWARD
    """Queries in a block of the backward: each block adds to the gradients of all keys before it, so few and large."""
    slab: int = 65536
    """Far keys that are rotated at a time."""
    places: tuple[Places, ...] | None = None
    tables: Tables = field(default_factory=Tables, compare=False)
    """Tables of cos and sin, shared by all layers that run the task."""
    packs: dict[tuple[Piece, ...], Pack] = field(default_factory=dict, init=False, compare=False)
    blocks: tuple[Block, ...] = field(init=False)
    """Schedule of the forward; empty if no schedule fits."""

    def __post_init__(self) -> None:
        freeze(self, blocks=self.schedule(self.rows))

    @cached_property
    def repeats(self) -> bool:
        """Whether some call repeats over chunks, in the place of a batch; the backward's may where no other do.

        Chunks as long as a block of the forward are such a case.
        """
        return _repeats(self.blocks) or _repeats(self.backward_blocks)

    @cached_property
    def backward_blocks(self) -> tuple[Block, ...]:
        """Schedule of the backward."""
        return self.schedule(self.backward_rows)

    def pack(self, call: Call) -> Pack:
        """Return what a call of pieces gathers."""
        if call.pieces not in self.packs:
            self.packs[call.pieces] = pack(call.pieces, call.rows, self.frequencies.device)
        return self.packs[call.pieces]

    def schedule(self, rows: int) -> tuple[Block, ...]:
        """Blocks of so many queries; positions that skip have their own blocks."""
        if self.places is not None:
            return skipping(self.regions, self.places)
        return schedule(self.regions, self.queries, self.keys, rows)

    def at(self, tokens: range) -> Places:
        """Return the positions of these tokens."""
        if self.places is None:
            return (tokens,)
        found, first = [], 0
        for run in chain.from_iterable(self.places):
            part = run[max(0, tokens.start - first) : max(0, tokens.stop - first)]
            found += [part] if len(part) else []
            first += len(run)
        return tuple(found)

    def slabs(self) -> list[range]:
        """Return all far keys as one slab if positions skip: such sequences are short, and their first keys differ."""
        if self.places is not None:
            return [self.keys]
        return [range(a, min(a + self.slab, self.keys.stop)) for a in range(0, self.keys.stop, self.slab)]

    def passes(self) -> Iterator[tuple[range, list[tuple[Block, list[Call]]]]]:
        """Yield one pass per slab of far keys, from the last one on; the last pass, after these, does all else."""
        for slab in reversed(self.slabs()):
            work = []
            for block in self.blocks:
                calls = [cut for call in block.calls if (cut := self._within(call, slab))]
                if calls:
                    work.append((block, calls))
            yield slab, work

    def _within(self, call: Call, slab: range) -> Call | None:
        """Return the part of a call that belongs to a slab's pass."""
        if call.shape != "full" or call.times > 1 or self.regions[call.region].key.is_stock:
            return call if slab.start == 0 else None
        start, stop = max(call.key, slab.start), min(call.key + call.columns, slab.stop)
        return replace(call, key=start, columns=stop - start) if start < stop else None

    @property
    def fade(self) -> Fade | None:
        """The fade of the one region that fades, if there is one."""
        fades = [region.fade for region in self.regions if region.fade is not None]
        assert len(fades) <= 1, "merging knows of one group of faded parts"
        return fades[0] if fades else None

    @cached_property
    def shift(self) -> Float[Tensor, "2 t"] | None:
        """`Fade.shift` of every query."""
        return None if self.fade is None else self._on_device(self.fade.shift(positions_of(self.at(self.queries))))

    @cached_property
    def shares(self) -> Float[Tensor, "2 1 1 t"]:
        """log (1 - e) and log e of every query, e the first number of its shift."""
        assert self.fade is not None
        eased, _ = self.fade.shift(positions_of(self.at(self.queries)))
        return self._on_device(torch.stack([(-eased).log1p(), eased.log()]))[:, None, None]

    def _on_device(self, x: Float64[Tensor, "2 t"]) -> Float[Tensor, "2 t"]:
        return x.to(self.frequencies.device, self.precision, non_blocking=True)

    def turned(self, x: Tensor, kind: Kind, tokens: range, *, back: bool = False) -> Tensor:
        """Rotate vectors of these tokens from stock RoPE to where a region has them, or gradients back."""
        if kind == PLAIN:
            return x
        cos, sin = self.table(kind, tokens, x.dtype)
        made = rotate(x, None, cos, -sin if back else sin, interleaved=self.law.rotary.interleaved)[0]
        if kind[1] is not None and (rest := 2 * len(self.frequencies)) < x.shape[3]:  # dimensions that do not turn
            sharp = self.tables.sharpness(kind[1], self.at(tokens), x.device, cos.dtype)
            made[..., rest:] = x[..., rest:] * sharp[:, None]
        return made

    def table(self, kind: Kind, tokens: range, dtype: torch.dtype) -> Table:
        """Return cos and sin for vectors of these tokens, sharpened if the kind says so."""
        return self.tables(*kind, self.at(tokens), self.frequencies, torch.promote_types(dtype, torch.float32))


def _repeats(blocks: tuple[Block, ...]) -> bool:
    return any(call.times > 1 for block in blocks for call in block.calls)


def query_kind(region: Region) -> Kind:
    """Return what a region does to its queries."""
    return region.query, region.fade if region.fade is not None and region.fade.focus else None
