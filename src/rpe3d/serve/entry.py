"""Find what `extend` would write into a model's config, without its weights."""

from __future__ import annotations

import copy
from typing import Any

from rpe3d.geometry import parse_law
from rpe3d.serve.checks import FAMILIES, family_refusal, layers_refusal


def law_entry(config: Any, law: str, context: int, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return what changes in a stock config under a law (rope parameters and positions), from a model of one layer."""
    from transformers import AutoModelForCausalLM

    from rpe3d.models import extend

    named = {**parse_law(law).parameters, **parameters}
    if named.get("full") is not None and named.get("far"):
        raise layers_refusal()
    if config.model_type not in FAMILIES:
        raise family_refusal(config.model_type)
    small = copy.deepcopy(config)
    changes = {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8}
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    for key, value in (changes | tokens).items():
        if hasattr(small, key):
            setattr(small, key, value)
    if getattr(small, "layer_types", None):
        full = [kind for kind in small.layer_types if "sliding" not in kind]
        small.layer_types = (full or small.layer_types)[:1]
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    made = extend(AutoModelForCausalLM.from_config(small).eval(), law, context=context, **parameters).config
    return {"rope_parameters": made.rope_parameters, "max_position_embeddings": made.max_position_embeddings}
