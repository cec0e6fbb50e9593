"""Static NTK-aware scaling (bloc97 2023): RoPE at the base b · α^(d/(d-2)), by default with α = L / L_p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float64
from torch import Tensor

from rpe3d.config import real
from rpe3d.drawing.palette import BLUE, DASHED, Style
from rpe3d.geometry.frequencies import ntk_base, plain, refuse_scaling
from rpe3d.geometry.law import parameter
from rpe3d.geometry.laws.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Ntk(Rope):
    """Raise the base so that the slowest pair is stretched by α and the fastest is kept."""

    name: ClassVar[str] = "ntk"
    summary: ClassVar[str] = "NTK-aware base: slow pairs stretched, fast ones kept"
    style: ClassVar[Style] = Style(BLUE, DASHED)
    single_position: ClassVar[bool] = False

    alpha: float = parameter(None, "stretch of the slowest pair; default context / pretrained")

    def check(self) -> dict[str, Any]:
        refuse_scaling(self.name, self.rotary)
        alpha = self.factor if self.alpha is None else self.alpha
        return {"alpha": real("alpha", alpha, least=1.0, most=1e9)}

    def frequencies(self, length: int | None = None) -> Float64[Tensor, " l"]:
        dim = 2 * self.rotary.pairs
        return plain(dim, ntk_base(dim, self.rotary.rope_theta, self.alpha))
