"""The peers of 3D-RPE against their published formulas, written here a second time from their papers."""

from __future__ import annotations

import pytest
import torch

from rpe3d import make_law
from rpe3d.geometry import Turn

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


def string_published(length, shift, local):
    """The relative positions of string_for_llama.py: all that a pair is counted with in a prompt, and in decoding."""
    prompt, decoding = {}, {}
    for query in range(length):
        for key in range(query + 1):
            prompt[query, key] = [query - key] if query - key <= shift else []  # window_size=[S, 0]
        for key in range(query - shift + 1):  # the last N - S queries, the first N - S keys, causal
            prompt[query, key].append(query - shift + local - key)
        border = max(0, query + 1 - shift)  # decoding, when query + 1 keys are cached
        decoding |= {(query, key): query - shift + local - key for key in range(border)}
        decoding |= {(query, key): query - key for key in range(border, query + 1)}
    return prompt, decoding


@pytest.mark.parametrize(("shift", "local"), [(21, 4), (40, 0), (33, 33)])
def test_string_is_the_published_code(shift, local):
    """An et al. 2024. Prompt and decoding differ there at distance S alone, which a prompt counts twice."""
    law = make_law("string", pretrained=64, context=64, head_dim=16, shift=shift, local=local)
    prompt, decoding = string_published(64, shift, local)
    for (query, key), shown in decoding.items():
        assert law.relative_position(query, key) == shown
        if query - key == shift:
            assert prompt[query, key] == [shift, local]
        else:
            assert prompt[query, key] == [shown]


def test_string_takes_the_published_parameters_and_keeps_the_positions_below_them():
    """Their README: S = int(0.33 L), W = 128 for Llama 3.1; no position from 0.67 L + W on is left."""
    law = make_law("string", pretrained=131072, head_dim=128)
    assert (law.shift, law.local, law.attention_scaling) == (43253, 128, 1.0)
    assert law.relative_position(131071, torch.arange(131072)).max() == 131071 - 43253 + 128
    assert all(region.key == Turn() for region in law.regions)


@pytest.mark.parametrize(("context", "shift", "largest"), [(64, 21, 46), (80, 37, 46), (90, 47, 46), (124, 64, 63)])
def test_string_drops_the_same_positions_beyond_the_pretrained_length_while_it_can(context, shift, largest):
    law = make_law("string", pretrained=64, context=context, head_dim=16)
    assert law.shift == shift
    assert law.relative_position(context - 1, torch.arange(context)).max() == largest


def test_string_s_temperature_multiplies_the_model_s_own():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    model = {"pretrained": 128, "head_dim": 16, "rope_scaling": scaling}
    law = make_law("string", attention_factor=1.0693, **model)
    assert law.attention_scaling == make_law("rope", **model).attention_scaling * 1.0693


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


@pytest.mark.parametrize(("name", "near"), [("string", "shift"), ("dpe", "window")])
def test_inputs_within_the_exact_part_cannot_tell_it_from_rope(name, near):
    law = make_law(name, pretrained=64, context=100, head_dim=16, **{"scales": (2, 5)} if name == "dpe" else {})
    length = getattr(law, near)
    rope = make_law("rope", pretrained=64, context=100, head_dim=16)
    key = P[:length]
    assert torch.equal(law.relative_angles(length - 1, key), rope.relative_angles(length - 1, key))
    assert not torch.equal(law.relative_angles(2 * length, P), rope.relative_angles(2 * length, P))


def test_position_interpolation_squeezes_into_the_pretrained_length():
    """Chen et al. 2023: p L_p / L."""
    law = make_law("linear", **MODEL)
    assert torch.equal(law.relative_position(QUERY, KEY), (QUERY - KEY).double() / 8)


@pytest.mark.parametrize(
    "name", ["3d-rpe", "dca", "self-extend", "rerope", "leaky-rerope", "streaming-llm", "string", "linear"]
)
@pytest.mark.parametrize("context", [8192, 12000, 65536, 1_000_000])
def test_by_default_no_law_shows_a_position_the_model_has_not_seen(name, context):
    if name == "string":
        context = min(context, 2 * 8192 - 128)
    law = make_law(name, pretrained=8192, context=context, head_dim=64)
    last = context - 1
    key = torch.cat([torch.arange(0, context, 997), torch.arange(20), torch.arange(context - 9000, context)])
    f = law.relative_position(last, key.clamp(0, last))
    seen = f[~f.isnan()]
    assert seen.min() >= 0
    assert seen.max() < 8192
