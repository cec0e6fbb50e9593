"""ReRoPE against its formula, written here a second time."""

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


@pytest.mark.parametrize("window", [1, 5, 32])
def test_rerope_clips_the_distance(window):
    """Su 2023: min(p_q - p_k, w)."""
    law = make_law("rerope", window=window, **MODEL)
    expected = (QUERY - KEY).clamp(max=window).double()
    assert torch.equal(law.relative_position(QUERY, KEY)[CAUSAL], expected[CAUSAL])
