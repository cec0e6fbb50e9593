"""Definition 1 against complex arithmetic; tests/paper/test_definition.py has the rest of the paper's claims."""

from __future__ import annotations

import pytest
import torch

from law_oracles import (
    KEY,
    MODEL,
    QUERY,
    P,
)
from rpe3d import make_law


@pytest.mark.parametrize("parameters", [{"chunk": 10}, {"chunk": 8, "interpolate": True}, {"phi_base": 3.0}])
def test_definition_is_the_complex_product_of_the_paper(parameters):
    """h~ = e^{i m θ} (cos φ_j h⊥ + sin φ_j h) with h⊥ = i h and φ_j = base^(-j), for query and key (eq. 4)."""
    law = make_law("3d-rpe-definition", **MODEL | parameters)
    c = {10: 10, 8: 64, None: 48}[parameters.get("chunk")]  # 8 chunks of 8 grow to 64 tokens; default 3/4 of 64
    phi = parameters.get("phi_base", 10000.0) ** -(P // c).double()
    theta = 10000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)
    turned = torch.exp(1j * (P % c)[:, None] * theta) * (phi.cos() * 1j + phi.sin())[:, None]
    expected = turned[:, None] * turned[None, :].conj()
    torch.testing.assert_close(torch.exp(1j * law.relative_angles(QUERY, KEY)), expected, rtol=0, atol=1e-11)
