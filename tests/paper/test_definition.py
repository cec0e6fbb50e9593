"""Definition 1, eqs. 1-5 and Supplement B, against complex arithmetic in float64 and explicit matrices."""

from __future__ import annotations

import math

import pytest
import torch

from rpe3d import make_law
from rpe3d.geometry import bloch_state, bloch_vector
from rpe3d.rotation import cos_sin, rotate

CHUNK, DIM, BASE = 7, 16, 10000.0
POSITION = torch.arange(40)
THETA = torch.tensor([BASE ** (-2 * pair / DIM) for pair in range(DIM // 2)], dtype=torch.float64)


@pytest.fixture
def law():
    return make_law("3d-rpe-definition", pretrained=16, context=40, head_dim=DIM, chunk=CHUNK)


def encode(law, h):
    """h~ of Definition 1 by the library: the law's angles, the reference rotation."""
    (region,) = law.regions
    cos, sin = cos_sin(region.query.angle(POSITION, law.frequencies()), dtype=torch.float64)
    return rotate(h[None, None], None, cos, sin, impl="reference")[0][0, 0]


def as_complex(h):
    """h^1 + i h^2 with the halves of the vector as the two parts."""
    return torch.complex(h[..., : DIM // 2], h[..., DIM // 2 :])


def phi(chunk):
    return BASE ** -chunk.double()


def test_definition_1_is_the_complex_product(law):
    """eq. 4: h~ = e^{i m θ} (cos φ_j h⊥ + sin φ_j h), h⊥ = i h, in complex128."""
    h = torch.randn(40, DIM, dtype=torch.float64)
    m, j = POSITION % CHUNK, POSITION // CHUNK
    bracket = phi(j).cos()[:, None] * (1j * as_complex(h)) + phi(j).sin()[:, None] * as_complex(h)
    expected = torch.exp(1j * m[:, None] * THETA) * bracket
    torch.testing.assert_close(as_complex(encode(law, h)), expected, rtol=0, atol=1e-14)


def test_h_perp_is_the_vector_of_supplement_b1():
    """Supplement B.1: [-h^2, h^1] is i h in the half-split pairing."""
    h = torch.randn(DIM, dtype=torch.float64)
    perp = torch.cat([-h[DIM // 2 :], h[: DIM // 2]])
    torch.testing.assert_close(as_complex(perp), 1j * as_complex(h), rtol=0, atol=0)


def test_definition_1_is_one_turn_by_psi(law):
    """One rotation: ψ = m θ_l + π/2 - φ_j; nothing leaves the plane of a pair (an erratum of the title's 3D)."""
    h = torch.randn(40, DIM, dtype=torch.float64)
    psi = (POSITION % CHUNK)[:, None] * THETA + math.pi / 2 - phi(POSITION // CHUNK)[:, None]
    expected = torch.exp(1j * psi) * as_complex(h)
    torch.testing.assert_close(as_complex(encode(law, h)), expected, rtol=0, atol=1e-14)


def test_the_matrix_of_supplement_b1_gives_the_same_vector(law):
    """R_m^θ written out entry by entry, applied to cos φ_j h⊥ + sin φ_j h."""
    h = torch.randn(40, DIM, dtype=torch.float64)
    half, encoded = DIM // 2, encode(law, h)
    for p in (0, 1, 6, 7, 20, 39):
        m, j = p % CHUNK, p // CHUNK
        matrix = torch.zeros(DIM, DIM, dtype=torch.float64)
        for pair in range(half):
            cos, sin = math.cos(m * THETA[pair]), math.sin(m * THETA[pair])
            matrix[pair, pair], matrix[pair, pair + half] = cos, -sin
            matrix[pair + half, pair], matrix[pair + half, pair + half] = sin, cos
        perp = torch.cat([-h[p, half:], h[p, :half]])
        angle = BASE**-j
        expected = matrix @ (math.cos(angle) * perp + math.sin(angle) * h[p])
        torch.testing.assert_close(encoded[p], expected, rtol=0, atol=1e-14)


def test_within_a_chunk_the_score_is_ropes(law):
    """Section 3.1: for i = j eq. 5 is eq. 3, so the π/2 and the phase cancel."""
    q, k = torch.randn(2, 40, DIM, dtype=torch.float64)
    scores = encode(law, q) @ encode(law, k).T
    rope = torch.exp(1j * POSITION[:, None] * THETA)
    stock = ((as_complex(q) * rope)[:, None] * (as_complex(k) * rope)[None].conj()).real.sum(-1)
    same = POSITION[:, None] // CHUNK == POSITION[None, :] // CHUNK
    torch.testing.assert_close(scores[same], stock[same], rtol=0, atol=1e-12)
    assert not torch.allclose(scores[~same], stock[~same])


def test_the_score_is_the_law_s_relative_angle(law):
    """What attention computes from turned q and k is Re Σ q_l k_l* e^{i angle_l}, angle from relative_angles."""
    q, k = torch.randn(2, 40, DIM, dtype=torch.float64)
    angles = law.relative_angles(POSITION[:, None], POSITION[None, :])
    expected = (as_complex(q)[:, None] * as_complex(k)[None].conj() * torch.exp(1j * angles)).real.sum(-1)
    torch.testing.assert_close(encode(law, q) @ encode(law, k).T, expected, rtol=0, atol=1e-12)


def test_the_bloch_state_of_a_token_is_eq_1(law):
    """e^{iθ} (cos(φ/2) |0> + sin(φ/2) |1>) with |1> = h and |0> = h⊥ rebuilds Definition 1."""
    h = torch.randn(40, DIM, dtype=torch.float64)
    for plane in (0, 3):
        alpha, beta = bloch_state(law, POSITION, plane).unbind(-1)
        vector = as_complex(h)[:, plane]
        torch.testing.assert_close(
            alpha * 1j * vector + beta * vector, as_complex(encode(law, h))[:, plane], rtol=0, atol=1e-14
        )
        torch.testing.assert_close(alpha.abs() ** 2 + beta.abs() ** 2, torch.ones(40, dtype=torch.float64))


def test_bloch_vectors_lie_on_the_unit_sphere_at_latitude_two_phi(law):
    """Supplement A: φ/2 is the angle between chunks, so z = cos φ with φ = 2 φ_j."""
    for longitude in ("relative", "global"):
        point = bloch_vector(law, POSITION, 1, longitude=longitude)
        torch.testing.assert_close(point.norm(dim=-1), torch.ones(40, dtype=torch.float64))
        torch.testing.assert_close(point[:, 2], (2 * phi(POSITION // CHUNK)).cos(), rtol=0, atol=1e-14)
