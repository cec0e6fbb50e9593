"""Self-Extend against its algorithm, written here a second time."""

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


@pytest.mark.parametrize(("window", "group"), [(8, 16), (16, 12), (13, 11)])
def test_self_extend_floors_far_positions_to_groups(window, group):
    """Jin et al. 2024, algorithm 1: q at p // G + w - w // G and k at p // G, from distance w on."""
    law = make_law("self-extend", window=window, group=group, **MODEL)
    far = (QUERY // group + window - window // group) - KEY // group
    expected = torch.where(QUERY - KEY < window, QUERY - KEY, far).double()
    assert torch.equal(law.relative_position(QUERY, KEY)[CAUSAL], expected[CAUSAL])
    assert expected[CAUSAL].max() < 64
