"""DPE against its published code, written here a second time."""

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


@pytest.mark.parametrize(
    ("window", "scales"), [(16, (4, 4, 2, 16, 8, 8, 16, 1)), (13, (5, 16, 3)), (8, (32,)), (1, (2, 100))]
)
def test_dpe_is_the_published_code(window, scales):
    """Lu et al. 2025, dpe_for_llama.py in whole numbers: the position of every pair of dimensions, in decoding."""
    law = make_law("dpe", window=window, scales=scales, **MODEL)
    shown = law.relative_angles(QUERY, KEY) / law.frequencies()
    borders = [8 * n // len(scales) for n in range(len(scales) + 1)]
    for scale, first, last in zip(scales, borders[:-1], borders[1:], strict=True):
        far = QUERY // scale - KEY // scale + (window - window // scale)
        expected = torch.where(QUERY - KEY < window, QUERY - KEY, far).double()
        for pair in range(first, last):
            torch.testing.assert_close(shown[..., pair][CAUSAL], expected[CAUSAL], rtol=1e-12, atol=1e-12)
        if window % scale == 0:  # in a prompt: query // i + W - W / i, with a true division
            prompt = QUERY // scale + window - window / scale - KEY // scale
            assert torch.equal(far.double(), prompt.double())


def test_dpe_cuts_the_pairs_as_published():
    """Eight groups of eight pairs of 64: dimension_groups_range [0, 8, ..., 64]; equal neighbours are one group."""
    scales = (4, 4, 2, 16, 32, 32, 16, 128)
    law = make_law("dpe", pretrained=8192, context=131072, head_dim=128, scales=scales)
    assert law.window == 1024
    assert [(pairs, turn.chunk) for pairs, turn in law.regions[1].key.groups] == [
        (16, 4), (8, 2), (8, 16), (16, 32), (8, 16), (8, 128),
    ]  # fmt: skip
    assert make_law("dpe", pretrained=8192, context=131072, head_dim=128, scales="4-4-2-16-32-32-16-128") == law


@pytest.mark.parametrize("context", [8192, 12000, 131072, 1_000_000])
def test_dpe_without_scales_is_self_extend(context):
    law = make_law("dpe", pretrained=8192, context=context, head_dim=64)
    assert len(law.scales) == 8
    assert law.regions == make_law("self-extend", pretrained=8192, context=context, head_dim=64).regions
