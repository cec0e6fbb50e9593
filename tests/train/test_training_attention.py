"""The attention of a training run is the model's own under its law; what differs is what was asked for."""

from __future__ import annotations

import pytest
import torch

import rpe3d
import tiny_lm
from rpe3d.attention.problem import placed
from rpe3d.config import ConfigError
from rpe3d.train import attention as trained
from rpe3d.train.attention import TrainingAttention, training_attention
from rpe3d.train.ulysses import SequenceParallel

BOUNDED = {"chunk": 16, "window": 32, "reach": 64, "focus": 0, "fade": 0}


@pytest.fixture
def ids():
    return torch.randint(1, 257, (2, 150))


def gradients(model, ids, **given):
    model.zero_grad()
    loss = model(ids, labels=ids, **given).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("law", ["3d-rpe", "3d-rpe-definition", "3d-rpe-dual-chunk", "linear", "yarn", "dca"])
def test_it_is_the_models_own_attention_with_its_gradients(ids, law):
    model = rpe3d.extend(tiny_lm.model(), law, context=512, **BOUNDED if law == "3d-rpe" else {})
    loss, truth = gradients(model, ids)
    with training_attention(model, TrainingAttention()):
        ours, found = gradients(model, ids)
    assert torch.allclose(ours, loss, rtol=1e-6)
    for a, b in zip(found, truth, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "smollm3"])
def test_families_with_windows_softcaps_sinks_and_unrotated_layers_keep_them(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4}
    sizes |= {"head_dim": 8, "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 24}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1} if family == "gpt_oss" else {}
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.3, **sizes, **experts
    )
    stock = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=stock).eval()
    rpe3d.extend(model, context=256, chunk=8, window=16, reach=32, focus=0, fade=0)
    ids = torch.randint(3, 97, (2, 90))
    loss, truth = gradients(model, ids, use_cache=False)
    with training_attention(model, TrainingAttention()):
        ours, found = gradients(model, ids, use_cache=False)
    assert torch.allclose(ours, loss, rtol=1e-5)
    for a, b in zip(found, truth, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_the_models_own_attention_is_back_afterwards(ids):
    model = rpe3d.extend(tiny_lm.model(), context=512, **BOUNDED)
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="stop"), training_attention(model, TrainingAttention()):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == before == "rpe3d"


@pytest.mark.parametrize("law", ["3d-rpe", "linear"])
def test_skipped_positions_are_a_longer_text_with_the_middle_left_out(law):
    """PoSE's claim: a window whose positions skip is part of a long text, for a law as for RoPE.

    Keys that are masked away in the long text are as good as absent.
    """
    model = rpe3d.extend(tiny_lm.model(), law, context=512, **BOUNDED if law == "3d-rpe" else {}).eval()
    long = torch.randint(1, 257, (1, 400))
    kept = torch.cat([torch.arange(40), torch.arange(300, 360)])
    ones = torch.ones(1, 100, dtype=torch.long)
    with torch.no_grad(), training_attention(model, TrainingAttention(skipping=True)):
        ours = model(long[:, kept], position_ids=kept[None], attention_mask=ones).logits
    mask = torch.full((400, 400), -torch.inf).triu(1)
    mask[:, 40:300] = -torch.inf
    mask[40:300, 40:300].fill_diagonal_(0.0)
    truth = dense_logits(model, long[:, :360], mask[:360, :360])[:, kept]
    assert torch.allclose(ours, truth, atol=2e-4)


def test_skipped_positions_are_read_from_the_device_once_a_step(monkeypatch):
    model = rpe3d.extend(tiny_lm.model(), "3d-rpe", context=512, **BOUNDED).eval()
    read = []
    monkeypatch.setattr(trained, "placed", lambda *x: read.append(x) or placed(*x))
    kept = torch.cat([torch.arange(40), torch.arange(300, 360)])[None]
    with torch.no_grad(), training_attention(model, TrainingAttention(skipping=True)):
        first = model(kept % 257, position_ids=kept).logits
        assert len(read) == 1
        kept[:, 40:] += 9  # in place: another step
        assert not torch.equal(model(kept % 257, position_ids=kept).logits, first)
    assert len(read) == 2


def dense_logits(model, ids, mask):
    """The model with the law's dense specification and a mask of any form."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from rpe3d.attention.problem import check
    from rpe3d.rotation import cos_sin, rotate

    law = rpe3d.law_of(model)

    def attend(module, q, k, v, attention_mask, scaling=None, **kwargs):
        x = check(q, k, v, law, rotated=True)
        query, key = x.positions()
        scores = torch.zeros(*q.shape[:3], k.shape[2])
        for region in law.regions:
            turned = []
            for y, turn, positions in ((q, region.query, query), (k, region.key, key)):
                cos, sin = cos_sin(x.angles(turn, positions, x.frequencies), dtype=torch.float32)
                turned.append(rotate(y, None, cos, sin, impl="reference")[0])
            there = region.contains(*torch.broadcast_tensors(query[0][:, None], key[0][None, :]))
            part = turned[0] @ turned[1].repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
            scores = torch.where(there, part * scaling, scores)
        return ((scores + mask).softmax(-1) @ v).transpose(1, 2), None

    AttentionInterface.register("dense", attend)
    AttentionMaskInterface.register("dense", lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.config._attn_implementation = "dense"
    try:
        with torch.no_grad():
            return model(ids).logits
    finally:
        model.config._attn_implementation = before


def test_stock_attention_needs_a_mask_of_ones_where_positions_skip():
    """Why our batches carry one: transformers takes a jump in positions for another sequence, and hides the first."""
    model = tiny_lm.model()
    ids, positions = torch.randint(1, 257, (1, 40)), torch.cat([torch.arange(20), torch.arange(100, 120)])[None]
    with torch.no_grad():
        hidden = model(ids, position_ids=positions, use_cache=False).logits[:, 20:]
        seen = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits[:, 20:]
        alone = model(ids[:, 20:], position_ids=positions[:, 20:]).logits
    assert torch.allclose(hidden, alone, atol=1e-5)
    assert not torch.allclose(seen, alone, atol=1e-2)


@pytest.mark.parametrize("group", [None, 32])
def test_float32_weights_under_autocast_run_in_bfloat16(ids, group):
    """Embeddings in float32 make a float32 table, which must not make q and k of another type than v."""
    model = rpe3d.extend(tiny_lm.model(), context=512, **BOUNDED)
    with training_attention(model, TrainingAttention(group=group)):
        exact, _ = gradients(model, ids)
        with torch.autocast("cpu", torch.bfloat16):
            rounded, found = gradients(model, ids)
    assert all(torch.isfinite(x).all() for x in found)
    assert 0 < abs(rounded - exact) < 0.05


def test_heads_that_choose_together_are_not_parted(ids):
    """Every query head would choose for itself, out of its group of tokens alone: not what the model does later."""
    model = rpe3d.extend(tiny_lm.model(), context=512, **BOUNDED, far=2)
    with training_attention(model, TrainingAttention(group=32)), pytest.raises(ConfigError, match="from the whole"):
        model(ids)
    two = SequenceParallel(size=2, rank=0, group=None)
    q, k = torch.zeros(1, 6, 4, 8), torch.zeros(1, 3, 4, 8)
    with pytest.raises(ConfigError, match="3 key heads cannot be divided among 2 processes"):
        two.attend(q, k, k, None, None, lambda *_: q, together=True)


def test_dropout_is_refused(ids):
    model = rpe3d.extend(tiny_lm.model(), context=512, **BOUNDED).train()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with training_attention(model, TrainingAttention()), pytest.raises(ConfigError, match="attention dropout is"):
        model(ids)
