"""The peers of 3D-RPE against their published formulas, written here a second time from their papers."""

from __future__ import annotations

import pytest
import torch

from rpe3d import make_law

MODEL = {"pretrained": 64, "context": 512, "head_dim": 16}
P = torch.arange(512)
QUERY, KEY = torch.broadcast_tensors(P[:, None], P[None, :])
CAUSAL = KEY <= QUERY


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


@pytest.mark.parametrize("window", [1, 5, 32])
def test_rerope_clips_the_distance(window):
    """Su 2023: min(p_q - p_k, w)."""
    law = make_law("rerope", window=window, **MODEL)
    expected = (QUERY - KEY).clamp(max=window).double()
    assert torch.equal(law.relative_position(QUERY, KEY)[CAUSAL], expected[CAUSAL])


def test_rerope_is_leaky_rerope_at_slope_zero():
    rerope = make_law("rerope", window=20, **MODEL)
    leaky = make_law("leaky-rerope", window=20, slope=0.0, **MODEL)
    assert rerope.regions == leaky.regions


@pytest.mark.parametrize("slope", [0.0, 0.0625, 0.3, 1.0])
def test_leaky_rerope_goes_on_at_its_slope(slope):
    law = make_law("leaky-rerope", window=20, slope=slope, **MODEL)
    distance = (QUERY - KEY).double()
    expected = torch.where(distance < 20, distance, 20 + slope * (distance - 20))
    torch.testing.assert_close(law.relative_position(QUERY, KEY)[CAUSAL], expected[CAUSAL], rtol=0, atol=1e-11)


@pytest.mark.parametrize(("window", "group"), [(8, 16), (16, 12), (13, 11)])
def test_self_extend_floors_far_positions_to_groups(window, group):
    """Jin et al. 2024, algorithm 1: q at p // G + w - w // G and k at p // G, from distance w on."""
    law = make_law("self-extend", window=window, group=group, **MODEL)
    far = (QUERY // group + window - window // group) - KEY // group
    expected = torch.where(QUERY - KEY < window, QUERY - KEY, far).double()
    assert torch.equal(law.relative_position(QUERY, KEY)[CAUSAL], expected[CAUSAL])
    assert expected[CAUSAL].max() < 64


def test_streaming_llm_counts_positions_inside_its_cache():
    """Xiao et al. 2023: roll the cache token by token and number what is in it, as their code does."""
    law = make_law("streaming-llm", sinks=3, window=10, **MODEL)
    f = law.relative_position(QUERY, KEY)
    for query in (0, 2, 3, 9, 12, 13, 14, 40, 511):
        cache = [k for k in range(query + 1) if k < 3 or query - k < 10]
        place = {k: slot for slot, k in enumerate(cache)}
        for key in range(query + 1):
            if key in place:
                assert f[query, key] == place[query] - place[key]
            else:
                assert f[query, key].isnan()


def test_streaming_llm_without_sinks_is_a_window():
    law = make_law("streaming-llm", sinks=0, window=10, **MODEL)
    assert law.relative_position(20, 11) == 9
    assert law.relative_position(20, 10).isnan()


def test_position_interpolation_squeezes_into_the_pretrained_length():
    """Chen et al. 2023: p L_p / L."""
    law = make_law("linear", **MODEL)
    assert torch.equal(law.relative_position(QUERY, KEY), (QUERY - KEY).double() / 8)


@pytest.mark.parametrize("name", ["3d-rpe", "dca", "self-extend", "rerope", "leaky-rerope", "streaming-llm", "linear"])
@pytest.mark.parametrize("context", [8192, 12000, 65536, 1_000_000])
def test_by_default_no_law_shows_a_position_the_model_has_not_seen(name, context):
    law = make_law(name, pretrained=8192, context=context, head_dim=64)
    last = context - 1
    key = torch.cat([torch.arange(0, context, 997), torch.arange(20), torch.arange(context - 9000, context)])
    f = law.relative_position(last, key.clamp(0, last))
    seen = f[~f.isnan()]
    assert seen.min() >= 0
    assert seen.max() < 8192
