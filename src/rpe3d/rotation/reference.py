"""Rotation, the specification: what `rpe3d.rotation.kernel` must equal."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def rotate(
    q: Float[Tensor, "b hq t d"],
    k: Float[Tensor, "b hk t d"] | None,
    cos: Float[Tensor, "... t l"],
    sin: Float[Tensor, "... t l"],
    *,
    interleaved: bool,
) -> tuple[Float[Tensor, "b hq t d"], Float[Tensor, "b hk t d"] | None]:
    """Turn both by the same angles (RoFormer, arXiv 2104.09864, eq. 34)."""
    return turn(q, cos, sin, interleaved), None if k is None else turn(k, cos, sin, interleaved)


def turn(
    x: Float[Tensor, "b h t d"],
    cos: Float[Tensor, "... t l"],
    sin: Float[Tensor, "... t l"],
    interleaved: bool,
) -> Float[Tensor, "b h t d"]:
    """Multiply pair l of token t, as x₁ + i x₂, by e^{i angle[t, l]}; the other dimensions pass through.

    The pairs stand side by side (2l, 2l + 1) or half a rotary dimension apart. Computed in the wider type of x and
    the table, so at least in float32.
    """
    pairs, wide, axis = cos.shape[-1], torch.promote_types(x.dtype, cos.dtype), -1 if interleaved else -2
    cos, sin = cos.to(wide).unsqueeze(-3), sin.to(wide).unsqueeze(-3)  # one angle for all heads
    turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    shape = (pairs, 2) if interleaved else (2, pairs)
    first, second = turning.to(wide).unflatten(-1, shape).unbind(axis)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=axis)
    return torch.cat((turned.flatten(-2).to(x.dtype), rest), dim=-1)
