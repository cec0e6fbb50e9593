"""The laws on real weights: SmolLM2-135M-Instruct, the default model."""

from __future__ import annotations

import pytest
import torch

import rpe3d

LENGTH = 200
# Small enough that a prompt of that many tokens reaches every region of a law.
NEAR = {
    "3d-rpe": {"chunk": 32, "window": 64, "reach": 512, "focus": 0, "fade": 0},
    "3d-rpe-definition": {"chunk": 64},
    "3d-rpe-dual-chunk": {"chunk": 50, "window": 64},
    "dca": {"chunk": 50, "window": 64},
    "self-extend": {"window": 64, "group": 16},
    "rerope": {"window": 64},
    "leaky-rerope": {"window": 64, "slope": 0.1},
    "streaming-llm": {"window": 64, "sinks": 4},
}


@pytest.fixture(scope="module")
def default(default_cache):
    from rpe3d.models.load import load

    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(default_cache))
    yield load("default")
    patch.undo()


@pytest.fixture(scope="module")
def prompt(default):
    from pydoc_data.topics import topics

    return default.tokenizer(topics["assignment"], return_tensors="pt").input_ids[:, :LENGTH]


@pytest.fixture(scope="module")
@torch.no_grad()
def stock(default, prompt):
    """The logits of the stock model."""
    return default.model(prompt).logits


@torch.no_grad()
def test_the_stock_model_comes_back_bit_for_bit(default, prompt, stock):
    rpe3d.extend(default.model, context=65536)
    law = rpe3d.law_of(default.model)
    assert (law.pretrained, law.chunk, law.window, law.reach) == (8192, 512, 2560, 4096)
    torch.testing.assert_close(default.model(prompt).logits, stock, rtol=0, atol=1e-3)  # all of it near
    assert torch.equal(rpe3d.restore(default.model)(prompt).logits, stock)


@torch.no_grad()
@pytest.mark.parametrize("name", NEAR)
def test_prefill_and_decode_equal_one_forward_on_real_weights(default, prompt, stock, name):
    model = default.model
    rpe3d.extend(model, name, context=65536, **NEAR[name])
    try:
        full = model(prompt).logits
        out = model(prompt[:, : LENGTH - 4], use_cache=True)
        parts = [out.logits]
        for t in range(LENGTH - 4, LENGTH):
            out = model(prompt[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits)
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=2e-3)
        assert (full - stock)[:, 130:].abs().max() > 0.1
    finally:
        rpe3d.restore(model)


PROMPT, NEW = 150, 5
CHECKED = ("3d-rpe", "dca", "self-extend")


@pytest.fixture(scope="module", params=["stock", *CHECKED])
def generated(request, default, prompt):
    """Greedy text of the real weights, which are said to be pretrained for 128 tokens: by cache and batch, and what
    generation warned of."""
    from transformers.generation import stopping_criteria

    model, patch, said = default.model, pytest.MonkeyPatch(), []
    patch.setattr(model.config, "max_position_embeddings", 128)
    patch.setattr(stopping_criteria.logger, "warning_once", lambda message, *_: said.append(message))
    if request.param != "stock":
        rpe3d.extend(model, request.param, context=1024)
    given = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    given |= {"eos_token_id": None, "pad_token_id": 0}
    ids, short = prompt[:, :PROMPT], prompt[:, 20:PROMPT]
    batch = torch.cat([ids, torch.nn.functional.pad(short, (20, 0))])
    mask = torch.ones_like(batch)
    mask[1, :20] = 0
    runs = {"dynamic": model.generate(ids, attention_mask=mask[:1], **given)}
    if request.param != "stock":
        runs["static"] = model.generate(ids, attention_mask=mask[:1], cache_implementation="static", **given)
        runs["short"] = model.generate(short, attention_mask=mask[:1, 20:], **given)
        runs["padded"] = model.generate(batch, attention_mask=mask, **given)
        rpe3d.restore(model)
    patch.undo()
    return request.param, runs, said


def logits(run, row=0):
    return torch.stack([step[row] for step in run.logits])


def test_generation_past_the_pretrained_length_is_neither_truncated_nor_warned_of(generated):
    name, runs, said = generated
    assert runs["dynamic"].sequences.shape == (1, PROMPT + NEW)
    assert any("exceeded the model's predefined maximum length" in message for message in said) == (name == "stock")


@pytest.mark.parametrize("generated", CHECKED, indirect=True)
def test_a_static_cache_generates_what_a_dynamic_one_does_on_real_weights(generated):
    _, runs, _ = generated
    assert torch.equal(runs["static"].sequences, runs["dynamic"].sequences)
    torch.testing.assert_close(logits(runs["static"]), logits(runs["dynamic"]), rtol=0, atol=2e-3)


@pytest.mark.parametrize("generated", CHECKED, indirect=True)
def test_a_left_padded_batch_generates_what_each_sequence_does_on_real_weights(generated):
    _, runs, _ = generated
    for row, alone in enumerate(("dynamic", "short")):
        assert torch.equal(runs["padded"].sequences[row, -NEW:], runs[alone].sequences[0, -NEW:])
        torch.testing.assert_close(logits(runs["padded"], row), logits(runs[alone]), rtol=0, atol=2e-3)
