"""Log-n scaling against the formula of Qwen-7B's modeling file."""

from __future__ import annotations

import math

import torch

from rpe3d import make_law
from rpe3d.attention import attention


def qwen(length, pretrained):
    """`logn_list` of modeling_qwen.py: one factor for each position of a query."""
    return [math.log(i, pretrained) if i > pretrained else 1 for i in range(1, length + 1)]


def test_scores_are_multiplied_as_in_qwen_one_token_later():
    pretrained, length = 16, 100
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 8, dtype=torch.float64) for _ in range(3))
    law = make_law("logn", pretrained=pretrained, context=128, head_dim=8)
    rope = make_law("rope", pretrained=pretrained, context=128, head_dim=8)
    later = torch.tensor([1.0, *qwen(length - 1, pretrained)], dtype=torch.float64)
    expected, _ = attention(q * later[:, None], k, v, rope)
    torch.testing.assert_close(attention(q, k, v, law)[0], expected, rtol=0, atol=1e-12)
    assert later[-1] > 1.6


def test_texts_up_to_the_pretrained_length_are_plain_rope():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 8, dtype=torch.float64) for _ in range(3))
    outs = [attention(q, k, v, make_law(name, pretrained=64, context=256, head_dim=8))[0] for name in ("logn", "rope")]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-14)
