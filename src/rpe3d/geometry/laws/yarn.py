"""YaRN (Peng et al. 2023, arXiv 2309.00071): interpolation by parts (section 3.2) and a temperature (section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float64
from torch import Tensor

from rpe3d.config import YarnScaling
from rpe3d.drawing.palette import BLUE, Style
from rpe3d.geometry.frequencies import refuse_scaling, yarn
from rpe3d.geometry.law import parameter
from rpe3d.geometry.laws.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Yarn(Rope):
    """Interpolate slow pairs, keep fast ones, and multiply cos and sin by a temperature."""

    name: ClassVar[str] = "yarn"
    summary: ClassVar[str] = "YaRN: slow pairs interpolated, fast ones kept, softmax temperature"
    style: ClassVar[Style] = Style(BLUE)
    single_position: ClassVar[bool] = False

    beta_fast: float = parameter(32.0, "pairs with more full turns than this in the pretrained length are kept")
    beta_slow: float = parameter(1.0, "pairs with fewer full turns than this are interpolated")
    attention_factor: float = parameter(None, "multiplies cos and sin; default 0.1 ln(context / pretrained) + 1")

    def check(self) -> dict[str, Any]:
        scaling = YarnScaling(
            factor=self.factor,
            original_max_position_embeddings=self.pretrained,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            attention_factor=self.attention_factor,
        )
        refuse_scaling(self.name, self.rotary)
        return {name: getattr(scaling, name) for name in self.parameters()}

    def frequencies(self, length: int | None = None) -> Float64[Tensor, " l"]:
        return yarn(
            2 * self.rotary.pairs,
            self.rotary.rope_theta,
            factor=self.factor,
            trained=self.pretrained,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            truncate=True,
        )

    @property
    def attention_scaling(self) -> float:
        return self.attention_factor
