"""The authors' code: dual chunk attention with a phase, its tables written here a second time."""

from __future__ import annotations

import pytest
import torch

from law_oracles import (
    CAUSAL,
    KEY,
    MODEL,
    QUERY,
    P,
)
from rpe3d import make_law


@pytest.mark.parametrize("base", [10000.0, 3.0])
def test_dual_chunk_is_the_published_code_with_the_phase_of_the_position(base):
    """Keys at n; queries at m, at min(m + c, w), at w; +φ of the chunk on both sides of the far pairs alone."""
    law = make_law("3d-rpe-dual-chunk", phi_base=base, **MODEL)
    w = 64 * 3 // 4
    c = w - 64 // 16
    assert (law.chunk, law.window) == (c, w)
    apart, phi = QUERY // c - KEY // c, base ** -(P // c).double()
    following = (torch.arange(c) + c).clamp(max=w)[QUERY % c]
    shown = torch.where(apart == 0, QUERY % c, torch.where(apart == 1, following, w)) - KEY % c
    phase = torch.where(apart > 1, phi[QUERY] - phi[KEY], 0)
    theta = 10000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)
    expected = shown[..., None] * theta + phase[..., None]
    torch.testing.assert_close(law.relative_angles(QUERY, KEY)[CAUSAL], expected[CAUSAL], rtol=0, atol=1e-11)
