# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""What all kernels of a choice share: the parts of a vector that turn and the rest, turns, lengths and rounding."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from rpe3d.attention.chooser import ALIKE

_ALIKE = tl.constexpr(ALIKE)


@triton.jit
@no_type_check
def _halves(DIM: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Say where the first members of all pairs lie, the second ones, and what is not rotated; and which exist."""
    pair = tl.arange(0, HALF)[None, :]
    rest = 2 * PAIRS + tl.arange(0, REST)[None, :]
    if INTERLEAVED:
        return 2 * pair, 2 * pair + 1, rest, pair < PAIRS, rest < DIM
    return pair, pair + PAIRS, rest, pair < PAIRS, rest < DIM


@triton.jit
@no_type_check
def _load3(rows, live, one, two, rest, pairs, others, ROTATED: tl.constexpr):
    """Vectors as three tensors in float32: both members of the pairs, and the rest (of which there may be nothing)."""
    x = tl.load(rows + one, mask=live & pairs, other=0.0).to(tl.float32)
    y = tl.load(rows + two, mask=live & pairs, other=0.0).to(tl.float32)
    if ROTATED:  # noqa: SIM108 (the compiler decides)
        z = tl.zeros_like(x)
    else:
        z = tl.load(rows + rest, mask=live & others, other=0.0).to(tl.float32)
    return x, y, z


@triton.jit
@no_type_check
def _cos_sin(turns):
    """Of so many whole turns, in float64."""
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
@no_type_check
def _square(x, y, z, ROTATED: tl.constexpr):
    square = tl.sum(x * x + y * y, 1)
    if not ROTATED:
        square += tl.sum(z * z, 1)
    return square


@triton.jit
@no_type_check
def _inverse(square, of):
    """Return 1 / |x| from |x|², or 0 where `chooser.direction` is; of: the square of what x is a difference of."""
    length = tl.sqrt(square)
    return tl.where(length <= _ALIKE * tl.sqrt(of), 0.0, 1.0 / tl.maximum(length, 1.2e-38))


@triton.jit
@no_type_check
def _in_bfloat16(x, WIDEN: tl.constexpr):
    """Round to bfloat16, to nearest even. WIDEN: by hand, for Triton's interpreter, which cuts off."""
    if WIDEN:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)
