"""Tiny random models of real families, with weights large enough that positions matter."""

from __future__ import annotations

import torch

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "num_hidden_layers": 6},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "gpt_neox": {"num_key_value_heads": None},
    "cohere": {},
    "glm": {"head_dim": 16},
    "smollm3": {"num_hidden_layers": 4},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}
SIZE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def make(family="llama", **parameters):
    """A tiny random model of a family, float32, ready to generate."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {
        k: v for k, v in (SIZE | FAMILIES.get(family, {}) | parameters).items() if v is not None or k == "eos_token_id"
    }
    if family == "mistral":
        given["sliding_window"] = None
    torch.manual_seed(0)
    # Gemma 2 caps its scores, and gpt-oss has sinks, which SDPA does not support.
    attention = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    config = AutoConfig.for_model(family, **given)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def checkpointing(model, on):
    """Run layers again for their gradients, or not; transformers 5.23 has another name for it."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_{'enable' if on else 'disable'}")()
