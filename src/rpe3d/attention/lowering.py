"""A law's regions as the numbers that kernels are compiled for and read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from rpe3d.geometry import Law, Phase, Region, Turn

LEAST_CHUNK = 16  # a tile ends where its chunk ends, and tensor cores want tiles of 16
_NEVER = 2**31 - 1  # no position and no chunk distance passes it (config.LONGEST)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A law as the decoding kernel is compiled for it.

    The chunk that tiles keep to (None: no chunks); for each region its band, as (unit, first, last, keys, start), and
    whether it turns q at all; in how many ways they turn q and k; whether the first region fades, as none of the others
    does.
    """

    chunk: int | None = None
    bands: tuple[tuple[int, int, int, int, int], ...] = ()
    turning: tuple[bool, ...] = ()
    ways: int = 0
    fades: bool = False
    refusal: str | None = None


def plan(law: Law) -> Plan:
    """Return how the kernel runs a law, made once for it."""
    made: Plan = law.kept("plan", lambda: _plan(law))
    return made


def _plan(law: Law) -> Plan:
    if law.chooses:
        return Plan(refusal="its far keys are chosen")
    chunks, turning, regions = set(), [], ordered(law)
    for region in regions:
        if region.unit > 1:
            chunks.add(region.unit)
        key_still = region.key.is_stock
        if not key_still:
            if not whole_chunks(region.key):
                return Plan(refusal="its far keys rotate token by token")
            chunks.add(region.key.chunk)
        turning.append(not (key_still and region.query.is_stock))
    if len(chunks) > 1:
        return Plan(refusal=f"its regions have chunks of {sorted(chunks)} tokens")
    chunk = chunks.pop() if chunks else None
    if chunk is not None and chunk < LEAST_CHUNK:
        return Plan(refusal=f"its chunks of {chunk} tokens are shorter than {LEAST_CHUNK}")
    if any(region.fade is not None for region in regions[1:]):
        return Plan(refusal="more than one of its regions fades")
    ways = len({(region.query, region.key) for region in regions})
    fades = regions[0].fade is not None
    return Plan(chunk=chunk, bands=tuple(map(band, regions)), turning=tuple(turning), ways=ways, fades=fades)


def ordered(law: Law) -> tuple[Region, ...]:
    """Return the regions as kernels walk them: one that fades first, since the others then need not know of it."""
    return tuple(sorted(law.regions, key=lambda region: region.fade is None))


def band(region: Region) -> tuple[int, int, int, int, int]:
    """Return a region's chunk distances and keys, with numbers that nothing reaches in the place of none."""
    first = region.first or 0  # causality cuts below the diagonal anyway
    last = _NEVER if region.last is None else region.last
    keys = _NEVER + 1 if region.keys is None else region.keys
    return min(region.unit, _NEVER), first, last, keys, region.start


def whole_chunks(turn: Turn) -> bool:
    """Say whether x(p) - p is the same for all tokens of a chunk, and chunks are more than tokens."""
    return turn.chunk > 1 and turn.offset == 1 and turn.ceiling == math.inf


def table(law: Law, device: torch.device) -> Float64[Tensor, " n"]:
    """Return all numbers of a law that the decoding kernel reads, on the device: `region_row` of each region, θ_l / 2π.

    Made once for a law, because a copy to the device has no place in a captured graph; in float64, because a kernel's
    own scalars are float32, whose steps at position 1,000,000 are 0.06.
    """
    made: Tensor = law.kept(("table", device), lambda: _table(law).to(device))
    return made


def _table(law: Law) -> Float64[Tensor, " n"]:
    rows = [number for region in ordered(law) for number in region_row(region)]
    theta = law.frequencies() if any(plan(law).turning) else torch.zeros(0, dtype=torch.float64)
    return torch.cat([torch.tensor(rows, dtype=torch.float64), theta / (2 * math.pi)])


def region_row(region: Region) -> list[float]:
    """Return a region's turns and fading in fifteen numbers; angles in whole turns, which the kernel drops by rounding.

    The query's turn, the key's as its shift x(p) - p = slope · j + start in chunk j, and rate, focus and span.
    """
    query, key = region.query, region.key
    chunkwise = not key.is_stock
    return [
        float(min(query.chunk, _NEVER)),
        query.offset,
        query.stride,
        query.start,
        query.ceiling,
        key.stride - key.chunk if chunkwise else 0.0,
        key.start if chunkwise else 0.0,
        *_phase(query.phase),
        *_phase(key.phase),
        (_constant(query.phase) - _constant(key.phase)) / (2 * math.pi),
        *((0.0, 0.0, 2.0) if region.fade is None else (region.fade.rate, region.fade.focus, region.fade.span)),
    ]


def _phase(phase: Phase | None) -> tuple[float, float]:
    """Return (s, e) with s · 2^(-e j) the part of a phase that depends on the chunk, in turns."""
    return (0.0, 0.0) if phase is None else (phase.sign / (2 * math.pi), math.log2(phase.base))


def _constant(phase: Phase | None) -> float:
    return 0.0 if phase is None else phase.constant
