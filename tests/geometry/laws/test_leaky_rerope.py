"""Leaky ReRoPE against its formula, written here a second time."""

from __future__ import annotations

import pytest
import torch

from law_oracles import (
    CAUSAL,
    KEY,
    MODEL,
    QUERY,
)
from rpe3d import make_law


@pytest.mark.parametrize("slope", [0.0, 0.0625, 0.3, 1.0])
def test_leaky_rerope_goes_on_at_its_slope(slope):
    law = make_law("leaky-rerope", window=20, slope=slope, **MODEL)
    distance = (QUERY - KEY).double()
    expected = torch.where(distance < 20, distance, 20 + slope * (distance - 20))
    torch.testing.assert_close(law.relative_position(QUERY, KEY)[CAUSAL], expected[CAUSAL], rtol=0, atol=1e-11)
