"""Where the paper, as printed, does not hold. One test per entry of docs/errata.md."""

from __future__ import annotations

import math

import pytest
import torch

from rpe3d import make_law
from rpe3d.config import ConfigError
from rpe3d.geometry import bloch_vector, decay_bound, relative_position_matrix, resolution

LLAMA2 = {"pretrained": 4096, "head_dim": 128, "rope_theta": 10000.0}


def turned(h, angle):
    """The vector of one plane, turned: complex128."""
    return h * torch.exp(1j * torch.as_tensor(angle, dtype=torch.float64))


def test_eq_5_has_the_wrong_sign_of_the_phase():
    """eq. 4 gives -(φ_i - φ_j); eq. 5 prints +. Chunks 0 and 1: φ_0 - φ_1 = 1 - 1e-4 of a radian."""
    law = make_law("3d-rpe-definition", context=16384, chunk=1000, **LLAMA2)
    phi_i, phi_j = 10000.0**-1, 10000.0**-0
    q, k = torch.tensor(0.3 + 0.8j, dtype=torch.complex128), torch.tensor(-0.5 + 0.6j, dtype=torch.complex128)
    encoded = (turned(1j * q, -phi_i) * turned(1j * k, -phi_j).conj()).real
    product = q * k.conj()
    assert encoded == pytest.approx((product * torch.exp(torch.tensor(-1j * (phi_i - phi_j)))).real.item(), abs=1e-7)
    assert encoded != pytest.approx((product * torch.exp(torch.tensor(1j * (phi_i - phi_j)))).real.item(), abs=0.1)
    assert law.relative_angles(1000, 0)[0] == pytest.approx(-(phi_i - phi_j), abs=1e-12)


def test_eq_5_drops_the_cross_terms_of_the_complex_product():
    """Re[e^{i x} (q_l k_l + q_{l+d/2} k_{l+d/2})] is not Re[e^{i x} q k*]: the imaginary part of q k* is missing."""
    q, k, x = 0.3 + 0.8j, -0.5 + 0.6j, 0.7
    printed = math.cos(x) * (q.real * k.real + q.imag * k.imag)
    score = (turned(torch.tensor(q), x) * torch.tensor(k).conj()).real.item()
    missing = -math.sin(x) * (q.imag * k.real - q.real * k.imag)
    assert score == pytest.approx(printed + missing, abs=1e-7)
    assert abs(missing) > 0.1


@pytest.mark.parametrize(("dtype", "first_equal"), [(torch.bfloat16, 2), (torch.float32, 3)])
def test_the_printed_phase_tells_the_first_chunks_apart_and_no_others(dtype, first_equal):
    """φ_j = 10000^(-j): from chunk 2 in bfloat16 and chunk 3 in float32 the turned vectors are bit-identical."""
    x = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    first, second = x.unbind(1)
    turned_by_chunk = []
    for phi in 10000.0 ** -torch.arange(8, dtype=torch.float64):
        cos, sin = phi.cos().to(dtype), phi.sin().to(dtype)
        turned_by_chunk.append(torch.stack([first * cos - second * sin, second * cos + first * sin]))
    same = [torch.equal(vectors, turned_by_chunk[-1]) for vectors in turned_by_chunk]
    assert same == [False] * first_equal + [True] * (8 - first_equal)


def test_definition_1_puts_the_previous_token_a_chunk_into_the_future():
    """A query at the start of a chunk sees the token just before it at -(c - 1)."""
    chunk = 1000
    law = make_law("3d-rpe-definition", context=16384, chunk=chunk, **LLAMA2)
    theta = law.frequencies()
    phase = -(10000.0**-3 - 10000.0**-2)
    expected = -(chunk - 1) * theta + phase
    torch.testing.assert_close(law.relative_angles(3 * chunk, 3 * chunk - 1), expected, rtol=0, atol=1e-12)
    assert relative_position_matrix(4, 12, "definition")[4, 3].tolist() == [1.0, -3.0]


def test_figure_3_cannot_come_from_turning_single_tokens():
    """Figure 3 prints (distance div c, distance mod c).

    If tokens were turned by some x(p), the first coordinate of (q, k) plus that of (k, l) would be that of (q, l).
    Printed, pairs (2, 1) and (1, 0) are both (0, 1) and so is no multiple that wraps: 3 steps of (0, 1) give
    (0, 3), but the fourth gives (1, 0), whose within-chunk part does not add up.
    """
    printed = relative_position_matrix(4, 12, "printed")
    assert printed[11, 0].tolist() == [2.0, 3.0]
    assert printed[4, 3].tolist() == [0.0, 1.0]
    assert (printed[4, 3] + printed[3, 0]).tolist() == [0.0, 4.0]
    assert printed[4, 0].tolist() == [1.0, 0.0]
    defined = relative_position_matrix(4, 12, "definition")
    for q, k, first in [(4, 3, 0), (11, 5, 2), (8, 7, 1)]:
        assert torch.equal(defined[q, k] + defined[k, first], defined[q, first])


def test_the_bound_of_eq_7_does_not_stay_above_five():
    """Section 3.2.1 with c = 1000, d = 128, base 10000: it falls to 3.92, at distance 913."""
    bound = decay_bound(make_law("rope", context=8192, **LLAMA2), torch.arange(1000), 0)
    assert bound.min().item() == pytest.approx(3.92, abs=0.005)
    assert bound.argmin().item() == 913
    law = make_law("3d-rpe-definition", context=16384, chunk=1000, **LLAMA2)
    assert decay_bound(law, 2913, 2000).item() == pytest.approx(3.92, abs=0.005)


def test_ropes_bound_is_above_five_at_many_distances_beyond_1000():
    """Section 3.2.1 says that it decreases to below 5 there."""
    bound = decay_bound(make_law("rope", context=8192, **LLAMA2), torch.arange(1000, 8192), 0)
    assert (bound > 5).sum().item() > 2500
    assert bound.max().item() > 11


def test_the_bound_is_symmetric_so_negative_offsets_count_too():
    """Eq. 7's domain is given as [0, c - 1], but Definition 1 also makes offsets down to -(c - 1): same bound."""
    law = make_law("3d-rpe-definition", context=16384, chunk=1000, **LLAMA2)
    assert decay_bound(law, 3000, 2913).item() == pytest.approx(decay_bound(law, 2913, 2000).item(), abs=1e-9)


def test_the_bloch_sphere_does_not_show_the_offset_within_a_chunk():
    """Eq. 1's θ is a global phase: all tokens of a chunk are one point; only a drawing can spread them."""
    law = make_law("3d-rpe-definition", context=16384, chunk=1000, **LLAMA2)
    position = torch.arange(1000)
    point = bloch_vector(law, position)
    torch.testing.assert_close(point, point[:1].expand_as(point), rtol=0, atol=1e-12)
    drawn = bloch_vector(law, position, longitude="global")
    assert (drawn - drawn[:1]).norm(dim=-1).max() > 1


def test_theorem_1_at_a_border_is_negative_and_grows_with_the_chunk():
    """The proof's special case: its resolution c' - 1 has the wrong sign, q - k is -(c' - 1) there."""
    law = make_law("3d-rpe-definition", context=16384, chunk=1024, interpolate=True, **LLAMA2)
    border = resolution(law, law.chunk_in_use, law.chunk_in_use - 1)[0].item()
    assert border == pytest.approx(-(law.chunk_in_use - 1) + (1 - 1e-4), abs=1e-6)


def test_table_4_s_setting_breaks_the_condition_of_theorem_1():
    """Chunks of 3k on a 4k model stretched to 16k are c' = 8192 (or 5462 from 8k): above L_p = 4096."""
    with pytest.raises(ConfigError, match="grows chunk 3072 to 8192, above 4096"):
        make_law("3d-rpe-definition", context=16384, chunk=3072, interpolate=True, **LLAMA2)
    assert math.ceil(16384 / math.ceil(8192 / 3072)) == 5462
