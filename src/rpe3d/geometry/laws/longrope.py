"""LongRoPE (Ding et al. 2024, arXiv 2402.13753) with given factors: each θ_l is divided by a separate factor.

The same as the rope type `longrope` of Hugging Face: `short_factor` up to the pretrained length L_p, `long_factor`
beyond it, and cos and sin multiplied by sqrt(1 + ln s / ln L_p) at every length, s = L / L_p. Cached keys keep the
frequencies of the length at which they were rotated. A text of exactly L_p tokens that follows a longer one still has
the long factors: transformers resets a growing rope type only below that length.

The factors are found for a model by a search, which rpe3d does not include: by default they are s for every pair beyond
the pretrained length (position interpolation), and 1 up to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from rpe3d.config import ConfigError, real, whole
from rpe3d.drawing.palette import DASHED, SKY, Style
from rpe3d.geometry.frequencies import refuse_scaling
from rpe3d.geometry.law import parameter
from rpe3d.geometry.laws.rope import Rope


@dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """Divide every frequency by a separate factor, with one set of factors for short texts and one for long ones."""

    name: ClassVar[str] = "longrope"
    summary: ClassVar[str] = "LongRoPE: a given factor for every pair, one set for short texts and one for long ones"
    style: ClassVar[Style] = Style(SKY, DASHED)
    single_position: ClassVar[bool] = False
    grows: ClassVar[bool] = True

    long_factor: tuple[float, ...] = parameter(
        None, "divisors of the frequencies beyond the pretrained length, e.g. 1-1.5-4; default context / pretrained"
    )
    short_factor: tuple[float, ...] = parameter(None, "divisors up to the pretrained length; default 1 for every pair")
    attention_factor: float = parameter(
        None, "multiplies cos and sin; default sqrt(1 + ln(context / pretrained) / ln pretrained)"
    )

    def check(self) -> dict[str, Any]:
        refuse_scaling(self.name, self.rotary)
        default = math.sqrt(1 + math.log(self.factor) / math.log(self.pretrained))
        factor = default if self.attention_factor is None else self.attention_factor
        return {
            "long_factor": _factors("long_factor", self.long_factor, self.factor, self.rotary.pairs),
            "short_factor": _factors("short_factor", self.short_factor, 1.0, self.rotary.pairs),
            "attention_factor": real("attention_factor", factor, above=True, most=1e9),
        }

    def frequencies(self, length: int | None = None) -> Float64[Tensor, " l"]:
        seen = self.context if length is None else whole("length", length)
        factors = self.long_factor if seen > self.pretrained else self.short_factor
        return self.model_frequencies() / torch.tensor(factors, dtype=torch.float64, device="cpu")

    @property
    def attention_scaling(self) -> float:
        return self.attention_factor


def _factors(name: str, given: Any, default: float, pairs: int) -> tuple[float, ...]:
    """Parse one factor for each pair, from a sequence, or from text such as 1-1.5-4."""
    if given is None:
        return (default,) * pairs
    try:
        items = [float(part) for part in given.split("-")] if isinstance(given, str) else list(given)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is {given!r}, which is not a list of numbers", "pass one number per pair") from None
    if len(items) != pairs:
        raise ConfigError(
            f"{name} has {len(items)} numbers for {pairs} pairs of dimensions", f"pass {pairs}, the fastest pair first"
        )
    return tuple(real(name, item, above=True, most=1e9) for item in items)
