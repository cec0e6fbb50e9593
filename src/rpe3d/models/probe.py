"""What a model does with positions, found out by running its own functions rather than by its name."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rpe3d.config import ConfigError
from rpe3d.rotation import rotate


@dataclass(frozen=True)
class Findings:
    """The rotary layout of a model's full-attention layers."""

    rotary: Any
    """The module that makes cos and sin."""
    head_dim: int
    rotary_dim: int
    interleaved: bool
    layers: int
    """Layers whose attention a law changes."""
    stock_layers: int
    """Layers that keep a window of their own."""


def probe(model: nn.Module, config: Any) -> Findings:
    """How the model rotates, or a refusal that says why a law cannot be applied to it."""
    family = type(model).__name__
    rotaries = [m for m in model.modules() if hasattr(m, "inv_freq") or hasattr(m, "full_attention_inv_freq")]
    if not rotaries:
        raise _refusal(family, "it has no rotary embedding that transformers' rope registry reaches")
    attentions = [
        m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling") and hasattr(m, "config")
    ]
    attentions = [m for m in attentions if getattr(m, "is_causal", True)]
    if not attentions or not getattr(model, "_supports_attention_backend", False):
        raise _refusal(family, "its attention does not go through transformers' attention registry")
    full = [m for m in attentions if getattr(m, "sliding_window", None) is None]
    if not full:
        raise _refusal(family, "all of its layers have a sliding window, so none reaches further than it")
    apply = getattr(sys.modules[type(full[0]).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        raise _refusal(family, "its rotation is not a function apply_rotary_pos_emb")
    head_dim = int(getattr(full[0], "head_dim", 0) or config.hidden_size // config.num_attention_heads)
    rotary: Any = rotaries[0]
    theta: Tensor = rotary.inv_freq if hasattr(rotary, "inv_freq") else rotary.full_attention_inv_freq
    interleaved = _interleaved(apply, theta.numel(), head_dim)
    if interleaved is None:
        raise _refusal(family, "its pairs of rotary dimensions are neither halves nor neighbours")
    return Findings(rotary, head_dim, 2 * theta.numel(), interleaved, len(full), len(attentions) - len(full))


def _interleaved(apply: Any, pairs: int, head_dim: int) -> bool | None:
    """Whether the family's function turns neighbours (True) or halves (False); None if it does something else."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(1, 3, pairs, generator=generator, dtype=torch.float64)
    q, k = (torch.randn(1, 1, 3, head_dim, generator=generator, dtype=torch.float64) for _ in range(2))
    for width in dict.fromkeys((head_dim, 2 * pairs)):  # some families cut the rotary part out themselves
        for interleaved in (False, True):
            for wide in (torch.cat([angles, angles], -1), angles.repeat_interleave(2, -1), angles):
                try:
                    got: tuple[Tensor, Tensor] = apply(q[..., :width], k[..., :width], wide.cos(), wide.sin())
                except (RuntimeError, IndexError, TypeError):
                    continue
                cos, sin = angles.cos(), angles.sin()
                ours = [rotate(x[..., :width], None, cos, sin, interleaved=interleaved)[0] for x in (q, k)]
                # Some families turn in float32 whatever they are given.
                if all(
                    a.shape == b.shape and torch.allclose(a.double(), b, atol=1e-5)
                    for a, b in zip(got, ours, strict=True)
                ):
                    return interleaved
    return None


def _refusal(family: str, reason: str) -> ConfigError:
    return ConfigError(f"{family} cannot be extended: {reason}", "`rpe3d doctor` lists what can be")
