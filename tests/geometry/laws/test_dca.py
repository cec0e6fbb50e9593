"""Dual chunk attention against ChunkLlama's tables, written here a second time."""

from __future__ import annotations

import math

import pytest
import torch

from law_oracles import (
    CAUSAL,
    KEY,
    MODEL,
    QUERY,
    P,
)
from rpe3d import ConfigError, make_law
from rpe3d.attention import Shared, attention


def test_dca_is_the_published_formula():
    """An et al. 2024 as ChunkLlama computes it: key table p mod c, three query tables, one per chunk relation."""
    law = make_law("dca", **MODEL)
    w = 64 * 3 // 4
    c = w - 64 // 16
    assert (law.chunk, law.window) == (c, w)
    key_table = P % c
    own, following = torch.arange(c), (torch.arange(c) + c).clamp(max=w)
    apart = QUERY // c - KEY // c
    shown = torch.where(apart == 0, own[QUERY % c], torch.where(apart == 1, following[QUERY % c], following[c - 1]))
    expected = (shown - key_table[KEY]).double()
    assert torch.equal(law.relative_position(QUERY, KEY)[CAUSAL], expected[CAUSAL])
    assert expected[CAUSAL].min() >= 0
    assert expected[CAUSAL].max() == w


def test_dca_is_exact_for_local_neighbours_across_a_border():
    """Its local window: the last w - c tokens before a chunk keep their true distance."""
    law = make_law("dca", **MODEL)
    border = 3 * law.chunk
    query = torch.arange(border, border + law.window - law.chunk + 1)
    assert torch.equal(law.relative_position(query, border - 1), (query - border + 1).double())


@pytest.mark.parametrize("times", [1, 2, 4, 8])
def test_dca_takes_the_temperature_that_is_deployed(times):
    """vLLM's backend for Qwen2.5-1M: q and k times max(1, 0.1 ln(n / original_max) + 1); here n = context."""
    model = {"pretrained": 4096, "context": 4096 * times, "head_dim": 16}
    law = make_law("dca", attention_factor="deployed", **model)
    assert law.attention_scaling == pytest.approx(max(1.0, 0.1 * math.log(times) + 1.0), rel=1e-15)
    assert law.attention_scaling**2 == pytest.approx({1: 1.0, 2: 1.14, 4: 1.30, 8: 1.46}[times], abs=0.005)
    assert law.keeps_scaling == (times == 1)
    assert law.regions == make_law("dca", **model).regions
    assert make_law("dca", **model).attention_scaling == 1


def test_dca_s_temperature_multiplies_the_scores_by_its_square():
    model = {"pretrained": 64, "context": 256, "head_dim": 16}
    law, plain = (make_law("dca", attention_factor=x, **model) for x in (1.3, 1.0))
    q, k, v = (torch.randn(1, 2, 200, 16, dtype=torch.float64) for _ in range(3))
    out = attention(q, k, v, law)[0]
    torch.testing.assert_close(out, attention(q, k, v, plain, scale=1.3**2 / 4)[0], rtol=0, atol=1e-12)


def test_dca_s_temperature_is_a_number_or_what_is_deployed():
    with pytest.raises(ConfigError, match="attention_factor is 'hot': pass a number above 0, or deployed"):
        make_law("dca", pretrained=64, context=256, head_dim=16, attention_factor="hot")


def dense(q, k, v, law, rate, first=0):
    """Softmax of scores times max(1, 1 + rate ln(n / L_p))², n the tokens up to the query's own; q and k unturned."""
    t, n = q.shape[2], k.shape[2]
    query, key = torch.arange(first, first + t)[:, None], torch.arange(n)[None]
    pairs = [torch.view_as_complex(x.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()) for x in (q, k)]
    angles = law.relative_angles(query, key).nan_to_num()
    turned = torch.polar(torch.ones_like(angles), angles)
    score = torch.einsum("bhtl,bhsl,tsl->bhts", pairs[0], pairs[1].conj(), turned).real / q.shape[3] ** 0.5
    score = score * (1 + rate * ((query + 1).double() / law.pretrained).clamp(min=1).log()) ** 2
    return score.masked_fill(query < key, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("impl", ["reference", "blocked", "auto"])
def test_dca_s_growth_sharpens_each_query_by_its_own_position(impl):
    model = {"pretrained": 64, "context": 256, "head_dim": 16}
    law, plain = make_law("dca", growth=0.1, **model), make_law("dca", **model)
    q, k, v = (torch.randn(2, 3, 200, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    expected = dense(q, k, v, plain, 0.1)
    out = attention(q, k, v, law, impl=impl)[0]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(out)
    found, truth = (torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (out, expected))
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    assert (out - attention(q, k, v, plain)[0])[:, :, :64].abs().max() < 1e-12
    assert (out - attention(q, k, v, plain)[0])[:, :, 64:].abs().max() > 1e-3


def test_dca_s_growth_after_a_cache_and_in_a_padded_batch():
    model = {"pretrained": 64, "context": 256, "head_dim": 16}
    law = make_law("dca", growth=0.1, **model)
    q, k, v = (torch.randn(2, 3, 200, 16, dtype=torch.float64) for _ in range(3))
    whole = attention(q, k, v, law)[0]
    for last in (1, 3, 60):
        out = attention(q[:, :, -last:], k, v, law)[0]
        torch.testing.assert_close(out, whole[:, :, -last:], rtol=0, atol=1e-12)
        shared = Shared(query_positions=range(200 - last, 200), key_positions=range(200))
        torch.testing.assert_close(shared.output(q[:, :, -last:], k, v, law), out, rtol=0, atol=1e-12)
    mask = torch.ones(2, 200, dtype=torch.bool)
    mask[1, :50] = False
    positions = torch.stack([torch.arange(200), (torch.arange(200) - 50).clamp(min=0)])
    places = {"query_positions": positions, "key_positions": positions, "query_mask": mask, "key_mask": mask}
    out = attention(q, k, v, law, **places)[0]
    alone = attention(q[1:, :, 50:], k[1:, :, 50:], v[1:, :, 50:], law)[0]
    torch.testing.assert_close(out[1:, :, 50:], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(out[:1], whole[:1], rtol=0, atol=1e-12)


def test_dca_s_growth_is_kept_and_checked():
    model = {"pretrained": 64, "context": 256, "head_dim": 16}
    law = make_law("dca", growth=0.1, **model)
    assert make_law(**law.to_dict()) == law
    assert "growth" not in make_law("dca", **model).own
    with pytest.raises(ConfigError, match="growth is -1"):
        make_law("dca", growth=-1, **model)
