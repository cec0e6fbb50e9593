"""Heads whose pairs lie elsewhere than Llama's, and bases that are not plain powers: found by running, then exact."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rpe3d
from rpe3d import ConfigError
from rpe3d.models.extend import facts, text_config
from rpe3d.models.probe import probe
from tiny_models import FAMILIES, make

LAW = {"context": 512, "chunk": 8, "window": 16, "reach": 32}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
          "num_key_value_heads": 4, "first_k_dense_replace": 9}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0 + pair / 8 for pair in range(8)],
    "long_factor": [1.0 + pair for pair in range(8)],
    "original_max_position_embeddings": 32,
}


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Tiny models."""


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize(
    ("family", "given", "interleaved", "pieces"),
    [
        ("llama", {}, False, ()),
        ("deepseek_v3", LATENT, False, ((16, 24), (0, 16))),
        ("deepseek_v2", LATENT, True, ((16, 24), (0, 16))),
        ("nanochat", {"head_dim": 16}, False, ((8, 16), (0, 8))),
    ],
)
def test_the_pairs_of_a_head_are_found(tiny, family, given, interleaved, pieces):
    """DeepSeek turns the last dimensions, v2 in neighbours; nanochat turns backwards (their modeling files)."""
    model = tiny(family, **given)
    found = probe(model, text_config(model))
    assert (found.interleaved, found.pieces) == (interleaved, pieces)


def test_threads_that_extend_models_at_once_find_the_heads_of_their_own(tiny):
    """The probe stands in transformers' registry under one name, whichever thread asks."""
    families = ("llama", "glm", "nanochat", "qwen3") * 2
    models = [tiny(family, **({} if family == "llama" else {"head_dim": 16})) for family in families]
    alone = [probe(model, text_config(model)) for model in models]
    every = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda model: probe(model, text_config(model)), models))
    finally:
        sys.setswitchinterval(every)
    assert [(one.interleaved, one.pieces, one.layers) for one in found] == [
        (one.interleaved, one.pieces, one.layers) for one in alone
    ]


@pytest.mark.parametrize("scaling", [{}, {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}])
def test_a_latent_model_is_saved_with_its_law(tiny, ids, tmp_path, scaling):
    """DeepSeek reads YaRN's temperature from the rope parameters as soon as their type is not the default."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 16, **scaling}
    model = tiny("deepseek_v3", **LATENT, **({"rope_parameters": yarn} if scaling else {}))
    stock = logits(model, ids)
    rpe3d.extend(model, **LAW).save_pretrained(tmp_path)
    torch.testing.assert_close(logits(model, ids[:, :24]), stock[:, :24], atol=1e-4, rtol=0)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert torch.equal(logits(rpe3d.restore(loaded), ids), stock)


def test_a_head_that_turns_in_no_known_way_is_refused(tiny, monkeypatch):
    """Pairs in the order of a shuffle: nothing of what is published."""
    from transformers.models.llama import modeling_llama

    shuffle = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    right = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, *table: right(q[..., shuffle], k[..., shuffle], *table)
    )
    model = tiny()
    probe(model, text_config(model))  # shuffled before it is turned is Llama's

    def after(q, k, *table):
        back = shuffle.argsort()
        q, k = right(q[..., shuffle], k[..., shuffle], *table)
        return q[..., back], k[..., back]

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", after)
    with pytest.raises(ConfigError, match="its pairs of dimensions, or the way in which they turn"):
        rpe3d.extend(model, **LAW)


def test_queries_and_keys_that_pair_differently_are_refused(tiny, monkeypatch):
    """The keys are looked at as well as the queries."""
    from transformers.models.llama import modeling_llama

    right = modeling_llama.apply_rotary_pos_emb

    def keys_backwards(q, k, cos, sin):
        return right(q, k, cos, sin)[0], right(q, k, cos, -sin)[1]

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", keys_backwards)
    with pytest.raises(ConfigError, match="its pairs of dimensions, or the way in which they turn"):
        rpe3d.extend(tiny(), **LAW)


@pytest.mark.parametrize(("law", "given"), [("yarn", {"context": 256}), ("dynamic", {"context": 256}), ("3d-rpe", LAW)])
def test_cos_and_sin_from_a_copy_of_the_config_are_under_the_law(tiny, ids, law, given):
    """Granite SWA makes its tables from copies of its config, one for each base."""
    plain, copied = tiny(), tiny()
    copied.model.unused = copied.model.rotary_emb
    copied.model.rotary_emb = type(copied.model.unused)(config=copy.deepcopy(copied.config))
    stock = logits(copied, ids)
    rpe3d.extend(copied, law, **given)
    assert torch.equal(logits(copied, ids), logits(rpe3d.extend(plain, law, **given), ids))
    assert torch.equal(logits(rpe3d.restore(copied), ids), stock)


def proportional():
    """A llama that turns the first quarter of each half of a head, as Gemma 4's layers with full attention."""
    return make(rope_parameters={"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})


def test_a_proportional_base_is_that_of_the_pairs_that_turn():
    """θ_l = B^(-2l/d) for 4 of 8 pairs is b^(-2l/r) with r = 8 of d = 16 dimensions and b = B^(r/d) = 100."""
    known = facts(proportional())
    assert (known["head_dim"], known["rotary_dim"]) == (16, 8)
    assert known["rope_theta"] == pytest.approx(100.0)


def test_a_law_over_a_proportional_base_leaves_short_texts_and_is_undone(ids):
    model = proportional()
    stock = logits(model, ids)
    rpe3d.extend(model, **LAW)
    torch.testing.assert_close(logits(model, ids[:, :24]), stock[:, :24], atol=1e-4, rtol=0)
    assert (logits(model, ids) - stock).abs().max() > 0.1
    rpe3d.extend(model, "linear", context=128)  # a law of frequencies keeps the pairs that stand still
    table = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(table[:4], 10000.0 ** -(torch.arange(4) / 8) / 2)
    assert table[4:].tolist() == [0] * 4
    assert torch.equal(logits(rpe3d.restore(model), ids), stock)


def phi(**given):
    return make("phi3", original_max_position_embeddings=32, rope_parameters=LONGROPE | given)


def test_a_longrope_base_is_its_long_set(ids):
    """transformers takes `long_factor` beyond the original length; a law has one set at every length."""
    model = phi()
    text = ids[:, :48]  # beyond 32, within window + chunk
    stock, short = logits(model, text), logits(model, ids[:, :20])
    rpe3d.extend(model, "3d-rpe", context=512, chunk=8, window=40, reach=60)
    torch.testing.assert_close(logits(model, text), stock, atol=1e-4, rtol=0)
    both = phi(short_factor=LONGROPE["long_factor"])
    torch.testing.assert_close(logits(model, ids[:, :20]), logits(both, ids[:, :20]), atol=1e-4, rtol=0)
    assert (logits(model, ids[:, :20]) - short).abs().max() > 0.01
    rpe3d.restore(model)
    assert torch.equal(logits(model, text), stock)
    assert torch.equal(logits(model, ids[:, :20]), short)


@pytest.mark.parametrize("given", [{}, {"factor": 4.0}, {"attention_factor": 1.19}])
def test_longrope_numbers_are_those_of_transformers(given):
    """Frequencies and temperature against `_compute_longrope_parameters`."""
    model = phi(**given)
    table, scaling = ROPE_INIT_FUNCTIONS["longrope"](model.config, "cpu", seq_len=33)
    law = rpe3d.law_of(rpe3d.extend(model, **LAW))
    torch.testing.assert_close(law.frequencies().float(), table)
    assert law.attention_scaling == pytest.approx(scaling)
    assert rpe3d.make_law(**law.to_dict()) == law


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("spread", "accepted"), [(0.0, True), (0.01, False), (0.03, False)])
def test_a_norm_after_the_rotation_is_refused_unless_it_commutes_with_it(spread, accepted, dtype):
    """HunYuan norms rotated queries and keys: with equal weights that is a rotation still, with others it is not.

    A spread of 0.01 moves them by as much as bfloat16 rounds the largest numbers, and was accepted there.
    """
    from transformers import AutoModelForCausalLM, HunYuanDenseV1Config

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = HunYuanDenseV1Config(**sizes, head_dim=16, vocab_size=97, max_position_embeddings=64, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if "_layernorm" in name and name.split(".")[-2] in ("query_layernorm", "key_layernorm"):
            torch.nn.init.normal_(weight, 1.0, spread)
    model.to(dtype)
    if accepted:
        assert rpe3d.extend(model, context=512) is model
    else:
        with pytest.raises(ConfigError, match="none that a law knows"):
            rpe3d.extend(model, context=512)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_is_not_taken_for_a_norm(family, dtype):
    """No family is refused in half precision, not even with one head of keys, where its errors average out least."""
    lone = {} if family == "gpt_neox" else {"num_key_value_heads": 1}
    for given in ({}, lone):
        assert rpe3d.law_of(rpe3d.extend(make(family, **given).to(dtype), **LAW)) is not None
