"""A model under a law keeps it, or says at the next forward that it cannot."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import rpe3d
from rpe3d import ConfigError, make_law
from rpe3d.models import guard

BOUNDED = {"chunk": 8, "window": 16, "reach": 32, "focus": 0, "fade": 0}


def change(model, how, name):
    if how == "method":
        model.set_attn_implementation(name)
    else:
        model.config._attn_implementation = name


@pytest.mark.parametrize("how", ["method", "assignment"])
@pytest.mark.parametrize("name", ["sdpa", "eager", "flex_attention"])
def test_another_attention_is_refused_at_the_next_forward(tiny, ids, name, how):
    """It would give the stock model's output while `law_of` and a save say otherwise."""
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    law = model(ids).logits
    change(model, how, name)
    with pytest.raises(ConfigError, match=rf"under 3d-rpe, which its attention '{name}' does not support.*restore"):
        model(ids)
    change(model, how, "rpe3d")
    assert torch.equal(model(ids).logits, law)


def test_another_attention_with_a_mask_of_its_own_is_refused(tiny, ids):
    """transformers asks nobody for a mask then: it ran, and was the stock model."""
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match="under 3d-rpe, which its attention 'sdpa' does not support"):
        model(ids, attention_mask=torch.ones(120, 120, dtype=torch.bool).tril()[None, None])


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_continuous_batching_under_another_attention_is_refused(tiny, ids, name):
    """It makes its own masks, and says of ours to use another attention: whoever did got the stock model's tokens."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    model.set_attn_implementation(name)
    how = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=96)
    room = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=256)  # or it takes most of the machine's memory
    given = {"generation_config": how, "continuous_batching_config": room, "progress_bar": False}
    (answer,) = model.generate_batch([ids[0].tolist()], **given).values()
    assert "under 3d-rpe" in answer.error
    assert not answer.generated_tokens


def test_a_loaded_model_refuses_another_attention_before_its_first_forward(tiny, ids, tmp_path):
    rpe3d.extend(tiny(), context=256, **BOUNDED).save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="under 3d-rpe"):
        model.generate(ids, max_new_tokens=2)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_law_of_frequencies_alone_and_a_stock_model_take_any_attention(tiny, ids, name):
    stock, model = tiny(), rpe3d.extend(tiny(), "yarn", context=256)
    expected = model(ids).logits
    for one in (stock, model):
        one.set_attn_implementation(name)
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-4)
    stock(ids)
    rpe3d.restore(rpe3d.extend(stock, context=256, **BOUNDED)).set_attn_implementation(name)
    stock(ids)


def test_a_config_that_two_models_share_is_changed_for_one(tiny, ids):
    one = tiny()
    other = type(one)(one.config).eval()
    assert other.config is one.config
    before, expected = copy.deepcopy(other.config.to_dict()), other(ids).logits
    rpe3d.extend(one, context=256, **BOUNDED)
    assert other.config.to_dict() == before
    assert torch.equal(other(ids).logits, expected)
    assert rpe3d.law_of(other) is None
    assert one.config is one.model.config is one.model.layers[0].self_attn.config
    assert rpe3d.law_of(one).context == 256


def test_a_text_beyond_the_context_is_told_of_once(tiny):
    guard._told.clear()
    model = rpe3d.extend(tiny(), context=128, **BOUNDED)
    ids = torch.arange(3, 93).repeat(1, 2)
    model(ids[:, :128])
    with pytest.warns(UserWarning, match=r"150 tokens is longer than the context 128 .* context=150 or more"):
        out = model(ids[:, :150])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids[:, 150:151], past_key_values=out.past_key_values)


def test_decoding_past_the_context_is_told_of(tiny):
    guard._told.clear()
    model = rpe3d.extend(tiny(), context=128, **BOUNDED)
    with pytest.warns(UserWarning, match="129 tokens is longer than the context 128"):
        model.generate(torch.arange(3, 93)[None], max_new_tokens=45, do_sample=False)


@pytest.mark.parametrize(
    ("name", "parameters", "endless"),
    [
        ("3d-rpe", BOUNDED, False),
        ("3d-rpe", {"chunk": 8, "window": 16, "reach": 24}, True),  # a slope of 0
        ("3d-rpe-dual-chunk", {}, True),
        ("dca", {}, True),
        ("rerope", {}, True),
        ("leaky-rerope", {}, False),
        ("self-extend", {}, False),
        ("streaming-llm", {}, True),
    ],
)
def test_a_law_is_endless_if_it_shows_a_text_of_any_length_nothing_new(name, parameters, endless):
    """By what it shows: the largest relative position of a text ten times as long."""
    law = make_law(name, pretrained=64, context=256, head_dim=16, **parameters)
    within, beyond = (
        torch.stack(
            [law.relative_angles(q, torch.arange(q + 1))[:, 0].nan_to_num().abs().max() for q in range(a, b, 7)]
        )
        for a, b in ((0, 256), (256, 2560))
    )
    assert law.endless == endless == bool(beyond.max() <= within.max() + 1e-9)
