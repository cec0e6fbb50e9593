"""What is refused, without an engine: these need no vLLM."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from rpe3d import ConfigError, make_law
from rpe3d.serve import metrics
from rpe3d.serve.checks import check_engine, check_model, check_told
from rpe3d.serve.entry import law_entry
from rpe3d.serve.versions import version_refusal


def law(name="3d-rpe", **own):
    return make_law(name, pretrained=64, context=512, head_dim=32, **own)


def config(made=None, model_type="llama", **more):
    parameters = {"rope_type": "rpe3d", "rope_theta": 1e4, "law": (made or law()).to_dict()}
    return SimpleNamespace(model_type=model_type, rope_parameters=parameters, **more)


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))


def settings(length=512, cache="auto", speculative=None, parallel=1, model_type="llama"):
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=length,
            dtype=torch.bfloat16,
            hf_config=SimpleNamespace(model_type=model_type),
            hf_text_config=SimpleNamespace(model_type="llama"),
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(cache_dtype=cache),
        speculative_config=speculative,
        parallel_config=SimpleNamespace(decode_context_parallel_size=parallel, prefill_context_parallel_size=1),
    )


def by_layer_type(model_type="gemma3_text", sliding=None):
    """A law for full attention, and stock rope parameters for sliding layers unless others are given."""
    made = config(model_type=model_type, sliding_window=32)
    parameters = {"sliding_attention": sliding or {"rope_type": "default"}}
    made.rope_parameters = {"full_attention": made.rope_parameters} | parameters
    return made


def test_what_is_tested_is_accepted(vllm):
    assert check_model(config()) == law()
    assert check_model(by_layer_type()) == law()
    check_engine(settings(), law())
    check_engine(settings(length=100, cache="bfloat16"), law())


@pytest.mark.parametrize(
    ("version", "fine", "on_gpu"),
    [
        ("0.32.0", True, True),
        ("0.32.1+cpu", True, True),
        ("0.28.0", True, False),
        ("0.31.1", True, False),
        ("0.27.1", False, False),
        ("0.3.2", False, False),
        ("0.33", False, False),
    ],
)
def test_versions(version, fine, on_gpu):
    """What has run there: every build for CPUs since 0.28, and one on a GPU."""
    assert (version_refusal(version) is None) == fine
    assert (version_refusal(version, "cuda") is None) == on_gpu


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (config(model_type="gemma2"), "type 'gemma2'"),
        (config(sliding_window=32), r"sliding window \(32 tokens\) is not served"),
        (config(model_type="phi3", sliding_window=32), r"sliding window \(32 tokens\) is not served"),
        (config(model_type="gemma3_text"), "type 'gemma3_text'"),
        (config(model_type="gemma3_text", use_bidirectional_attention=True), "type 'gemma3_text'"),
        (by_layer_type("llama"), "type 'llama'"),
        (by_layer_type(sliding=config().rope_parameters), "layers of several types carry laws"),
        (config(is_causal=False), "type 'llama'"),
        (config(law("dynamic")), "dynamic changes its frequencies"),
        (config(law(far=2, full=1)), "full layers is not served yet"),
        (config(law(far=2, full="all")), "full layers is not served yet"),
        (SimpleNamespace(model_type="llama", rope_parameters={"rope_type": "default"}), "carries no law"),
    ],
)
def test_models_that_are_refused(given, why):
    with pytest.raises(ConfigError, match=why):
        check_model(given)


def test_full_layers_are_refused_by_a_name_unless_nothing_is_chosen():
    """On the command line of `rpe3d serve`, before a model is there; layer 0 is one, too."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 64}
    for full in (0, 1, "0-1", "all"):
        with pytest.raises(ConfigError, match="full layers is not served yet"):
            law_entry(LlamaConfig(**sizes), "3d-rpe:far=2", 512, {"full": full})
    made = law_entry(LlamaConfig(**sizes), "3d-rpe:far=0,full=9", 512, {})
    assert make_law(**made["rope_parameters"]["law"]).regions == law(far=0).regions


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (settings(length=513), "max_model_len is 513, beyond the law's context 512"),
        (settings(cache="fp8_e4m3"), "holds keys as fp8_e4m3, but a law needs the model's own bfloat16"),
        (settings(cache="float16"), "holds keys as float16"),
        (settings(cache="fp8_ds_mla"), "holds keys as fp8_ds_mla"),
        (settings(model_type="llava"), "type 'llava' are not served"),
        (settings(speculative=object()), "speculative decoding"),
        (settings(parallel=2), "context parallelism"),
    ],
)
def test_settings_that_are_refused(vllm, given, why):
    with pytest.raises(ConfigError, match=why):
        check_engine(given, law())


def test_a_model_that_is_not_under_the_law_that_serve_named(monkeypatch):
    """`--vllm hf-overrides=...` replaces the law of a stock model, which the metrics would still name."""
    check_told(config())
    check_told(SimpleNamespace(model_type="llama", rope_parameters={"rope_type": "default"}))
    monkeypatch.setenv(metrics.VARIABLE, metrics.environment(law())[metrics.VARIABLE])
    check_told(config())
    for other in (config(law("dca")), SimpleNamespace(model_type="llama", rope_parameters={"rope_type": "default"})):
        with pytest.raises(ConfigError, match="not under the law that `rpe3d serve` announced"):
            check_told(other)


def test_answers_that_shall_not_depend_on_the_batch(vllm, monkeypatch):
    """A law that is one turn for all pairs runs in vLLM's own attention, which can promise that."""
    monkeypatch.setattr(sys.modules["vllm"], "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True), raising=False)
    check_engine(settings(), law("yarn"))
    with pytest.raises(ConfigError, match="under a law the split of keys depends on the batch"):
        check_engine(settings(), law())


def test_heads_that_choose_far_keys_together_are_not_parted(vllm):
    given = settings()
    given.model_config.get_total_num_kv_heads = lambda: 2
    chooses = make_law("3d-rpe", pretrained=64, context=512, head_dim=32, far=4)
    given.parallel_config.tensor_parallel_size = 2
    check_engine(given, chooses)
    given.parallel_config.tensor_parallel_size = 4
    check_engine(given, law())
    with pytest.raises(ConfigError, match="4 processes split them"):
        check_engine(given, chooses)


def test_pages_that_no_forward_fills_are_refused_where_queries_choose(vllm):
    """On a GPU, where what is kept of a page would be another text's; on a CPU nothing is kept."""
    given = settings()
    given.parallel_config.tensor_parallel_size = 1
    given.model_config.get_total_num_kv_heads = lambda: 2
    given.kv_transfer_config = SimpleNamespace(kv_connector="OffloadingConnector", kv_connector_extra_config={})
    chooses = make_law("3d-rpe", pretrained=64, context=512, head_dim=32, far=4)
    check_engine(given, chooses)
    given.device_config.device_type = "cuda"
    check_engine(given, law())
    with pytest.raises(ConfigError, match="OffloadingConnector fills pages without a forward"):
        check_engine(given, chooses)
    given.kv_transfer_config.kv_connector_extra_config["any_summaries"] = True  # benchmarks/filled.py
    check_engine(given, chooses)
    vllm_envs = sys.modules["vllm"].envs = SimpleNamespace(VLLM_KV_CACHE_LAYOUT="LHBNC")
    with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT is LHBNC"):
        check_engine(given, chooses)
    vllm_envs.VLLM_KV_CACHE_LAYOUT = "LBNHC"
    given.parallel_config.use_ubatching = True
    check_engine(given, law())
    with pytest.raises(ConfigError, match="micro-batches are not tested"):
        check_engine(given, chooses)


def test_a_window_that_is_not_used_is_no_window():
    assert check_model(config(model_type="qwen2", sliding_window=32, use_sliding_window=False)) == law()
