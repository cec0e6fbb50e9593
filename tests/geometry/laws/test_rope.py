"""Plain RoPE against its formula, written here a second time."""

from __future__ import annotations

import math

import pytest
import torch

from law_oracles import (
    KEY,
    MODEL,
    QUERY,
)
from rpe3d import make_law


def test_rope_turns_every_plane_by_its_frequency_times_the_distance():
    """Su et al. 2021, eqs. 14-15: θ_l = 10000^(-2l/d), and a score depends on the distance alone."""
    law = make_law("rope", **MODEL)
    for pair in range(8):
        expected = (QUERY - KEY).double() * math.pow(10000, -2 * pair / 16)
        torch.testing.assert_close(law.relative_angles(QUERY, KEY)[..., pair], expected, rtol=1e-14, atol=0)
    assert torch.equal(law.relative_position(QUERY, KEY), (QUERY - KEY).double())


def test_angles_stay_correct_at_position_one_million():
    """cos and sin of p θ_l against integer-exact arithmetic; bfloat16 positions would be off by thousands."""
    position = 1_000_000
    law = make_law("rope", pretrained=8192, context=2_000_000, head_dim=128, rope_theta=1e4)
    angles = law.relative_angles(position, 0)
    for pair in (0, 1, 17, 63):
        exact = position * math.exp(-2 * pair / 128 * math.log(1e4))
        assert math.cos(angles[pair]) == pytest.approx(math.cos(exact), abs=1e-9)
        assert math.sin(angles[pair]) == pytest.approx(math.sin(exact), abs=1e-9)
    assert math.cos(angles[0]) == pytest.approx(math.cos(1_000_000), abs=1e-12)
    step = law.relative_angles(position + 1, 0) - angles
    torch.testing.assert_close(step, law.frequencies(), rtol=0, atol=1e-9)
    assert torch.tensor(position + 1, dtype=torch.bfloat16) == torch.tensor(position, dtype=torch.bfloat16)
