"""Dynamic NTK (emozilla 2023): NTK-aware scaling with α = s n / L_p - (s - 1) for the n tokens seen so far.

The same as the rope type `dynamic` of Hugging Face, whose `factor` is `scale` here. Cached keys keep the frequencies of
the length at which they were rotated, as they do there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float64
from torch import Tensor

from rpe3d.config import real, whole
from rpe3d.drawing.palette import BLUE, DOTTED, Style
from rpe3d.geometry.frequencies import ntk_base, plain, refuse_scaling
from rpe3d.geometry.law import parameter
from rpe3d.geometry.laws.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Dynamic(Rope):
    """Raise the base with the tokens seen; up to the pretrained length it is stock RoPE."""

    name: ClassVar[str] = "dynamic"
    summary: ClassVar[str] = "dynamic NTK: the base grows with the tokens seen, stock up to the pretrained length"
    style: ClassVar[Style] = Style(BLUE, DOTTED)
    single_position: ClassVar[bool] = False
    grows: ClassVar[bool] = True

    scale: float = parameter(1.0, "s in α = s L / L_p - (s - 1); Hugging Face calls it factor")

    def check(self) -> dict[str, Any]:
        refuse_scaling(self.name, self.rotary)
        return {"scale": real("scale", self.scale, least=1.0, most=1e9)}

    def frequencies(self, length: int | None = None) -> Float64[Tensor, " l"]:
        seen = max(self.pretrained, self.context if length is None else whole("length", length))
        alpha = 1 + self.scale * (seen / self.pretrained - 1)
        dim = 2 * self.rotary.pairs
        return plain(dim, ntk_base(dim, self.rotary.rope_theta, alpha))
