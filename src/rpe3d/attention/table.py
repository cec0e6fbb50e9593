"""Tables of cos and sin for vectors that stock RoPE has turned and a law turns further."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rpe3d.geometry import PairTurns, Turn
from rpe3d.rotation import cos_sin

Table = tuple[Float[Tensor, "t l"], Float[Tensor, "t l"]]
_HAS_TRITON = find_spec("triton") is not None


def table(turn: Turn, positions: range, frequencies: Float64[Tensor, " l"], dtype: torch.dtype) -> Table:
    """cos and sin of θ_l (x(p) - p) + y(p): from where stock RoPE put a vector to where `turn` puts it."""
    if frequencies.is_cuda and dtype == torch.float32 and _HAS_TRITON and not isinstance(turn, PairTurns):
        from rpe3d.attention import table_kernel

        return table_kernel.table(turn, positions, frequencies)
    return plain(turn, positions, frequencies, dtype)


def plain(turn: Turn, positions: range, frequencies: Float64[Tensor, " l"], dtype: torch.dtype) -> Table:
    """The specification of the kernel, which is one launch where this is twenty."""
    p = torch.arange(positions.start, positions.stop, device=frequencies.device)
    return cos_sin(turn.angle(p, frequencies, stock=True), dtype=dtype)
