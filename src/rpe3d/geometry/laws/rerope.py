"""ReRoPE (Su 2023, kexue.fm/archives/9708): f = min(p_q - p_k, w)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rpe3d.drawing.palette import PINK, Style
from rpe3d.geometry.laws.leaky_rerope import leaky_regions
from rpe3d.geometry.region import Region
from rpe3d.geometry.windowed import Windowed


@dataclass(frozen=True, kw_only=True)
class ReRope(Windowed):
    """Show every distance from `window` on as `window`."""

    name: ClassVar[str] = "rerope"
    summary: ClassVar[str] = "ReRoPE: exact window, all farther keys at one distance"
    style: ClassVar[Style] = Style(PINK)

    @property
    def regions(self) -> tuple[Region, ...]:
        return leaky_regions(self.window, slope=0.0)

    @property
    def endless(self) -> bool:
        return True
