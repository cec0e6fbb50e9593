"""STRING against its published code, written here a second time."""

from __future__ import annotations

import pytest
import torch

from rpe3d import make_law
from rpe3d.geometry import Turn


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
