"""S2-Attn's pattern is that of LongLoRA (arXiv 2309.12307, section 3.2), written here a second time as a mask."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rpe3d.attention import attention
from rpe3d.geometry import make_law
from rpe3d.train.shifted import shifted


def attend(law):
    def plain(q, k, v, positions, sinks):
        return attention(q, k, v, law, query_positions=positions, key_positions=positions, sinks=sinks, rotated=True)[0]

    return plain


def longlora_mask(tokens, group, shift):
    """Which keys a query sees: those of its own group before it; groups start at `shift`, which cuts one off before."""
    number = [(i - shift) // group for i in range(tokens)]
    return torch.tensor([[number[q] == number[k] and k <= q for k in range(tokens)] for q in range(tokens)])


def dense(q, k, v, mask):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (9, 3), (1, 1)])
@pytest.mark.parametrize("tokens", [64, 61, 7])
def test_half_of_the_heads_attend_in_groups_and_half_in_shifted_ones(heads, key_heads, tokens):
    group = 16
    law = make_law("linear", pretrained=64, context=256, head_dim=8)
    q = torch.randn(2, heads, tokens, 8, requires_grad=True)
    k, v = (torch.randn(2, key_heads, tokens, 8, requires_grad=True) for _ in range(2))
    out = shifted(q, k, v, None, group, attend(law), by_position=False)
    straight, moved = (longlora_mask(tokens, group, shift) for shift in (0, group // 2))
    masks = torch.stack([straight if h < heads // 2 else moved for h in range(heads)])
    truth = dense(q, k, v, masks)
    assert torch.allclose(out, truth, atol=1e-5)
    weight = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), (q, k, v), retain_graph=True) for x in (out, truth))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_the_first_tokens_do_not_see_the_last():
    """Algorithm 1 rolls the tokens round: its last shifted group would show the end of a text to its beginning."""
    assert not longlora_mask(64, 16, 8)[:8, 8:].any()
    law = make_law("linear", pretrained=64, context=256, head_dim=8)
    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
    before = shifted(q, k, v, None, 16, attend(law), by_position=False)
    k[:, :, 8:], v[:, :, 8:] = 0.0, 0.0
    assert torch.equal(shifted(q, k, v, None, 16, attend(law), by_position=False)[:, :, :8], before[:, :, :8])


def test_pairs_within_a_group_keep_their_law():
    """A group of 32 under a law with chunks of 4: each group is what dense attention under the law gives it."""
    law = make_law("3d-rpe", pretrained=32, context=128, head_dim=8, chunk=4, window=8, reach=16, focus=0, fade=0)
    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
    out = shifted(q, k, v, None, 32, attend(law), by_position=True)
    for head, cuts in ((0, [0, 32, 64]), (1, [0, 16, 48, 64])):
        for start, stop in pairwise(cuts):
            there = torch.arange(start, stop)
            x = (y[:, head : head + 1, start:stop] for y in (q, k, v))
            truth, _ = attention(*x, law, query_positions=there, key_positions=there, rotated=True, impl="reference")
            assert torch.allclose(out[:, head : head + 1, start:stop], truth, atol=1e-5)
