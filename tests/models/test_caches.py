"""Every cache of transformers under a law: exact over the keys that it hands back, or refused; and what it takes.

The oracle is the specification of attention, at positions that the test knows, over the very keys that a cache gives
back: a cache that rounds its keys changes them, and must change nothing else.
"""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, QuantizedCache, StaticCache, cache_utils

import rpe3d
from rpe3d import ConfigError
from rpe3d.attention import attention
from rpe3d.models.cache_sizes import cache_bytes, layer_caches
from rpe3d.models.carried import module_carried, module_law
from rpe3d.models.registry import NAME, attend
from tiny_models import make

LAW = {"context": 512, "chunk": 8, "window": 16, "reach": 32}
PROMPT, END = 70, 100
GROUPS = {"nbits": 4, "q_group_size": 16, "residual_length": 16}
OFFLOADS = "transformers' offloading needs an accelerator"


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Tiny models."""


FP8 = pytest.mark.skipif(
    not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no 8-bit floating point cache"
)


def quantised(backend, package, **given):
    reason = f"{package} is not installed"
    missing = importlib.util.find_spec(package.split(".")[0]) is None or importlib.util.find_spec(package) is None
    return pytest.param(
        lambda config: QuantizedCache(backend, config, **given),
        id=backend,
        marks=pytest.mark.skipif(missing, reason=reason),
    )


CACHES = [
    pytest.param(lambda config: DynamicCache(config=config), id="dynamic"),
    pytest.param(lambda config: StaticCache(config=config, max_cache_len=128), id="static"),
    pytest.param(lambda config: QuantizedCache("fp8", config), id="fp8", marks=FP8),
    quantised("quanto", "optimum.quanto", axis_key=0, axis_value=0, **GROUPS),
    quantised("hqq", "hqq", axis_key=1, axis_value=1, **GROUPS),
]


def decoded(model, ids, cache):
    """A prompt, a piece of three tokens, and then one token after the other."""
    ends = [PROMPT, PROMPT + 3, *range(PROMPT + 4, END + 1)]
    parts = []
    with torch.no_grad():
        for start, end in zip([0, *ends], ends, strict=False):
            where = torch.arange(start, end)[None]
            parts.append(model(ids[:, start:end], past_key_values=cache, position_ids=where).logits)
    return torch.cat(parts, 1)


@pytest.fixture
def held_to_the_specification():
    """Every call of our attention from now on, compared with the specification: what notes their lengths."""
    calls = []

    def checked(module, query, key, value, mask, scaling=None, sliding_window=None, position_ids=None, **given):
        out, _ = attend(module, query, key, value, mask, scaling=scaling, sliding_window=sliding_window,
                        position_ids=position_ids, **given)  # fmt: skip
        if sliding_window is None:
            used, held = int(position_ids.max()) + 1, module_carried(module)
            expected, _ = attention(held.arranged(query), held.arranged(key[:, :, :used]), value[:, :, :used],
                                    module_law(module), query_positions=position_ids,
                                    key_positions=torch.arange(used)[None], scale=scaling, rotated=True,
                                    impl="reference")  # fmt: skip
            torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-4, rtol=0)
            calls.append(used)
        return out, None

    def begin():
        AttentionInterface.register(NAME, checked)
        return calls

    yield begin
    AttentionInterface.register(NAME, attend)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("llama", {}),
        ("deepseek_v3", {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
                         "v_head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 9}),
    ],
)  # fmt: skip
def test_attention_over_what_a_cache_gives_back_is_the_laws(held_to_the_specification, ids, cache, family, given):
    """The law's positions, whatever the cache did to the keys."""
    model = rpe3d.extend(make(family, **given), **LAW)
    calls = held_to_the_specification()
    out = decoded(model, ids, cache(model.config))
    assert out.isfinite().all()
    assert max(calls) == END
    assert len(calls) == 2 * (END - PROMPT - 1)  # pieces x layers


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss", "qwen3_next", "falcon_h1"])
def test_hybrid_caches_are_exact(ids, kind, family):
    """Windows, states of linear attention and of Mamba beside full attention, each in its kind of layer."""
    given = {
        "qwen3_next": {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                       "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16, "num_experts": 4,
                       "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "head_dim": 16},
    }.get(family, {"sliding_window": 16})  # fmt: skip
    model = rpe3d.extend(make(family, **given), **LAW)
    with torch.no_grad():
        full = model(ids[:, :END], use_cache=False).logits
    length = {"max_cache_len": 128} if kind is StaticCache else {}
    torch.testing.assert_close(decoded(model, ids, kind(config=model.config, **length)), full, atol=2e-3, rtol=0)


def test_a_cache_that_drops_keys_of_full_attention_is_refused(ids):
    """A law needs the keys from the first on; a window made by hand would take them away."""
    model = rpe3d.extend(make(), **LAW)
    windowed = make("mistral").config
    windowed.sliding_window = 32
    cache = DynamicCache(config=windowed)
    with pytest.raises(ConfigError, match="this cache has dropped its first keys"):
        decoded(model, ids, cache)


def test_a_family_whose_cache_forgets_what_its_attention_sees_is_refused():
    """Moshi's config has a window that its cache keeps to and its attention does not (transformers 5.22)."""
    model = make("moshi", sliding_window=16, ffn_dim=96, num_codebooks=2)
    with pytest.raises(ConfigError, match="its cache keeps a window of keys"):
        rpe3d.extend(model, **LAW)


@pytest.mark.skipif(not torch.cuda.is_available(), reason=OFFLOADS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_offloaded_cache_is_exact(ids, family):
    model = rpe3d.extend(make(family).cuda(), **LAW)
    ids = ids.cuda()
    with torch.no_grad():
        full = model(ids[:, :END], use_cache=False).logits
        out = model.generate(ids[:, :PROMPT], max_new_tokens=10, do_sample=False, cache_implementation="offloaded")
        assert torch.equal(out, model.generate(ids[:, :PROMPT], max_new_tokens=10, do_sample=False))
    assert full.isfinite().all()


@pytest.mark.parametrize(
    ("family", "given"),
    [("llama", {}), ("gemma3_text", {"sliding_window": 16}), ("gpt_oss", {"sliding_window": 16})],
)
def test_the_bytes_that_are_told_are_those_that_are_kept(ids, family, given):
    """By the tensors of a cache after 100 tokens; a window keeps one token less than its name says."""
    model = make(family, **given)
    layers = layer_caches(model)
    told = cache_bytes(layers, END, torch.float32)
    cache = StaticCache(config=model.config, max_cache_len=END)
    decoded(model, ids, cache)
    assert told["static"] == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    cache = DynamicCache(config=model.config)
    decoded(model, ids, cache)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    one_less = sum(4 * layer.numbers for layer in layers if layer.window)
    assert told["dynamic"] - one_less == kept


@FP8
def test_the_bytes_of_rounded_caches():
    """8 bits are one byte a number; 4 bits add a scale and a zero for every 64 numbers (transformers' defaults)."""
    model = make()
    layers = layer_caches(model)
    cache = QuantizedCache("fp8", model.config)
    with torch.no_grad():
        model(torch.ones(1, 50, dtype=torch.long), past_key_values=cache)
    kept = sum(x[0].nbytes for layer in cache.layers for x in (layer._quantized_keys, layer._quantized_values))
    told = cache_bytes(layers, 50, torch.bfloat16)
    assert told["fp8"] == kept
    assert told["4 bits"] == told["dynamic"]  # all within the tokens that are kept as they are
    long = cache_bytes(layers, 128 + 64_000, torch.bfloat16)
    numbers = 2 * 2 * 2 * 16  # layers, keys and values, heads, dimensions
    assert long["4 bits"] == numbers * (64_000 // 2 + 64_000 * 2 * 2 // 64 + 128 * 2)


@FP8
def test_a_hybrid_model_says_that_its_cache_cannot_be_rounded():
    """transformers' QuantizedCache refuses a window by itself; whoever asks before should know."""
    model = make("gemma3_text")
    told = cache_bytes(layer_caches(model), 4096, torch.bfloat16)
    assert "transformers quantises only full attention" in told["4 bits"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="only full attention layers"):
            QuantizedCache("fp8", model.config)
