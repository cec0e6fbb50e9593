"""CoPE (arXiv 2602.05258; repository hrlics/CoPE): the slowest pairs are slowed down gradually, the last one to 0.

The i-th of the n slowest pairs, i = 0 .. n - 1, turns at θ (1 + cos(π i / (n - 1))) / 2. The published code has n = 20
of 64 pairs for Llama-3-8B, which was trained further with it; for a model that was not, nothing is published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from rpe3d.config import whole
from rpe3d.drawing.palette import DOTTED, SKY, Style
from rpe3d.geometry.law import parameter
from rpe3d.geometry.laws.rope import Rope


@dataclass(frozen=True, kw_only=True)
class Cope(Rope):
    """Remove positions from the slowest pairs, whose angles would leave the range of training in a longer text."""

    name: ClassVar[str] = "cope"
    summary: ClassVar[str] = "CoPE: the slowest pairs slowed down gradually, the last one to 0"
    style: ClassVar[Style] = Style(SKY, DOTTED)
    single_position: ClassVar[bool] = False

    clipped: int = parameter(None, "number of pairs that are slowed down, n; default 5/16 of all pairs, 20 of 64")

    def check(self) -> dict[str, Any]:
        pairs = self.rotary.pairs
        clipped = max(1, 5 * pairs // 16) if self.clipped is None else self.clipped
        return {"clipped": whole("clipped", clipped, most=pairs)}

    def frequencies(self, length: int | None = None) -> Float64[Tensor, " l"]:
        theta, n = self.model_frequencies(), self.clipped
        kept = (1 + torch.cos(math.pi * torch.arange(n, dtype=torch.float64, device="cpu") / max(1, n - 1))) / 2
        return torch.cat([theta[:-n], theta[-n:] * kept])
