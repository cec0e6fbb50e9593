# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""`table` in one launch: angles in float64 from integer positions, reduced by 2π there, cos and sin in float32."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float32, Float64
from torch import Tensor

from rpe3d.geometry import Turn
from rpe3d.geometry.law import apart
from rpe3d.rotation.launch import Launcher


@triton.jit(do_not_specialize=["first", "tokens", "chunk"])
@no_type_check
def _table_kernel(
    cos,
    sin,
    frequencies,
    numbers,
    first,
    tokens,
    chunk,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    CEILING: tl.constexpr,
    PHASE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Fill BLOCK_T positions per program. Equals table.plain. `numbers`: offset, stride, start, ceiling, phase."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    j = tl.arange(0, WIDTH)
    p = first.to(tl.int64) + t
    within, block = (p % chunk).to(tl.float64), (p // chunk).to(tl.float64)
    x = tl.load(numbers) * within
    if CEILING:
        x = tl.minimum(x, tl.load(numbers + 3))
    x += tl.load(numbers + 1) * block + tl.load(numbers + 2)
    theta = tl.load(frequencies + j, mask=j < PAIRS, other=0.0)
    angle = (x - p.to(tl.float64))[:, None] * theta[None, :]
    if PHASE:
        # base^(-j) as exp(-j ln base) in float32: the phase is at most 1, and its error a rounding of that.
        log_base = tl.load(numbers + 6).to(tl.float32)
        power = tl.exp(-block.to(tl.float32) * log_base).to(tl.float64)
        angle += (tl.load(numbers + 4) + tl.load(numbers + 5) * power)[:, None]
    turns = tl.floor(angle * 0.15915494309189535 + 0.5)
    reduced = (angle - turns * 6.283185307179586).to(tl.float32)
    row = t[:, None] * PAIRS + j[None, :]
    inside = (t < tokens)[:, None] & (j < PAIRS)[None, :]
    tl.store(cos + row, tl.cos(reduced), mask=inside)
    tl.store(sin + row, tl.sin(reduced), mask=inside)


_table = Launcher(_table_kernel)


@lru_cache(maxsize=256)
def _numbers(turn: Turn, device: torch.device) -> Float64[Tensor, "7"]:
    """Return the turn as the kernel reads it."""
    # Kept for the process, unlike all else here: a launch that is captured in a CUDA graph can copy nothing to the
    # device, and whoever asks for a table knows a turn and not the law that could keep this. The key is the whole
    # value, so nothing goes stale, and 256 entries of 56 bytes are all that stays.
    phase = turn.phase
    y = (phase.constant, float(phase.sign), math.log(phase.base)) if phase else (0.0, 0.0, 0.0)
    numbers = [turn.offset, turn.stride, turn.start, turn.ceiling, *y]
    made: Tensor = apart(lambda: torch.tensor(numbers, dtype=torch.float64, device=device))
    return made


def table(
    turn: Turn, positions: range, frequencies: Float64[Tensor, " l"]
) -> tuple[Float32[Tensor, "t l"], Float32[Tensor, "t l"]]:
    """Launch. The turn's numbers travel as a small tensor: as scalars Triton would round them to float32."""
    pairs, tokens = len(frequencies), len(positions)
    cos = torch.empty(tokens, pairs, dtype=torch.float32, device=frequencies.device)
    sin = torch.empty_like(cos)
    block_t = 16
    _table(
        frequencies.device,
        (-(-tokens // block_t), 1, 1),
        (cos, sin, frequencies, _numbers(turn, frequencies.device), positions.start, tokens, turn.chunk),
        {
            "PAIRS": pairs,
            "WIDTH": 1 << (pairs - 1).bit_length(),
            "CEILING": math.isfinite(turn.ceiling),
            "PHASE": turn.phase is not None,
            "BLOCK_T": block_t,
        },
        {},
    )
    return cos, sin
