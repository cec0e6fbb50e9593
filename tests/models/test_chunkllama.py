"""The law `dca` against the results of ChunkLlama's own file (chunkllama.py says how they were recorded)."""

from __future__ import annotations

import math

import pytest
import torch
from chunkllama import (
    DATA,
    DIM,
    LENGTHS,
    LOCAL,
    LONGEST,
    PRETRAINED,
    PROMPT,
    SCALED,
    WINDOW,
    flat,
    projections,
    vectors,
)
from safetensors.torch import load_file

import rpe3d
from rpe3d.attention import attention

ROUNDING = {"rtol": 0, "atol": 2e-6}  # float32: both are within 5e-7 of float64, for outputs up to 1.6
RECORDED = load_file(DATA)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def ours(length=LONGEST, *, local=LOCAL[""], impl="auto", turn=1.0, **given):
    """The law of the same pretrained length, chunk and local window on the same q, k and v: outputs [t, h d]."""
    law = rpe3d.make_law("dca", pretrained=PRETRAINED, context=256, head_dim=DIM, chunk=WINDOW - local, window=WINDOW)
    q, k, v = vectors()
    q, k, v = (x[:, :, :length] for x in (q * turn, k * turn, v))
    return flat(attention(q, k, v, law, impl=impl, **given)[0])[0]


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_below_at_and_above_the_chunk_equals_chunkllamas(length, impl):
    torch.testing.assert_close(ours(length, impl=impl), RECORDED[f"prefill {length}"], **ROUNDING)


@pytest.mark.parametrize("name", LOCAL)
def test_chunkllamas_decoding_token_by_token_equals_one_forward(name):
    """Both local windows that it has had as a default: L / 8, and L / 16."""
    out = ours(local=LOCAL[name])
    torch.testing.assert_close(out, RECORDED[f"{name}prefill {LONGEST}"], **ROUNDING)
    torch.testing.assert_close(out[PROMPT:], RECORDED[f"{name}decode"], **ROUNDING)


def test_a_chunk_or_a_window_off_by_one_is_found_out():
    for wrong in (LOCAL[""] + 1, LOCAL[""] - 1):
        assert (ours(local=wrong) - RECORDED[f"prefill {LONGEST}"]).abs().max() > 0.1


def test_our_defaults_are_those_of_its_first_version():
    """L / 16; since April 2024 the file's default is L / 8, while its flash-decoding and Qwen files keep L / 16."""
    law = rpe3d.make_law("dca", pretrained=PRETRAINED, context=256, head_dim=DIM)
    assert (law.chunk, law.window) == (WINDOW - LOCAL["narrow "], WINDOW)


def test_an_extended_models_layer_equals_chunkllamas_in_prefill_and_in_decoding(tiny):
    """The same q, k and v through Hugging Face: its rotary embedding, its cache, and the registered attention."""
    from transformers import DynamicCache

    model = tiny(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    rpe3d.extend(model, "dca", context=256, chunk=WINDOW - LOCAL[""], window=WINDOW)
    layer, cache = model.model.layers[0].self_attn, DynamicCache()
    for name, projection in projections().items():
        setattr(layer, name, projection)
    hidden, outs = torch.cat([flat(x) for x in vectors()], -1), []
    for start, stop in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, LONGEST))]:
        place = torch.arange(start, stop)[None]
        turns, part = model.model.rotary_emb(hidden, place), hidden[:, start:stop]
        outs.append(layer(part, turns, None, position_ids=place, past_key_values=cache)[0])
    torch.testing.assert_close(torch.cat(outs, 1)[0, PROMPT:], RECORDED["decode"], **ROUNDING)
    place = torch.arange(LONGEST)[None]
    whole = layer(hidden, model.model.rotary_emb(hidden, place), None, position_ids=place)[0]
    torch.testing.assert_close(whole[0], RECORDED[f"prefill {LONGEST}"], **ROUNDING)


def test_chunkllama_as_published_rounds_the_weights_of_its_merge_to_bfloat16():
    """The other records have them in float32. Weights of 8 bits are off by 2^-8 of themselves at most."""
    error = (ours(SCALED) - RECORDED["rounded merge"]).abs().max()
    assert 1e-4 < error < 2**-8 * vectors()[2].abs().max()


def temperature(length):
    """What the file multiplies q and k by once a text is longer than the config's max_position_embeddings.

    It came to the file in March 2024, after the paper; our law follows the paper.
    """
    return 0.05 * math.log(max(length, PRETRAINED) / PRETRAINED) + 1


def test_chunkllama_as_published_has_a_temperature_beyond_the_pretrained_length():
    """A prompt has that of its whole length; a decoded token, in the cache for good, that of its own time."""
    scaled = ours(SCALED, scale=temperature(SCALED) ** 2 / math.sqrt(DIM))
    torch.testing.assert_close(scaled, RECORDED["temperature prefill"], **ROUNDING)
    turn = torch.tensor([temperature(position + 1) for position in range(LONGEST)])[:, None]
    torch.testing.assert_close(ours(SCALED, turn=turn)[PROMPT:], RECORDED["temperature decode"], **ROUNDING)
    apart = RECORDED["temperature prefill"][PROMPT:] - RECORDED["temperature decode"]
    assert apart.abs().max() > 0.01  # so its decoding is not its own full forward
