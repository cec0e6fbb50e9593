"""Token likelihoods in pieces against the model's own logits."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import rpe3d
from rpe3d.evaluate import likelihood
from rpe3d.evaluate.likelihood import head_in_pieces, token_nll
from rpe3d.models import pieces

SIZE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
# Families whose logits are bent after the head, bent so much that it cannot be overlooked.
FAMILIES = {
    "llama": {},
    "gpt_neox": {},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 1.0},
    "gemma3_text": {"head_dim": 16, "final_logit_softcapping": 1.0},
    "granite": {"logits_scaling": 0.2},
    "cohere": {"logit_scale": 5.0},
}


def make(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZE, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.fixture
def tokens():
    return torch.randint(1, 97, (2, 50), generator=torch.Generator().manual_seed(1))


def own_nll(model, tokens):
    """What torch makes of the model's own logits."""
    with torch.no_grad():
        logits = model(tokens).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_give_what_the_models_own_logits_give(monkeypatch, family, tokens):
    model = make(family)
    monkeypatch.setattr(likelihood, "PIECE", 2 * 97 * 7)  # seven tokens a piece
    assert head_in_pieces(model)
    expected = own_nll(model, tokens)
    torch.testing.assert_close(token_nll(model, tokens), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(token_nll(model, tokens, last=9), expected[:, -9:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own_nll(model, tokens), expected, rtol=0, atol=0)  # nothing is left on the model


def test_the_head_never_sees_more_than_a_piece(monkeypatch, tokens):
    model = make("llama")
    monkeypatch.setattr(likelihood, "PIECE", 2 * 97 * 7)
    head_in_pieces(model)
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    token_nll(model, tokens)
    assert max(seen) == 7
    assert sum(seen) == 49 + 1  # the forward itself makes one token's


def test_the_decoder_runs_once_and_under_the_law(tokens):
    model = make("llama")
    head_in_pieces(model)
    stock = token_nll(model, tokens)
    rpe3d.extend(model, "dca", context=256, chunk=8, window=12)
    runs = []
    model.model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    ours = token_nll(model, tokens)
    assert len(runs) == 1
    torch.testing.assert_close(ours, own_nll(model, tokens), rtol=1e-5, atol=1e-5)
    assert (ours - stock).abs().max() > 0.01


@pytest.mark.parametrize(
    ("family", "law"), [("llama", {"far": 3}), ("llama", {}), ("gemma3_text", None), ("granite", None)]
)
def test_a_window_too_long_to_be_read_at_once_has_the_losses_of_one_that_is(monkeypatch, tokens, family, law):
    """Pieces of 16 tokens, of which the last has two; the decoder's outputs of all of them go through the head."""
    model = make(family)
    head_in_pieces(model)
    if law is not None:
        rpe3d.extend(model, context=256, chunk=8, window=8, reach=24, **law)
    expected = own_nll(model, tokens)
    monkeypatch.setattr(pieces, "AT_ONCE", 40)
    monkeypatch.setattr(pieces, "PIECE", 16)
    read = []
    model.model.layers[0].register_forward_hook(lambda *call: read.append(call[-1].shape[1]))
    torch.testing.assert_close(token_nll(model, tokens), expected, rtol=1e-5, atol=1e-4)
    assert read == [16, 16, 16, 2]
    torch.testing.assert_close(token_nll(model, tokens, last=9), expected[:, -9:], rtol=1e-5, atol=1e-4)


def test_a_model_whose_head_cannot_be_cut_is_asked_for_all_of_its_logits(tokens):
    class Other(LlamaForCausalLM):
        def forward(self, input_ids, use_cache=None):
            return super().forward(input_ids, use_cache=use_cache)

    torch.manual_seed(0)
    model = Other(AutoConfig.for_model("llama", **SIZE)).eval()
    assert not head_in_pieces(model)
    expected = own_nll(model, tokens)
    torch.testing.assert_close(token_nll(model, tokens), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(token_nll(model, tokens, last=9), expected[:, -9:], rtol=1e-5, atol=1e-5)


def test_half_precision_logits_are_normalised_in_float32(tokens):
    model = make("llama").bfloat16()
    out = token_nll(model, tokens)
    assert out.dtype == torch.float32
    with torch.no_grad():
        logits = model(tokens).logits.float()
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    torch.testing.assert_close(out, expected, rtol=0, atol=0.05)
