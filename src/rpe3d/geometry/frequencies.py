"""Base frequencies θ_l of the rotary planes, in float64. One function per published scheme."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from rpe3d.config import ConfigError, LinearScaling, Llama3Scaling, LongropeScaling, Rotary, YarnScaling


def plain(dim: int, base: float) -> Float64[Tensor, " l"]:
    """Return θ_l = base^(-2l/d), l = 0 .. d/2 - 1 (Supplement B.1; RoFormer eq. 15)."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    return torch.as_tensor(base, dtype=torch.float64, device="cpu") ** -exponents


def ntk_base(dim: int, base: float, alpha: float) -> float:
    """Return the NTK-aware base: base · α^(d/(d-2)), so that the slowest pair is stretched by exactly α."""
    if dim < 4:
        raise ConfigError(
            f"rotary_dim is {dim}, but NTK scaling needs at least 4",
            "choose another law: one pair has one frequency",
        )
    stretched: float = base * alpha ** (dim / (dim - 2))
    return stretched


def refuse_scaling(name: str, rotary: Rotary) -> None:
    """Refuse a model with a scaling: a law called `name` rebuilds the frequencies from the base and would drop it."""
    if rotary.scaling is not None:
        raise ConfigError(
            f"{name} rebuilds the frequencies and would drop the model's own {rotary.scaling.rope_type!r} scaling",
            "choose linear or a chunk law, which keep it",
        )


def yarn(
    dim: int, base: float, *, factor: float, trained: int, beta_fast: float, beta_slow: float, truncate: bool
) -> Float64[Tensor, " l"]:
    """Interpolate by parts, as YaRN does (arXiv 2309.00071, section 3.2).

    A pair that turns more than `beta_fast` times within the trained length is kept, one that turns less than
    `beta_slow` times is divided by `factor`, with a linear ramp over the pair index between the two.
    """

    def pair_that_turns(times: float) -> float:
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)
    theta = plain(dim, base)
    return theta / factor * interpolated + theta * (1 - interpolated)


def llama3(theta: Float64[Tensor, " l"], scaling: Llama3Scaling) -> Float64[Tensor, " l"]:
    """Scale as Llama 3.1: wavelengths above L/low are divided by `factor`, below L/high kept, smooth between."""
    turns = scaling.original_max_position_embeddings * theta / (2 * math.pi)  # over the original length
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * theta / scaling.factor + kept * theta


def model_frequencies(rotary: Rotary) -> Float64[Tensor, " l"]:
    """Return the frequencies that the pretrained model itself uses, including its own scaling."""
    dim = 2 * rotary.pairs
    theta = plain(dim, rotary.rope_theta)
    match rotary.scaling:
        case None:
            return theta
        case LinearScaling(factor=factor):
            return theta / factor
        case Llama3Scaling() as scaling:
            return llama3(theta, scaling)
        case YarnScaling() as scaling:
            return yarn(
                dim,
                rotary.rope_theta,
                factor=scaling.factor,
                trained=scaling.original_max_position_embeddings,
                beta_fast=scaling.beta_fast,
                beta_slow=scaling.beta_slow,
                truncate=scaling.truncate,
            )
        case LongropeScaling(long_factor=divisors):
            if len(divisors) != rotary.pairs:
                raise ConfigError(
                    f"long_factor has {len(divisors)} numbers, but {rotary.pairs} pairs rotate",
                    "pass the model's complete rope parameters",
                )
            return theta / torch.tensor(divisors, dtype=torch.float64, device="cpu")
    raise TypeError(f"no frequencies for {rotary.scaling!r}")


def model_attention_scaling(rotary: Rotary) -> float:
    """Return the factor of cos and sin in the pretrained model: YaRN's or LongRoPE's temperature, or 1."""
    if isinstance(rotary.scaling, YarnScaling | LongropeScaling):
        assert rotary.scaling.attention_factor is not None
        return rotary.scaling.attention_factor
    return 1.0
