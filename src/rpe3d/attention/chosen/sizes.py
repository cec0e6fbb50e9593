"""How a decoding step with a choice is cut into programs, and the table of its turns."""

from __future__ import annotations

import torch
from jaxtyping import Float32
from torch import Tensor

from rpe3d.attention.decode.loop import _cdiv, _power
from rpe3d.geometry import Law

LEAST_KEYS = 64  # of a split
PROGRAMS = 3  # that attend, on each processor: as many as have room for their registers


def wide(blocks: int, heads: int, processors: int) -> int:
    """Return how many blocks a program scores: the more, the less often the aims are computed, but all have work."""
    return next((n for n in (256, 128) if _cdiv(blocks, n) * heads >= processors), 64)


def tile(heads: int, width: int, itemsize: int, size: int) -> int:
    """Return how many keys a program attends to at a time: whole blocks, of which every head has a row each."""
    keys = max(size, 64 if width * itemsize <= 512 else 32)
    while keys > max(16, size) and heads * keys // size > 32:
        keys //= 2
    return keys


def shares(law: Law, programs: int, keys: int, tile: int, processors: int) -> int:
    """Return into how many parts the keys that a query sees go, where so many programs attend in each."""
    region = law.regions[-1]
    assert region.choice is not None
    assert region.first is not None
    seen = min(keys, region.unit * region.first + region.choice.most * region.choice.size)
    return max(1, min(PROGRAMS * processors // programs, _cdiv(seen, max(tile, LEAST_KEYS))))


def launch(rows: int, nbytes: int, paged: bool) -> dict[str, int]:
    """Return the launch options of a program that attends, with so many rows and so many bytes in a key.

    With pages, two stages more keep as many keys on the way, since page numbers are loaded ahead; and registers are
    held to what lets PROGRAMS run on a processor. Compiled for an H200 nothing spills; none of it has been timed.
    """
    options = {"num_warps": 4, "num_stages": (3 if nbytes <= 256 else 2) + 2 * paged}
    return options | {"maxnreg": 168} if paged and rows <= 16 and nbytes <= 256 else options


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
