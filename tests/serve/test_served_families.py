"""Families that rotate or attend unlike Llama, and configs that name a long context: as transformers has them."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-serve` has it")

from engines import CONTEXT, answers, assert_as_transformers, engine, model, prompts

import rpe3d
from rpe3d import ConfigError
from rpe3d.serve.launch import prepare

# 64 positions: 3D-RPE has chunks of 4 and a window of 20, so the edge of plain RoPE is at 24.
LENGTHS = (1, 2, 19, 20, 24, 25, 28, 33, 64, 65, 150, 301)
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
BY_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA = {"num_hidden_layers": 3, "layer_types": KINDS, "sliding_window": 16, "query_pre_attn_scalar": 24}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 12, "partial_rotary_factor": 0.75,
            "long_factor": [1 + n / 4 for n in range(12)], "original_max_position_embeddings": 32}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
STOCK = {
    "gemma3_text, as published": GEMMA | {"rope_parameters": BY_KIND},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "phi3, long": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "initializer_range": 0.1},
}
DUAL = {"chunk_size": 64, "local_size": 16, "original_max_position_embeddings": 64}
QWEN_1M = {"dual_chunk_attention_config": DUAL, "max_position_embeddings": 256}


def assert_served(stock, llm, lengths=LENGTHS):
    """The prompts at once, in pieces of 64 tokens, and again, out of the prefix cache."""
    texts = prompts(*lengths)
    assert_as_transformers(stock, texts, answers(llm, texts))
    again = answers(llm, texts)
    assert again[-1].num_cached_tokens >= 128
    assert_as_transformers(stock, texts, again)


@pytest.mark.parametrize("name", STOCK)
def test_a_stock_model_under_a_law_that_serve_gives_it(name, tmp_path):
    """`rpe3d serve MODEL --context N` against `rpe3d.extend` of the same model."""
    family = name.partition(",")[0]
    model(family, config=STOCK[name]).save_pretrained(tmp_path)
    stock = model(family, config=STOCK[name], law="3d-rpe")
    given = prepare(str(tmp_path), "3d-rpe", CONTEXT, {})
    assert given.law == rpe3d.law_of(stock)
    overrides = json.loads(json.dumps(given.overrides))
    assert_served(stock, engine(tmp_path, hf_overrides=overrides, max_model_len=CONTEXT))


@pytest.mark.parametrize("law", ["yarn", "dca"])
def test_a_checkpoint_with_sliding_layers(law, tmp_path):
    """Law and stock layers side by side in one group of the cache: vLLM hands both the same metadata."""
    stock = model("gemma3_text", config=GEMMA, law=law)
    stock.save_pretrained(tmp_path)
    assert_served(stock, engine(tmp_path, disable_hybrid_kv_cache_manager=True))


@pytest.fixture(scope="module")
def qwen_1m(tmp_path_factory):
    """A checkpoint like Qwen2.5-7B-Instruct-1M, a thousandth of its size, with the file for sparse attention."""
    folder = tmp_path_factory.mktemp("qwen")
    model("qwen2", config=QWEN_1M).save_pretrained(folder)
    (folder / "sparse_attention_config.json").write_text(json.dumps({"0": {}}))
    assert json.loads((folder / "config.json").read_text())["dual_chunk_attention_config"] == DUAL
    return folder


def test_dual_chunk_attention_is_served_by_plain_vllm(qwen_1m):
    """No option at all: the law is what `rpe3d.extend` reads from the same config."""
    stock = rpe3d.extend(model("qwen2", config=QWEN_1M), "dca", context=256)
    law = rpe3d.law_of(stock)
    assert (law.chunk, law.window, law.pretrained) == (48, 64, 64)
    assert (law.attention_factor, law.growth) == (1, 0.1)
    llm = engine(qwen_1m)
    assert llm.llm_engine.model_config.max_model_len == 256
    assert_served(stock, llm, (1, 30, 47, 48, 49, 64, 65, 97, 150, 240))


def test_serve_reads_the_law_that_a_config_names(qwen_1m):
    """As plain vLLM without options; another law or context is for its user to say."""
    dca = rpe3d.law_of(rpe3d.extend(model("qwen2", config=QWEN_1M), "dca", context=256))
    assert prepare(str(qwen_1m), None, None, {}).law == prepare(str(qwen_1m), "dca", None, {}).law == dca
    other = prepare(str(qwen_1m), None, 512, {})
    assert (other.law.name, other.law.context) == ("3d-rpe", 512)
    assert other.notes == ("its config names dual chunk attention, which `--law dca` serves",)
    with pytest.raises(ConfigError, match="carries no law"):
        prepare(str(qwen_1m), "yarn", None, {})


def test_another_law_replaces_dual_chunk_attention(qwen_1m):
    given = prepare(str(qwen_1m), "leaky-rerope", 512, {})
    stock = rpe3d.extend(model("qwen2", config=QWEN_1M), "leaky-rerope", context=512)
    assert_served(stock, engine(qwen_1m, hf_overrides=given.overrides, max_model_len=512))


def test_a_scaling_below_the_law_does_not_lengthen_the_context(tmp_path):
    """vLLM multiplies max_position_embeddings by `factor` of rope types that it does not know."""
    stock = model(config={"rope_parameters": LLAMA3}, law="3d-rpe")
    stock.save_pretrained(tmp_path)
    llm = engine(tmp_path)
    assert llm.llm_engine.model_config.max_model_len == CONTEXT
    assert_served(stock, llm, (1, 30, 65, 301))
