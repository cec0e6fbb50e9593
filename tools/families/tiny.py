"""A tiny random model of any family, made by shrinking its config, and what is run on it.

The sizes go by the names that config classes give them; `_OWN` holds what a family's defaults leave out.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor

from rpe3d.config import ConfigError
from rpe3d.models.extend import extend

CONTEXT = 256
LAW = {"chunk": 8, "window": 16, "reach": 32, "focus": 0, "fade": 0}
LONG = 100
PROMPT = 70
CLOSE = 1e-3  # of the largest logit; float32 and another order of summation stay two orders below it
LARGEST = 100_000_000
PICTURES = (
    "aya_vision",
    "glm4v",
    "glm4v_moe",
    "idefics3",
    "internvl",
    "llava",
    "llava_next",
    "mistral3",
    "paligemma",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
)
"""Families of pictures and text that people run and that are not among transformers' causal LMs."""

_HEADS = 4
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_SIZES: dict[int, str] = {
    97: "vocab_size decoder_vocab_size vocab_size_per_layer_input",
    64: "hidden_size d_model n_embd embedding_size word_embed_proj_dim input_embedding_size output_embedding_size "
    "lru_width max_position_embeddings backbone_hidden_size attention_hidden_size embed_dim out_hidden_size",
    96: "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim ffn_hidden_size dense_intermediate_size "
    "intermediate_size_mlp n_inner dff dim_ff",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size q_lora_rank o_lora_rank router_hidden_size",
    16: "head_dim kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim swa_head_dim sliding_window "
    "sliding_window_size attention_chunk_size attention_window_size linear_key_head_dim linear_value_head_dim "
    "linear_head_dim kv_channels global_head_dim index_head_dim index_topk window_size swa_v_head_dim "
    "hidden_size_per_layer_input attention_head_dim mamba_d_state mamba_d_head "
    "mamba_chunk_size",
    8: "index_block_size mamba_n_heads",
    _HEADS: "num_attention_heads decoder_attention_heads encoder_attention_heads n_head n_heads num_heads "
    "swa_num_attention_heads linear_num_key_heads linear_num_value_heads linear_num_heads index_n_heads "
    "num_experts n_routed_experts num_local_experts moe_num_experts",
    2: "depth num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token "
    "index_topk_blocks moe_k moe_topk top_k_experts num_global_key_value_heads moe_num_active_experts",
    1: "n_group topk_group n_groups o_groups num_expert_group",
}
_SIZE = {name: size for size, names in _SIZES.items() for name in names.split()}
# None in some defaults, which do not build then
_UNSET = ("head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok")
_MIXED = {"layer_types": ["conv", "full_attention"] * 2}
_SPARSE = {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2}
_WINDOWS = {"layer_types": ["full_attention", "sliding_attention"] * 2}
_BLT = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "vocab_size": 260,
    "max_position_embeddings": 256,
}
_SECTIONS: dict[str, dict[str, Any]] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
}
_HALF_SECTIONS = {
    "rope_parameters": _SECTIONS["rope_parameters"] | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
}
_INDEXED = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16}
_PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {  # where models that people run are not their config's default
    "exaone4": ("EXAONE-4.0-1.2B", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "granitemoehybrid": ("granite-4.0-micro", {"position_embedding_type": "rope", "layer_types": ["attention"] * 4}),
    "ministral": ("Ministral-8B", {"layer_types": ["full_attention", *["sliding_attention"] * 3]}),
    "mistral": ("Mistral from v0.2 on", {"sliding_window": None}),
    "zamba2": ("Zamba2-7B", {"use_mem_rope": True, "attention_hidden_size": 128, "attention_head_dim": 32}),
}
_OWN: dict[str, dict[str, Any]] = {  # defaults that say less than any real model's config does
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}, "max_seq_len": 64},
    "dots1": {"n_shared_experts": 1},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_d_head": 16},
    "blt": {
        "patcher_config": _BLT | {"model_type": "blt_patcher"},
        "encoder_config": _BLT | {"model_type": "blt_local_encoder", "hidden_size_global": 64},
        "decoder_config": _BLT | {"model_type": "blt_local_decoder", "hidden_size_global": 64},
        "global_config": _BLT | {"model_type": "blt_global_transformer"},
        "encoder_hash_byte_group_vocab": 97,
        "vocab_size": 260,
    },
    "bailing_hybrid": {"max_position_embeddings": 64},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 5},  # of 11 layers; the default is 15
    "glm4v_text": _SECTIONS,
    "glm4v_moe_text": _HALF_SECTIONS,
    "laguna": _WINDOWS,
    "lfm2": _MIXED,
    "lfm2_moe": _MIXED,
    "mellum": _WINDOWS,
    "minimax_m3_vl_text": _SPARSE,
    "qwen2_5_vl_text": _SECTIONS,
    "qwen2_vl_text": _SECTIONS,
    "qwen4_exp_text": _INDEXED | {"indexer_compress_ratio": 4},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2},
    "mimo_v2_flash": {"head_dim": 24, "swa_head_dim": 24},  # a third of it is turned, in pairs
}
_TRIES: tuple[dict[str, Any], ...] = (  # what is left as the family has it, or set, until one builds and runs
    {},
    {"num_key_value_heads": _HEADS},
    {"index_topk": None},
    {"head_dim": None},
    {"head_dim": None, "hidden_size": 128},
    {"head_dim": None, "hidden_size": None, "num_attention_heads": None, "num_key_value_heads": None},
)


def build(name: str, ids: Tensor) -> Any:
    """A tiny model that runs. If none does: the ConfigError that `extend` refuses one with, or the first error."""
    import transformers
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    first: Exception | None = None
    was_built = False
    for attempt in _TRIES:
        built = None
        try:
            config = CONFIG_MAPPING[name](**_small(CONFIG_MAPPING[name], attempt))
            auto = AutoModelForCausalLM if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText
            make = auto.from_config
            if name.startswith("musicgen"):  # its causal LM is made from the config of a part
                config, known = config.decoder, getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
                make = known._from_config
            for part in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
                part.pad_token_id, part.bos_token_id, part.eos_token_id = 0, 1, None
                part.is_decoder = True
                part.initializer_range = 0.3  # so that positions matter
            with torch.device("meta"):
                empty = make(copy.deepcopy(config))
            if not getattr(config.get_text_config(decoder=True), "rope_parameters", None):
                extend(empty, "3d-rpe", context=CONTEXT, **LAW)  # refused before a weight is looked at
            size = sum(p.numel() for p in empty.parameters())
            if size > LARGEST:
                raise ValueError(f"the smallest that the recipe builds has {size / 1e6:.0f} M parameters")
            torch.manual_seed(0)
            built = make(config, dtype=torch.float32).eval()
            for name_of, parameter in built.named_parameters():
                if not name_of.endswith("bias") and not parameter.any():  # a scale that is learned from 0
                    torch.nn.init.ones_(parameter)
                if parameter.ndim == 1:  # as after training: a norm's weights, of which a rotation may come before
                    with torch.no_grad():
                        parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            stock = logits(built, ids)
            if not stock.isfinite().all():
                raise ValueError("its logits are not finite")
            if not near(decoded(built, ids), stock, CLOSE * float(stock.abs().max())):
                raise ValueError("its stock decode differs from its stock forward")
            return built
        except ConfigError:
            raise
        except Exception as error:  # whatever a config or a model of any family raises
            if first is None or (built is not None and not was_built):  # the first that was built says most
                first, was_built = _refusal(built) or error, built is not None
    raise first or ValueError("no try was made")


def _refusal(model: Any) -> ConfigError | None:
    """What `extend` refuses a model with that does not run, if it does."""
    try:
        extend(model, "3d-rpe", context=CONTEXT, **LAW)
    except ConfigError as refusal:
        return None if model is None else refusal
    except Exception:
        return None
    return None


def _small(kind: Any, attempt: dict[str, Any]) -> dict[str, Any]:
    """Arguments that shrink a config class: every size it has, and its lists of layers cut to one of every kind."""
    try:
        own = kind()
    except Exception:  # a few have no defaults, or refuse them
        if kind.model_type != "gemma4_assistant":
            return {}
        from transformers import CONFIG_MAPPING

        text = _small(CONFIG_MAPPING["gemma4_text"], attempt)
        text |= {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        return {"text_config": text, "backbone_hidden_size": 64}
    has = own.to_dict()
    size = {**_SIZE, **attempt}
    if "kv_lora_rank" in has:  # latent attention has a key for every query head
        size["num_key_value_heads"] = _HEADS
    given = {k: v for k, v in size.items() if isinstance(has.get(k), int) and v is not None and has[k] > v}
    given |= {k: size[k] for k in _UNSET if k in has and has[k] is None and size[k] is not None}
    layers = next((has[k] for k in _LAYERS if isinstance(has.get(k), int)), 0)
    kinds = [k for k, v in has.items() if isinstance(v, list) and len(v) == layers > 4]
    first = [has[k].index(x) + 1 for k in kinds if len({str(x) for x in has[k]}) < 5 for x in has[k]]
    least = max([4, *first])
    keep = min(layers, least)
    given |= {k: keep for k in _LAYERS if isinstance(has.get(k), int)}
    given |= {k: has[k][:keep] for k in kinds}
    scaled = has.get("rope_parameters") or {}
    if "original_max_position_embeddings" in scaled and "factor" in scaled:  # so that it reaches half of CONTEXT
        original = max(1, int(CONTEXT / 2 / scaled["factor"]))
        given["rope_parameters"] = scaled | {"original_max_position_embeddings": original}
    for part in getattr(kind, "sub_configs", None) or {}:
        inner: Any = getattr(own, part, None)
        if hasattr(inner, "sub_configs"):
            given[part] = {**_small(type(inner), attempt), "model_type": inner.model_type}
    return given | _OWN.get(own.model_type, {}) | _PUBLISHED.get(own.model_type, ("", {}))[1]


def published(name: str) -> str:
    """Name the model by which a family is judged, where its config's defaults are no model that people run."""
    return _PUBLISHED[name][0] if name in _PUBLISHED else ""


def logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, use_cache=False).logits
    return logits


def decoded(model: Any, ids: Tensor) -> Tensor:
    """A prompt, then one token after the other, through the cache."""
    out = model(ids[:, :PROMPT], use_cache=True)
    parts = [out.logits]
    told = "position_ids" in inspect.signature(model.forward).parameters  # as `generate` does: a few count anew
    for t in range(PROMPT, ids.shape[1]):
        where = {"position_ids": torch.tensor([[t]])} if told else {}
        out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True, **where)
        parts.append(out.logits)
    return torch.cat(parts, 1)


def near(a: Tensor, b: Tensor, atol: float) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=atol)
