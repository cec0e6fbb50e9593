"""Plain RoPE (Su et al. 2021, arXiv 2104.09864; eqs. 2-3 of the 3D-RPE paper): f = p_q - p_k for every pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rpe3d.drawing.palette import INK, Style
from rpe3d.geometry.law import Law
from rpe3d.geometry.region import Region


@dataclass(frozen=True, kw_only=True)
class Rope(Law):
    """Show every pair its true distance, at the model's own frequencies."""

    name: ClassVar[str] = "rope"
    summary: ClassVar[str] = "plain RoPE: the stock model, at any length"
    style: ClassVar[Style] = Style(INK)
    needs_attention: ClassVar[bool] = False

    @property
    def regions(self) -> tuple[Region, ...]:
        return (Region(),)
