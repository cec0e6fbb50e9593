"""A tiny language model with a tokenizer, on disk, for tests that go the whole way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def tokenizer(bos: bool = False) -> Any:
    """One token a byte, and a BOS token that is put in front by default if asked for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0} | {letter: i for i, letter in enumerate(letters, 1)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


def model(**changes: Any) -> Any:
    """A Llama of two layers and 256 positions, always the same but for changes of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, **SIZES, **changes)).eval()


def save(folder: Path, bos: bool = False, **changes: Any) -> Path:
    """Both as a Hugging Face folder."""
    model(**changes).save_pretrained(folder)
    tokenizer(bos).save_pretrained(folder)
    return folder


def save_image_text(folder: Path, family: str, tied: bool) -> Path:
    """An image-text model with a Llama-like text part, as a Hugging Face folder."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text: dict[str, Any] = {"vocab_size": 257, **SIZES, "num_key_value_heads": 2}
    if family == "llava":
        text["model_type"] = "llama"
        vision = {"model_type": "clip_vision_model", **small, "image_size": 28, "patch_size": 14}
    elif family == "gemma3":
        text |= {"head_dim": 16, "layer_types": ["full_attention"] * 2}
        vision = {"model_type": "siglip_vision_model", **small, "image_size": 28, "patch_size": 14}
    else:  # Qwen2-VL
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, tie_word_embeddings=tied)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
