"""Position interpolation, PI (Chen et al. 2023, arXiv 2306.15595): position p becomes p · L_p / L."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float64
from torch import Tensor

from rpe3d.drawing.palette import SKY, Style
from rpe3d.geometry.laws.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Linear(Rope):
    """Squeeze all positions into the pretrained length: RoPE with every frequency divided by L / L_p."""

    name: ClassVar[str] = "linear"
    summary: ClassVar[str] = "position interpolation (PI): positions squeezed into the pretrained length"
    style: ClassVar[Style] = Style(SKY)

    def frequencies(self, length: int | None = None) -> Float64[Tensor, " l"]:
        return self.model_frequencies() / self.factor

    @property
    def rate(self) -> float:
        return 1 / self.factor
