"""What the paper proves and does hold: eqs. 6-7 and Theorem 1, for any law; Figure 3's two matrices."""

from __future__ import annotations

import math

import pytest
import torch

from rpe3d import laws, make_law
from rpe3d.geometry import decay_bound, relative_position_matrix, resolution, score_bound
from rpe3d.geometry.phased import interpolated_chunk

LLAMA2 = {"pretrained": 4096, "head_dim": 128, "rope_theta": 10000.0}


@pytest.mark.parametrize("distance", [0, 1, 100, 4000])
def test_the_bound_of_rope_is_roformers_formula(distance):
    """RoFormer section 3.4.3: (1 / (d/2)) Σ_j |S_j|, S_j = Σ_{t<j} e^{i (m-n) θ_t}, summed term by term."""
    partial, total = 0j, 0.0
    for pair in range(64):
        angle = distance * 10000.0 ** (-2 * pair / 128)
        partial += complex(math.cos(angle), math.sin(angle))
        total += abs(partial)
    law = make_law("rope", context=8192, **LLAMA2)
    assert decay_bound(law, distance, 0).item() == pytest.approx(total / 64, rel=1e-12)


@pytest.mark.parametrize("name", laws())
def test_no_score_exceeds_the_bound_of_eq_6(name):
    """Abel's transformation, for every law and random vectors at random visible pairs."""
    law = make_law(name, context=4096 if name == "string" else 16384, **LLAMA2)
    query = torch.randint(0, 16384, (400,))
    key = (query - torch.randint(0, 2000, (400,))).clamp(min=0)
    q, k = torch.randn(2, 400, 64, dtype=torch.complex128)
    score = (q * k.conj() * torch.exp(1j * law.relative_angles(query, key))).sum(-1).real.abs()
    bound = score_bound(law, query, key, q, k)
    assert (score <= bound * (1 + 1e-12)).all()
    assert (score > 0).all()


def test_rope_resolves_neighbours_by_one():
    """Supplement C: E_rope = 1."""
    assert torch.allclose(
        resolution(make_law("rope", context=16384, **LLAMA2), 500, 499), torch.ones(64, dtype=torch.float64)
    )


@pytest.mark.parametrize("context", [8192, 16384, 32768])
def test_interpolated_rope_resolves_neighbours_by_the_ratio_of_lengths(context):
    """Supplement C: E'_rope = L_p / L."""
    law = make_law("linear", context=context, **LLAMA2)
    expected = torch.full((64,), 4096 / context, dtype=torch.float64)
    torch.testing.assert_close(resolution(law, 500, 499), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["3d-rpe-definition", "3d-rpe-dual-chunk"])
@pytest.mark.parametrize("context", [8192, 16384, 32768])
def test_theorem_1_interpolated_3d_rpe_resolves_better_than_interpolated_rope(name, context):
    """Theorem 1: 1 within a chunk, and more than L_p / L in absolute value at a border, where c' >= 3."""
    law = make_law(name, context=context, interpolate=True, **LLAMA2)
    c = law.chunk_in_use
    assert c >= 3
    inside = torch.tensor([1, 2, c - 1, c + 1, 2 * c - 1])
    torch.testing.assert_close(
        resolution(law, inside, inside - 1), torch.ones(5, 64, dtype=torch.float64), rtol=0, atol=1e-7
    )
    border = torch.arange(1, context // c) * c
    assert (resolution(law, border, border - 1)[:, 0].abs() > 4096 / context).all()


def test_interpolation_keeps_the_number_of_chunks():
    """Proof of Theorem 1: n = ceil(L_p / c), c' = ceil(L / n)."""
    assert interpolated_chunk(4096, 16384, 1024) == 4096
    assert interpolated_chunk(4096, 10000, 1000) == 2000
    law = make_law("3d-rpe-definition", context=10000, chunk=1000, interpolate=True, **LLAMA2)
    assert law.chunk_in_use == 2000
    assert math.ceil(10000 / law.chunk_in_use) == math.ceil(4096 / 1000)


@pytest.mark.parametrize("name", ["3d-rpe-definition", "3d-rpe-dual-chunk"])
@pytest.mark.parametrize("context", [4096, 5000, 8192, 100_000])
def test_by_default_interpolation_respects_the_condition_of_theorem_1(name, context):
    """c' <= L_p (and c' <= w where positions above w are clipped)."""
    law = make_law(name, context=context, interpolate=True, **LLAMA2)
    assert law.chunk_in_use <= getattr(law, "window", 4096)


def test_figure_3_as_printed():
    """c = 4, L = 12: the first column counts (0,0) .. (0,3), (1,0) .. (2,3) down the rows."""
    matrix = relative_position_matrix(4, 12)
    assert matrix.shape == (12, 12, 2)
    column = [(0.0, 0.0), (0.0, 1.0), (0.0, 2.0), (0.0, 3.0), (1.0, 0.0), (1.0, 1.0)]
    assert [tuple(pair) for pair in matrix[:6, 0].tolist()] == column
    assert [tuple(pair) for pair in matrix[7, 2:8].tolist()] == column[::-1]
    assert matrix[3, 4].isnan().all()


def test_figure_3_as_definition_1_gives_it():
    """(i - j, m - n), which is what the law's own angles contain."""
    matrix = relative_position_matrix(4, 12, "definition")
    law = make_law("3d-rpe-definition", pretrained=8, context=12, head_dim=8, chunk=4)
    position = torch.arange(12)
    angles = law.relative_angles(position[:, None], position[None, :])
    phi = 10000.0 ** -(position // 4).double()
    phase = -(phi[:, None] - phi[None, :])
    within = (angles[..., 0] - phase) / law.frequencies()[0]
    causal = position[None, :] <= position[:, None]
    torch.testing.assert_close(within[causal], matrix[..., 1][causal], rtol=0, atol=1e-12)
    assert matrix[4, 3].tolist() == [1.0, -3.0]
