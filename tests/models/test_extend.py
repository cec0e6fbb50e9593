"""`extend` and `restore` on tiny models of real families: what a user does with a model goes on working."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch

import rpe3d
from rpe3d import ConfigError
from rpe3d.geometry import LAWS
from rpe3d.models.extend import check_savable
from tiny_models import FAMILIES, checkpointing

BOUNDED = {"chunk": 8, "window": 16, "reach": 32, "focus": 0, "fade": 0}
CHANGED = [name for name, law in LAWS.items() if law.needs_attention]
STEADY = [name for name, law in LAWS.items() if not law.grows]  # cached keys would keep the frequencies of their time
# What 120 tokens of a model of 64 need to show all of a law.
OWN = {
    "string": {"context": 124, "shift": 64},
    "dpe": {"window": 8, "scales": (1, 5, 3, 9)},
    "lampe": {"head": 8, "mapped": 40, "length": 100, "tail": 6},
}
FACTORS = {"long_factor": [1 + n for n in range(8)], "short_factor": [1 + n / 8 for n in range(8)]}
CLOSE = {"rtol": 0, "atol": 2e-4}  # float32 logits of magnitude 10 to 100, two orders of summation


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def extended(model, name):
    return rpe3d.extend(model, name, **{"context": 256} | OWN.get(name, {}))


def logits(model, ids, **given):
    return model(ids, **given).logits


def step_by_step(model, ids, start):
    """Logits of a prompt, then of one token after the other, through the cache."""
    out = model(ids[:, :start], use_cache=True)
    parts = [out.logits]
    for t in range(start, ids.shape[1]):
        out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        parts.append(out.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_short_prompts_changes_long_ones_and_comes_back(tiny, ids, family):
    model = tiny(family)
    stock = logits(model, ids)
    rpe3d.extend(model, context=256, **BOUNDED)
    extended = logits(model, ids)
    torch.testing.assert_close(logits(model, ids[:, :24]), stock[:, :24], **CLOSE)
    assert (extended - stock)[:, 40:].abs().max() > 1e-2
    torch.testing.assert_close(step_by_step(model, ids, 70), extended, **CLOSE)
    rpe3d.restore(model)
    assert torch.equal(logits(model, ids), stock)


@pytest.mark.parametrize("name", STEADY)
def test_prefill_and_decode_equal_one_forward(tiny, ids, name):
    model = extended(tiny(), name)
    torch.testing.assert_close(step_by_step(model, ids, 90), logits(model, ids), **CLOSE)


@pytest.mark.parametrize("name", STEADY)
def test_generation_is_the_same_with_any_cache_and_in_a_padded_batch(tiny, ids, name):
    model = extended(tiny(), name)
    given = {"max_new_tokens": 10, "do_sample": False}
    alone = model.generate(ids[:, :90], **given)
    assert torch.equal(model.generate(ids[:, :90], use_cache=False, **given), alone)
    assert torch.equal(model.generate(ids[:, :90], cache_implementation="static", **given), alone)
    batch = torch.cat([torch.cat([torch.zeros(1, 30, dtype=torch.long), ids[:, :60]], 1), ids[:, :90]])
    mask = (batch != 0).long()
    padded = model.generate(batch, attention_mask=mask, **given)
    assert torch.equal(padded[1], alone[0])
    assert torch.equal(padded[0, 30:], model.generate(ids[:, :60], **given)[0])
    assert torch.equal(model.generate(batch, attention_mask=mask, cache_implementation="static", **given), padded)


@pytest.mark.parametrize(("name", "near"), [("string", 64), ("dpe", 8)])
def test_short_prompts_are_unharmed_and_long_ones_changed(tiny, ids, name, near):
    model = tiny()
    stock = logits(model, ids)
    extended(model, name)
    torch.testing.assert_close(logits(model, ids[:, :near]), stock[:, :near], **CLOSE)
    assert (logits(model, ids) - stock)[:, near:].abs().max() > 1e-2
    assert torch.equal(logits(rpe3d.restore(model), ids), stock)


@pytest.mark.parametrize("name", ["3d-rpe", "dca", "self-extend", "string", "dpe", "lampe"])
def test_a_right_padded_batch_equals_each_sequence_alone(tiny, ids, name):
    model = extended(tiny(), name)
    batch = torch.cat([ids, ids.flip(1)])
    mask = torch.ones_like(batch)
    mask[1, 80:] = 0
    out = logits(model, batch, attention_mask=mask)
    torch.testing.assert_close(out[:1], logits(model, ids), **CLOSE)
    torch.testing.assert_close(out[1:, :80], logits(model, ids.flip(1)[:, :80]), **CLOSE)


def test_beams_and_assisted_decoding(tiny, ids):
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    prompt = ids[:, :90]
    greedy = model.generate(prompt, max_new_tokens=10, do_sample=False)
    assistant = rpe3d.extend(tiny(num_hidden_layers=1), "rerope", context=256)
    assisted = model.generate(prompt, max_new_tokens=10, do_sample=False, assistant_model=assistant)
    assert torch.equal(assisted, greedy)
    beams = model.generate(prompt, max_new_tokens=6, do_sample=False, num_beams=3)
    uncached = model.generate(prompt, max_new_tokens=6, do_sample=False, num_beams=3, use_cache=False)
    assert torch.equal(beams, uncached)


@pytest.mark.parametrize("name", rpe3d.laws())
def test_a_saved_model_is_the_same_model_any_number_of_times(tiny, ids, tmp_path, name):
    from transformers import AutoModelForCausalLM

    model = extended(tiny(), name)
    law = rpe3d.law_of(model)
    expected = logits(model, ids)
    for n in range(3):
        model.save_pretrained(tmp_path / str(n))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(n)).eval()
        assert torch.equal(logits(model, ids), expected)
        assert rpe3d.law_of(model) == law
    config = json.loads((tmp_path / "2" / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"].startswith("rpe3d")
    assert torch.equal(logits(rpe3d.restore(model), ids), logits(tiny(), ids))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "phi3"])
def test_every_family_is_the_same_after_it_was_saved_and_loaded_twice(tiny, ids, tmp_path, family):
    from transformers import AutoModelForCausalLM

    model = rpe3d.extend(tiny(family), context=256, **BOUNDED)
    expected = logits(model, ids)
    for n in range(2):
        model.save_pretrained(tmp_path / str(n))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(n)).eval()
        assert torch.equal(logits(model, ids), expected)


def test_restoring_a_model_leaves_another_that_was_built_on_its_config(tiny, ids):
    """Two models on one config object, as `Model(model.config)` makes them: each keeps its own law."""
    model = extended(tiny("llama"), "3d-rpe")
    other = type(model)(model.config).eval()
    before = other(ids).logits
    rpe3d.restore(model)
    assert rpe3d.law_of(model) is None
    assert rpe3d.law_of(other).name == "3d-rpe"
    assert torch.equal(other(ids).logits, before)


def test_a_config_that_takes_no_rope_type_but_its_own_is_found_out_before_saving(tiny):
    """Phi-3's class validates the names of rope types itself, so no registry lets it hold a law."""
    with pytest.raises(ConfigError, match="Phi3ForCausalLM runs under a law but cannot be saved with it"):
        check_savable(rpe3d.extend(tiny("phi3"), context=256, **BOUNDED))
    check_savable(rpe3d.extend(tiny(), context=256, **BOUNDED))


def test_without_our_import_loading_fails_loudly(tiny, tmp_path):
    """It may come before that of transformers, or after it: in a process that is forked from the one without."""
    rpe3d.extend(tiny(), context=256).save_pretrained(tmp_path)
    theirs = "from transformers import AutoModelForCausalLM"
    load = f"AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    fork = """
import os, sys
child = os.fork()
if child:
    os.waitpid(child, 0)[1] == 0 and print("alone", file=sys.stderr, flush=True)
else:
    import rpe3d
"""
    run = [sys.executable, "-W", "ignore", "-c"]
    without = subprocess.run([*run, f"{theirs}\n{fork}\n{load}"], capture_output=True, text=True)
    assert without.returncode != 0
    loaded_after, alone, said = without.stderr.partition("alone\n")
    assert alone, loaded_after
    assert "rpe3d" in said
    assert subprocess.run([*run, f"import rpe3d\n{theirs}\n{load}"], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"law": "3d-rpe"}, "the law is '3d-rpe', which is not a dict"),
        ({"law": {"name": "3d-rpe", "head_dim": 16}}, "the law '3d-rpe' lacks pretrained"),
        ({"stock": None}, "not the model's own rope parameters"),
    ],
)
def test_a_damaged_config_is_named(tiny, tmp_path, damage, message):
    rpe3d.extend(tiny(), context=256).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["rope_parameters"] |= damage
    content["rope_parameters"] = {
        name: value for name, value in content["rope_parameters"].items() if value is not None
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        type(tiny()).from_pretrained(tmp_path)


def test_two_models_with_two_laws_and_a_stock_one_side_by_side(tiny, ids):
    stock = tiny()
    expected = logits(stock, ids)
    one, two = rpe3d.extend(tiny(), context=256, **BOUNDED), rpe3d.extend(tiny(), "rerope", context=256)
    first, second = logits(one, ids), logits(two, ids)
    assert not torch.allclose(first, second)
    assert torch.equal(logits(one, ids), first)
    assert torch.equal(logits(stock, ids), expected)


def test_extending_again_replaces_the_law(tiny, ids):
    model = rpe3d.extend(tiny(), "yarn", context=128)
    rpe3d.extend(model, context=256, **BOUNDED)
    fresh = rpe3d.extend(tiny(), context=256, **BOUNDED)
    assert torch.equal(logits(model, ids), logits(fresh, ids))
    assert rpe3d.law_of(model) == rpe3d.law_of(fresh)
    assert model.config.max_position_embeddings == 256
    assert torch.equal(logits(rpe3d.restore(model), ids), logits(tiny(), ids))
    assert rpe3d.law_of(model) is None


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("linear", {"rope_type": "linear", "factor": 4.0}),
        ("yarn", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        ("dynamic", {"rope_type": "dynamic", "factor": 1.0}),
        ("longrope", {"rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS}),
    ],
)
def test_frequency_laws_equal_stock_transformers_configured_by_itself(tiny, ids, name, theirs):
    length = {} if name == "dynamic" else {"max_position_embeddings": 256}
    peer = tiny(rope_parameters={"rope_theta": 10000.0, **theirs}, **length)
    model = rpe3d.extend(tiny(), name, context=256, **FACTORS if name == "longrope" else {})
    for tokens in (ids, ids[:, :40], ids):
        torch.testing.assert_close(logits(model, tokens), logits(peer, tokens), **CLOSE)


def test_a_model_with_its_own_scaling_keeps_it_underneath(tiny, ids):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = tiny(rope_parameters=scaling)
    stock = logits(model, ids)
    rpe3d.extend(model, context=256, **BOUNDED)
    torch.testing.assert_close(logits(model, ids[:, :24]), stock[:, :24], **CLOSE)
    assert torch.equal(logits(rpe3d.restore(model), ids), stock)


def test_gradients_flow_and_checkpointing_changes_nothing(tiny, ids):
    gradients = []
    for again in (False, True):
        model = rpe3d.extend(tiny(), context=256, **BOUNDED).train()
        checkpointing(model, again)
        with torch.enable_grad():
            model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_short_prompt_is_the_same_bit_for_bit(tiny, ids, tmp_path, scaling, dtype):
    """Up to window + chunk tokens, in memory and loaded again: not even the table's last bit may differ."""
    model = tiny(rope_parameters={"rope_theta": 5000.0, **scaling}).to(dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # not rounded with the weights
    near = ids[:, :24]
    before = model(near).logits
    rpe3d.extend(model, context=256, chunk=8, window=16, reach=32, focus=0, fade=0)
    assert torch.equal(model(near).logits, before)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert torch.equal(loaded(near).logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_cast_whole_gets_a_table_in_float32_and_has_its_own_back(tiny, ids, dtype):
    """`model.to(torch.bfloat16)` rounds the rotary table, too, which a law does not stand on."""
    model = tiny().to(dtype)
    table = model.model.rotary_emb.inv_freq.clone()
    before = model(ids).logits
    rpe3d.extend(model, context=256)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.isfinite(model(ids).logits).all()
    rpe3d.restore(model)
    assert model.model.rotary_emb.inv_freq.dtype == dtype
    assert torch.equal(model.model.rotary_emb.inv_freq, table)
    assert torch.equal(model(ids).logits, before)


def test_packed_rows_and_masks_of_four_dimensions_are_refused(tiny, ids):
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    packed = torch.cat([torch.arange(60), torch.arange(60)])[None]
    with pytest.raises(ConfigError, match="packed"):
        model(ids, position_ids=packed, use_cache=False)
    with pytest.raises(ConfigError, match="causal and takes only padding"):
        model(ids, attention_mask=torch.ones(1, 1, 120, 120, dtype=torch.bool))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"law": "3drpe", "context": 256}, "law '3drpe' is not known"),
        ({"context": 32}, "context is 32, below the pretrained length 64"),
        ({"context": 256, "chunk": 0}, "chunk is 0"),
        ({"context": 256, "windows": 3}, "no parameter 'windows'"),
        ({"context": 256, "rope_theta": 5e4}, "rope_theta is read from the model"),
    ],
)
def test_wrong_parameters_leave_the_model_as_it_was(tiny, ids, given, message):
    model = tiny()
    before, config = logits(model, ids), model.config.to_dict()
    with pytest.raises(ConfigError, match=message):
        rpe3d.extend(model, **given)
    assert torch.equal(logits(model, ids), before)
    assert model.config.to_dict() == config


def test_what_cannot_be_extended_is_refused_with_the_reason(tiny):
    from transformers import BertConfig, BertModel, BloomConfig, BloomForCausalLM

    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    with pytest.raises(ConfigError, match="BertModel is not a causal language model"):
        rpe3d.extend(BertModel(BertConfig(**size)), context=1024)
    with pytest.raises(ConfigError, match="Bloom"):
        rpe3d.extend(BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=50)), context=4096)
    with pytest.raises(ConfigError, match="is not a Hugging Face model"):
        rpe3d.extend(torch.nn.Linear(2, 2), context=1024)
    with pytest.raises(ConfigError, match="not extended"):
        rpe3d.restore(tiny())


def test_a_family_that_a_law_cannot_reach_is_refused_in_plain_words(tiny):
    """What families do that no law follows, done to a llama: the words must not be those of an exception."""
    indexed = tiny()
    indexed.model.layers[0].self_attn.indexer = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="an indexer of its own chooses the keys"):
        rpe3d.extend(indexed, context=256)
    several = tiny()
    several.model.unused = several.model.rotary_emb
    other = copy.deepcopy(several.config)
    other.rope_parameters["rope_theta"] *= 2
    several.model.rotary_emb = type(several.model.unused)(config=other)
    with pytest.raises(ConfigError, match="its layers are turned by several frequencies"):
        rpe3d.extend(several, "yarn", context=256)
    unreached = tiny()
    unreached._supports_attention_backend = False
    unreached.model.layers[0].self_attn.forward = lambda *_, **__: None + 1
    with pytest.raises(ConfigError, match="does not go through transformers' attention registry"):
        rpe3d.extend(unreached, context=256)


@pytest.mark.parametrize("name", ["3d-rpe", "dca", "yarn"])
def test_a_compiled_decoding_step_is_one_graph_with_the_same_logits(tiny, ids, name):
    from transformers import StaticCache

    model = rpe3d.extend(tiny(), name, context=256)
    results = []
    for compile_it in (False, True):
        forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager") if compile_it else model.forward
        cache = StaticCache(config=model.config, max_cache_len=128)
        model(ids[:, :90], past_key_values=cache, use_cache=True)
        steps = []
        for t in range(90, 94):
            given = {"position_ids": torch.tensor([[t]]), "past_key_values": cache, "use_cache": True}
            steps.append(forward(ids[:, t : t + 1], **given).logits)
        results.append(torch.cat(steps, 1))
    torch.testing.assert_close(*results, **CLOSE)


@pytest.mark.parametrize("masked", [False, True])
def test_a_compiled_prompt_is_one_graph_with_the_same_logits(tiny, ids, masked):
    from transformers import StaticCache

    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    cache = StaticCache(config=model.config, max_cache_len=160)
    cache.early_initialization(1, 2, 16, torch.float32, "cpu")
    forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    given = {"attention_mask": torch.ones_like(ids)} if masked else {}
    out = forward(ids, position_ids=torch.arange(120)[None], past_key_values=cache, use_cache=True, **given)
    torch.testing.assert_close(out.logits, logits(model, ids), **CLOSE)


def test_a_compiled_prompt_with_padding_before_it_is_the_prompt_alone(tiny, ids):
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    padded, mask = (torch.nn.functional.pad(x, (13, 0)) for x in (ids, torch.ones_like(ids)))
    forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    out = forward(padded, attention_mask=mask, position_ids=torch.arange(padded.shape[1])[None], use_cache=False)
    torch.testing.assert_close(out.logits[:, 13:], logits(model, ids), **CLOSE)
