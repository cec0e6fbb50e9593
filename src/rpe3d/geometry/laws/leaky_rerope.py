"""Leaky ReRoPE (Su 2023, kexue.fm/archives/9708): f = d below w, then w + s (d - w), for d = p_q - p_k.

The slope s is written 1/k there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rpe3d.config import real
from rpe3d.drawing.palette import DASHED, PINK, Style
from rpe3d.geometry.law import parameter
from rpe3d.geometry.region import Region, Turn
from rpe3d.geometry.windowed import Windowed, used_length


@dataclass(frozen=True, kw_only=True)
class LeakyReRope(Windowed):
    """Let the distance grow beyond `window` at `slope`."""

    name: ClassVar[str] = "leaky-rerope"
    summary: ClassVar[str] = "Leaky ReRoPE: exact window, farther distances grow at a small slope"
    style: ClassVar[Style] = Style(PINK, DASHED)

    slope: float = parameter(None, "growth per token beyond the window; by default 5/8 L_p is reached at the context")

    def check(self) -> dict[str, Any]:
        parameters = super().check()
        window = parameters["window"]
        slope = self.slope
        if slope is None:
            slope = max(0, used_length(self.pretrained) - 1 - window) / (self.context - window)
        return parameters | {"slope": real("slope", slope, most=1.0)}

    @property
    def regions(self) -> tuple[Region, ...]:
        return leaky_regions(self.window, self.slope)

    @property
    def endless(self) -> bool:
        return self.slope == 0


def leaky_regions(window: int, slope: float) -> tuple[Region, ...]:
    """Return the regions of f = p_q - p_k below `window`, then window + slope (p_q - p_k - window)."""
    far_query = Turn(stride=slope, start=window * (1 - slope))
    return (Region(last=window - 1), Region(first=window, query=far_query, key=Turn(stride=slope)))
