"""The paper's theory of position encodings, for any law: decay, resolution, Figure 3, the Bloch sphere."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from rpe3d.config import choice, whole
from rpe3d.geometry.law import Law
from rpe3d.geometry.laws.definition import Definition


def _partial_sums(law: Law, query: Tensor | int, key: Tensor | int) -> Float64[Tensor, "... l"]:
    """Return |E_1| .. |E_{d/2}|, E_l = Σ_{k<l} e^{i angle_k}; a phase common to all planes drops out (eq. 6)."""
    return torch.exp(1j * law.relative_angles(query, key)).cumsum(-1).abs()


def decay_bound(law: Law, query: Tensor | int, key: Tensor | int) -> Float64[Tensor, "..."]:
    """Return E = 1/(d/2) Σ_{l=1}^{d/2} |E_l| (eq. 7; RoFormer 3.4.3): how strongly a pair can correlate.

    For RoPE it is a function of the distance alone: `decay_bound(rope, distance, 0)`.
    """
    return _partial_sums(law, query, key).mean(-1)


def score_bound(
    law: Law,
    query: Tensor | int,
    key: Tensor | int,
    q: Complex128[Tensor, "... l"],
    k: Complex128[Tensor, "... l"],
) -> Float64[Tensor, "..."]:
    """Return max_l |h_{l+1} - h_l| Σ_l |E_{l+1}| >= |s|, by Abel's transformation (eq. 6), h_l = q_l k_l*."""
    h = q * k.conj()
    following = torch.cat([h[..., 1:], torch.zeros_like(h[..., :1])], dim=-1)
    return (following - h).abs().amax(-1) * _partial_sums(law, query, key).sum(-1)


def resolution(law: Law, query: Tensor | int, key: Tensor | int) -> Float64[Tensor, "... l"]:
    """Return the difference between the angles a query sees `key` and the next token at, per plane, in units of θ_l.

    With key = query - 1 this is the resolution of Theorem 1: 1 for RoPE, L_p / L for PI, 1 within a chunk of 3D-RPE.
    """
    step = law.relative_angles(query, key) - law.relative_angles(query, torch.as_tensor(key) + 1)
    return step / law.model_frequencies()


def relative_position_matrix(
    chunk: int, length: int, form: Literal["printed", "definition"] = "printed"
) -> Float64[Tensor, "length length 2"]:
    """Return Figure 3: (between chunks, within chunk) of each query (row) and key (column); NaN above the diagonal.

    `printed` is what the figure shows, (distance div c, distance mod c), which no per-token rotation can
    produce. `definition` is what Definition 1 gives, (i - j, m - n).
    """
    chunk, length = whole("chunk", chunk), whole("length", length)
    p = torch.arange(length, device="cpu")
    query, key = p[:, None], p[None, :]
    if choice("form", form, ("printed", "definition")) == "printed":
        pair = ((query - key) // chunk, (query - key) % chunk)
    else:
        pair = (query // chunk - key // chunk, query % chunk - key % chunk)
    return torch.stack(pair, dim=-1).to(torch.float64).masked_fill((key > query)[..., None], torch.nan)


def bloch_state(law: Definition, position: Tensor, plane: int = 0) -> Complex128[Tensor, "... 2"]:
    """Return (α, β) of eq. 1: e^{iθ} (cos(φ/2) |0> + sin(φ/2) |1>) with θ = m θ_l, φ/2 = φ_j, θ_1 = 0."""
    m, j = position % law.chunk_in_use, position // law.chunk_in_use
    theta = law.frequencies()[whole("plane", plane, least=0, most=law.rotary.pairs - 1)] * m
    phi = law.phi_base ** -j.to(torch.float64)
    return torch.exp(1j * theta)[..., None] * torch.stack([phi.cos(), phi.sin()], dim=-1)


def bloch_vector(
    law: Definition,
    position: Tensor,
    plane: int = 0,
    *,
    longitude: Literal["relative", "global"] = "relative",
) -> Float64[Tensor, "... 3"]:
    """Return the point of a token on the unit sphere.

    `relative` is the Bloch sphere itself, whose longitude is θ_1: it does not show the global phase, and so hides the
    token's offset m. `global` draws m θ_l as the longitude, as the paper's Figure 1 (b) does.
    """
    state = bloch_state(law, position, plane)
    alpha, beta = state[..., 0], state[..., 1]
    xy = 2 * alpha.conj() * beta
    if choice("longitude", longitude, ("relative", "global")) == "global":
        offset = position % law.chunk_in_use
        xy = xy * torch.exp(1j * law.frequencies()[plane] * offset)
    return torch.stack([xy.real, xy.imag, alpha.abs() ** 2 - beta.abs() ** 2], dim=-1)
