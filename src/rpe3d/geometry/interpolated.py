"""Laws that change the frequencies and nothing else: plain RoPE and its interpolations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float64
from torch import Tensor

from rpe3d.config import ConfigError, YarnScaling, real, whole
from rpe3d.geometry.frequencies import ntk_base, plain, yarn
from rpe3d.geometry.law import Law, parameter
from rpe3d.geometry.plan import Region


@dataclass(frozen=True, kw_only=True)
class Rope(Law):
    """Every pair at its true distance, at the model's own frequencies (eqs. 2-3)."""

    name: ClassVar[str] = "rope"
    summary: ClassVar[str] = "plain RoPE: the stock model, at any length"
    needs_attention: ClassVar[bool] = False

    @property
    def regions(self) -> tuple[Region, ...]:
        return (Region(),)


@dataclass(frozen=True, kw_only=True)
class Linear(Rope):
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): p becomes p · L_p / L."""

    name: ClassVar[str] = "linear"
    summary: ClassVar[str] = "position interpolation (PI): positions squeezed into the pretrained length"

    def frequencies(self, length: int | None = None) -> Float64[Tensor, " l"]:
        return self.model_frequencies() / self.factor

    @property
    def rate(self) -> float:
        return 1 / self.factor


@dataclass(frozen=True, kw_only=True)
class _NewBase(Rope):
    """Laws that rebuild the frequencies from the base, so a model's own scaling would be lost."""

    single_position: ClassVar[bool] = False

    def check(self) -> dict[str, Any]:
        if self.rotary.scaling is not None:
            raise ConfigError(
                f"{self.name} rebuilds the frequencies and would drop the model's own "
                f"{self.rotary.scaling.rope_type!r} scaling",
                "choose linear or a chunk law, which keep it",
            )
        return {}


@dataclass(frozen=True, kw_only=True)
class Ntk(_NewBase):
    """Static NTK-aware scaling: base · α^(d/(d-2)), α = L / L_p."""

    name: ClassVar[str] = "ntk"
    summary: ClassVar[str] = "NTK-aware base: slow pairs stretched, fast ones kept"

    alpha: float = parameter(None, "stretch of the slowest pair; default context / pretrained")

    def check(self) -> dict[str, Any]:
        alpha = self.factor if self.alpha is None else self.alpha
        return super().check() | {"alpha": real("alpha", alpha, least=1.0, most=1e9)}

    def frequencies(self, length: int | None = None) -> Float64[Tensor, " l"]:
        dim = 2 * self.rotary.pairs
        return plain(dim, ntk_base(dim, self.rotary.rope_theta, self.alpha))


@dataclass(frozen=True, kw_only=True)
class Dynamic(_NewBase):
    """Dynamic NTK: the base grows with the tokens seen, α = s L / L_p - (s - 1), and is stock up to L_p."""

    name: ClassVar[str] = "dynamic"
    summary: ClassVar[str] = "dynamic NTK: the base grows with the tokens seen, stock up to the pretrained length"

    scale: float = parameter(1.0, "s in α = s L / L_p - (s - 1); Hugging Face calls it factor")

    def check(self) -> dict[str, Any]:
        return super().check() | {"scale": real("scale", self.scale, least=1.0, most=1e9)}

    def frequencies(self, length: int | None = None) -> Float64[Tensor, " l"]:
        seen = max(self.pretrained, self.context if length is None else whole("length", length))
        alpha = 1 + self.scale * (seen / self.pretrained - 1)
        dim = 2 * self.rotary.pairs
        return plain(dim, ntk_base(dim, self.rotary.rope_theta, alpha))


@dataclass(frozen=True, kw_only=True)
class Yarn(_NewBase):
    """YaRN (arXiv 2309.00071): interpolation by parts, and a softmax temperature."""

    name: ClassVar[str] = "yarn"
    summary: ClassVar[str] = "YaRN: slow pairs interpolated, fast ones kept, softmax temperature"

    beta_fast: float = parameter(32.0, "pairs that turn more often than this in the pretrained length are kept")
    beta_slow: float = parameter(1.0, "pairs that turn less often than this are interpolated")
    attention_factor: float = parameter(None, "multiplies cos and sin; default 0.1 ln(context / pretrained) + 1")

    def check(self) -> dict[str, Any]:
        scaling = self._scaling()
        names = ("beta_fast", "beta_slow", "attention_factor")
        return super().check() | {name: getattr(scaling, name) for name in names}

    def _scaling(self) -> YarnScaling:
        return YarnScaling(
            factor=self.factor,
            original_max_position_embeddings=self.pretrained,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            attention_factor=self.attention_factor,
        )

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
