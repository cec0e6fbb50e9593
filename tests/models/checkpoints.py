"""Tiny checkpoints in every form that `load` takes, and what its tests say of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from rpe3d.config import ConfigError
from rpe3d.models import load as module
from rpe3d.models.load import load

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "ba"]
SIZES = {"vocab_size": 7, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own for a test, and a hub that is never asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_hub_can_be_asked", lambda: False)
    return tmp_path / "cache" / "rpe3d"


@pytest.fixture
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=64)).eval()


@pytest.fixture
def folder(tmp_path, llama):
    from transformers import PreTrainedTokenizerFast

    llama.save_pretrained(tmp_path / "model")
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=[("a", "b")], unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def interleaved(weight, heads):
    """Rows of a query or key projection in llama.cpp's order (`permute` in its convert_hf_to_gguf.py)."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, model, **fields):
    """`model` as llama.cpp would store it, with a byte-pair tokenizer and extra metadata."""
    from gguf import GGUFWriter

    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "b a"])  # transformers 5.16 trips over a list of one
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    for key, value in fields.items():
        key = key.replace("__", ".")
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint16)(key, value)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        for heads, part in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):
            weight = interleaved(weight, heads) if part in name else weight
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf(tmp_path, llama):
    return write_gguf(tmp_path / "tiny.gguf", llama)


def entry_of(cache):
    (entry,) = (path for path in cache.iterdir() if not path.name.startswith("."))
    return entry


def same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def unfinished(cache):
    return [path.name for path in cache.iterdir() if path.name.endswith(".unfinished")]


def refused(name, **options):
    """The error for `name`: one line, whatever raised it."""
    with pytest.raises(ConfigError) as raised:
        load(str(name), **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)
