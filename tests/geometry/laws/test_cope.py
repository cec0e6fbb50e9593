"""CoPE against its published code, written here a second time."""

from __future__ import annotations

import pytest
import torch

from rpe3d import make_law


@pytest.mark.parametrize(("head_dim", "clipped"), [(128, 20), (128, 1), (64, 32), (16, 3)])
def test_cope_is_the_published_taper(head_dim, clipped):
    """modeling_cope.py: inv_freq[-n:] times 0.5 (1 + cos(linspace(0, π, n))), in float32 there."""
    law = make_law("cope", pretrained=8192, context=65536, head_dim=head_dim, rope_theta=5e5, clipped=clipped)
    expected = 1.0 / (5e5 ** (torch.arange(0, head_dim, 2).float() / head_dim))
    for i in range(clipped):
        angle = torch.tensor(i / (clipped - 1) if clipped > 1 else 0.0) * torch.pi
        expected[head_dim // 2 - clipped + i] *= 0.5 * (1.0 + torch.cos(angle))
    torch.testing.assert_close(law.frequencies().float(), expected, rtol=1e-5, atol=1e-10)


def test_the_default_is_the_published_share_of_the_pairs_and_the_slowest_stands():
    law = make_law("cope", pretrained=8192, context=65536, head_dim=128, rope_theta=5e5)
    assert law.clipped == 20
    assert law.frequencies()[-1] == 0
    assert torch.equal(law.frequencies()[:44], law.model_frequencies()[:44])
