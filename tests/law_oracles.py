"""What the tests of single laws compare with: all pairs of a small model, and Hugging Face's own tables."""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rpe3d import make_law

MODEL = {"pretrained": 64, "context": 512, "head_dim": 16}
P = torch.arange(512)
QUERY, KEY = torch.broadcast_tensors(P[:, None], P[None, :])
CAUSAL = KEY <= QUERY

PRETRAINED = 4096
EPS = torch.finfo(torch.float32).eps
MODELS = [(64, 1e4, 1.0), (128, 5e5, 1.0), (96, 1e4, 1.0), (80, 1e4, 0.4)]
LLAMA_3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def their_table(rope_type, head_dim, theta, partial, *, length=None, positions=PRETRAINED, **parameters):
    """(inv_freq, attention factor) from transformers for a Llama config with these rope parameters."""
    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        max_position_embeddings=positions,
        rope_parameters={
            "rope_type": rope_type,
            "rope_theta": theta,
            "partial_rotary_factor": partial,
            **parameters,
        },
    )
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length)


def assert_same_table(ours, theirs, head_dim, theta, partial):
    """Theirs is float32: base ** x is good to a few units in the last place, and so is YaRN's mix of two such."""
    dim = int(head_dim * partial)
    plain = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours / plain, theirs.double() / plain, rtol=8 * EPS, atol=EPS)


def law_for(name, head_dim, theta, partial, **parameters):
    parameters = {"pretrained": PRETRAINED, "context": 4 * PRETRAINED} | parameters
    return make_law(name, head_dim=head_dim, rope_theta=theta, rotary_dim=int(head_dim * partial), **parameters)
