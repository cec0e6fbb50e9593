"""What the decoding kernel is launched with, with pages and without: tiles, splits, constants, scratch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rpe3d.attention.decode.arrivals import zeros
from rpe3d.attention.decode.loop import LEAST_KEYS, LOG2_E, _cdiv, _power, _processors, scratch, split, tile
from rpe3d.attention.lowering import plan
from rpe3d.geometry import Law

Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


class Launch:
    """Rows of t queries of h heads in g groups against so many keys, under a law; `options` override what is chosen."""

    def __init__(
        self, law: Law, q: Tensor, groups: int, keys: int, *, splits: int | None = None, **options: int
    ) -> None:
        (b, h, t, d), made, self.device = q.shape, plan(law), q.device
        width, rows = _power(d), h // groups * t
        options = tile(rows, width, q.element_size(), made.chunk) | options
        block_m, block_n = options.pop("block_m"), options.pop("block_n")
        least_tiles = options.pop("least_tiles", max(1, LEAST_KEYS // block_n))
        blocks = _cdiv(rows, block_m)
        self.splits = splits or split(b * groups * blocks, keys, _processors(self.device))
        self.grid = (self.splits, groups * blocks, b)
        self.options = options
        self.shape, self.dim = (b, h, t), d
        self.slots, self.columns = scratch(self.splits, made)
        self.counters = b * groups * blocks
        self.constants: dict[str, Any] = {
            "QUERIES": t,
            "GROUP": h // groups,
            "DIM": d,
            "WIDTH": width,
            "PAIRS": law.rotary.pairs,
            "INTERLEAVED": law.rotary.interleaved,
            "BANDS": made.bands,
            "TURNING": sum(turns << r for r, turns in enumerate(made.turning)),
            "FADES": made.fades,
            "CHUNK": block_n if made.chunk is None else made.chunk,  # without chunks, tiles are as good
            "SPLIT": self.splits > 1,
            "LEAST_TILES": least_tiles,
            "ROWS": min(block_m, _power(rows)),
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
        }

    def results(self) -> Results:
        """Return room for the log-sum-exp, and for what the splits leave each other: parts, logs and arrivals."""
        lse = torch.empty(self.shape, dtype=torch.float32, device=self.device)
        if not self.slots:
            return lse, None, None, None
        parts = torch.empty(self.room() - lse.numel(), dtype=torch.float32, device=self.device)
        return lse, parts, parts[lse.numel() * self.slots * self.dim :], zeros(self.counters, self.device)

    def kept_results(self) -> Results:
        """Return `results` for whoever keeps them: with counters that nobody else has, at the cost of a launch."""
        room = torch.empty(self.room(), dtype=torch.float32, device=self.device)
        return self.results_in(room, torch.zeros(self.counters, dtype=torch.int32, device=self.device))

    def room(self) -> int:
        """Return how many floats `results` takes."""
        return math.prod(self.shape) * (1 + self.slots * self.dim + self.columns)

    def results_in(self, room: Tensor, arrivals: Tensor) -> Results:
        """Return `results` in memory that is kept: floats, and zeros that launches leave zero."""
        rows = math.prod(self.shape)
        end = self.room()
        lse = room[end - rows : end].view(self.shape)  # last: the parts are read in vectors, which must be aligned
        if not self.slots:
            return lse, None, None, None
        return lse, room, room[rows * self.slots * self.dim :], arrivals[: self.counters]


def scales(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """Return both as the kernel multiplies by them, in base 2."""
    return (scale / softcap, softcap * LOG2_E) if softcap else (scale * LOG2_E, None)
