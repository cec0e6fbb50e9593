"""Families whose attention is told no positions: noted where cos and sin are made, exact, or refused."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, StaticCache

import rpe3d
from rpe3d import ConfigError
from rpe3d.models.noted import is_watched
from tiny_models import SIZE, checkpointing, make

LAW = {"context": 512, "chunk": 8, "window": 16, "reach": 32}


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Tiny models."""


@pytest.fixture
def persimmon():
    """Persimmon hands position ids to its attention layers, which do not pass them on (transformers 5.16 to 5.23)."""
    return rpe3d.extend(make("persimmon"), **LAW)


def rotary(model):
    return next(m for m in model.modules() if hasattr(m, "inv_freq"))


def test_a_padded_batch_is_each_row_alone(persimmon, ids):
    """The mask alone cannot tell whether positions skip the padding: `generate` counts tokens."""
    short = ids[:, :90]
    padded = torch.cat([torch.zeros(1, 30, dtype=torch.long), short], 1)
    batch = torch.cat([ids, padded])
    mask = (batch != 0).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = persimmon(batch, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(out[0], persimmon(ids).logits[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(out[1, 30:], persimmon(short).logits[0], atol=1e-4, rtol=0)


def test_generate_equals_one_forward_after_the_other(persimmon, ids):
    """Greedy decoding through the cache is greedy decoding without it."""
    cached = persimmon.generate(ids[:, :70], max_new_tokens=20, do_sample=False)
    plain = persimmon.generate(ids[:, :70], max_new_tokens=20, do_sample=False, use_cache=False)
    assert torch.equal(cached, plain)


def test_a_loaded_model_notes_positions_as_the_saved_one_did(persimmon, ids, tmp_path):
    """Loading calls nothing of ours but the rope type: the module must be found all the same."""
    persimmon.save_pretrained(tmp_path)
    loaded = type(persimmon).from_pretrained(tmp_path).eval()
    assert is_watched(rotary(loaded))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, persimmon(ids).logits)
        rpe3d.restore(loaded)
        assert torch.equal(loaded(ids).logits, make("persimmon")(ids).logits)
    assert not is_watched(rotary(loaded))


def test_restore_and_a_law_of_frequencies_note_nothing(persimmon):
    """Interpolation needs no positions: what is not needed is not hooked."""
    assert is_watched(rotary(persimmon))
    rpe3d.extend(persimmon, "linear", context=512)
    assert not is_watched(rotary(persimmon))
    rpe3d.extend(persimmon, **LAW)
    rpe3d.restore(persimmon)
    assert not is_watched(rotary(persimmon))


def test_threads_do_not_see_each_others_positions(persimmon, ids):
    """A server runs one model in several threads."""
    lengths = (60, 100, 120)
    with torch.no_grad():
        alone = {n: persimmon(ids[:, :n]).logits for n in lengths}
    failures = []

    def run(n):
        with torch.no_grad():
            for _ in range(5):
                if not torch.allclose(persimmon(ids[:, :n]).logits, alone[n], atol=1e-4):
                    failures.append(n)

    threads = [threading.Thread(target=run, args=(n,)) for n in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_layers_that_run_again_for_their_gradients_are_refused(persimmon, ids):
    """Gradient checkpointing runs a layer again after other forwards may have noted other positions."""
    persimmon.train()
    checkpointing(persimmon, True)
    with pytest.raises(ConfigError, match="without gradient checkpointing"):
        persimmon(ids).logits.sum().backward()
    checkpointing(persimmon, False)
    persimmon(ids).logits.sum().backward()
    assert next(persimmon.parameters()).grad is not None


def test_layers_run_again_where_attention_is_handed_positions_besides(ids):
    """Qwen3.5 hands the text's positions on: with checkpointing the gradients are those without it."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
              "linear_value_head_dim": 16, "head_dim": 32, "num_hidden_layers": 4}  # fmt: skip
    model = rpe3d.extend(make("qwen3_5_text", **linear), **LAW).train()
    assert is_watched(rotary(model))
    gradients = []
    for again in (False, True):
        checkpointing(model, again)
        losses = [model(ids[:, :n], labels=ids[:, :n]).loss for n in (60, 100)]  # two forwards before one backward
        model.zero_grad()
        sum(losses).backward()
        gradients.append(model.model.layers[3].self_attn.q_proj.weight.grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_compiled_step_is_the_eager_one(persimmon, ids):
    """One graph, whole, with a static cache: what `generate` compiles."""
    cache = StaticCache(config=persimmon.config, max_cache_len=128)
    with torch.no_grad():
        full = persimmon(ids).logits
        persimmon(ids[:, :100], past_key_values=cache)
        step = torch.compile(persimmon.forward, fullgraph=True, backend="aot_eager")
        for t in range(100, 104):
            where = torch.tensor([[t]])
            out = step(ids[:, t : t + 1], past_key_values=cache, position_ids=where).logits
            torch.testing.assert_close(out[:, 0], full[:, t], atol=1e-4, rtol=0)


@pytest.fixture
def qwen_vl():
    text = SIZE | {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).eval()


def test_a_text_without_pictures_is_under_the_law(qwen_vl, ids):
    """Qwen2.5-VL gives a text three rows of the same positions: short texts are stock, long ones are not."""
    with torch.no_grad():
        stock = qwen_vl(ids).logits
        rpe3d.extend(qwen_vl, **LAW)
        torch.testing.assert_close(qwen_vl(ids[:, :24]).logits, stock[:, :24], atol=1e-4, rtol=0)
        assert (qwen_vl(ids).logits - stock).abs().max() > 0.1
        rows = torch.arange(120).expand(3, 1, 120).clone()
        torch.testing.assert_close(qwen_vl(ids, position_ids=rows).logits, qwen_vl(ids).logits, atol=1e-4, rtol=0)


def test_a_picture_on_a_plane_is_refused(qwen_vl, ids):
    """Height and width of a picture's patches are two coordinates, which no law of one distance places."""
    rows = torch.arange(120).expand(3, 1, 120).clone()
    rows[1, 0, 40:56] = 40 + torch.arange(16) // 4
    rows[2, 0, 40:56] = 40 + torch.arange(16) % 4
    with torch.no_grad():
        qwen_vl(ids, position_ids=rows)
        rpe3d.extend(qwen_vl, **LAW)
        with pytest.raises(ConfigError, match="images have two-dimensional positions"):
            qwen_vl(ids, position_ids=rows)


def test_a_model_of_pictures_is_loaded_by_its_name(qwen_vl, ids, tmp_path):
    """`rpe3d extend` and `doctor` take a folder: Qwen2.5-VL is none of transformers' causal LMs."""
    from rpe3d.models.load import load

    qwen_vl.save_pretrained(tmp_path)
    loaded = load(str(tmp_path), with_tokenizer=False, device="cpu").model
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, qwen_vl(ids).logits)
        rpe3d.extend(loaded, **LAW).save_pretrained(tmp_path / "long")
        again = load(str(tmp_path / "long"), with_tokenizer=False, device="cpu").model
        assert torch.equal(again(ids).logits, loaded(ids).logits)
    assert rpe3d.law_of(again) == rpe3d.law_of(loaded)
