"""Frequency tables against Hugging Face's own functions, which a checkpoint is trained and run with."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rpe3d import make_law
from rpe3d.config import Rotary, make_scaling
from rpe3d.geometry.frequencies import model_attention_scaling, model_frequencies

PRETRAINED = 4096
EPS = torch.finfo(torch.float32).eps
MODELS = [(64, 1e4, 1.0), (128, 5e5, 1.0), (96, 1e4, 1.0), (80, 1e4, 0.4)]


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


@pytest.mark.parametrize(("head_dim", "theta", "partial"), MODELS)
def test_linear_is_hugging_faces_table(head_dim, theta, partial):
    theirs, _ = their_table("linear", head_dim, theta, partial, factor=4.0)
    ours = law_for("linear", head_dim, theta, partial).frequencies()
    assert_same_table(ours, theirs, head_dim, theta, partial)


@pytest.mark.parametrize("length", [1, PRETRAINED, PRETRAINED + 1, 3 * PRETRAINED, 4 * PRETRAINED])
@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize(("head_dim", "theta", "partial"), MODELS)
def test_dynamic_is_hugging_faces_table_at_every_length(head_dim, theta, partial, scale, length):
    theirs, _ = their_table("dynamic", head_dim, theta, partial, factor=scale, length=length)
    ours = law_for("dynamic", head_dim, theta, partial, scale=scale).frequencies(length)
    assert_same_table(ours, theirs, head_dim, theta, partial)


def test_dynamic_is_stock_rope_up_to_the_pretrained_length():
    law = law_for("dynamic", 64, 1e4, 1.0)
    assert torch.equal(law.frequencies(PRETRAINED), law_for("rope", 64, 1e4, 1.0).frequencies())


@pytest.mark.parametrize("context", [2 * PRETRAINED, 4 * PRETRAINED, 7 * PRETRAINED])
@pytest.mark.parametrize(("head_dim", "theta", "partial"), MODELS)
def test_yarn_is_hugging_faces_table_and_temperature(head_dim, theta, partial, context):
    theirs, temperature = their_table(
        "yarn",
        head_dim,
        theta,
        partial,
        factor=context / PRETRAINED,
        original_max_position_embeddings=PRETRAINED,
        positions=context,
    )
    law = law_for("yarn", head_dim, theta, partial, context=context)
    assert_same_table(law.frequencies(), theirs, head_dim, theta, partial)
    assert law.attention_scaling == pytest.approx(temperature, rel=1e-12)


def test_static_ntk_is_hugging_faces_dynamic_table_at_the_whole_context():
    """α = L / L_p is what dynamic NTK reaches at L (bloc97's static form)."""
    theirs, _ = their_table("dynamic", 128, 1e4, 1.0, factor=1.0, length=4 * PRETRAINED)
    assert_same_table(law_for("ntk", 128, 1e4, 1.0).frequencies(), theirs, 128, 1e4, 1.0)


def test_ntk_stretches_the_slowest_pair_by_alpha_and_keeps_the_fastest():
    stock, ntk = (law_for(name, 128, 1e4, 1.0).frequencies() for name in ("rope", "ntk"))
    assert ntk[0] == stock[0] == 1.0
    assert stock[-1] / ntk[-1] == pytest.approx(4.0, rel=1e-12)


SCALINGS = {
    "linear": {"factor": 2.5},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn with every option": {
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta", "partial"), MODELS)
def test_a_models_own_scaling_is_hugging_faces_table(kind, head_dim, theta, partial):
    """The base underneath a chunk law: a Llama 3.1 stays a Llama 3.1."""
    rope_type, parameters = kind.split()[0], SCALINGS[kind]
    theirs, temperature = their_table(rope_type, head_dim, theta, partial, positions=131072, **parameters)
    rotary = Rotary(
        head_dim=head_dim,
        rope_theta=theta,
        rotary_dim=int(head_dim * partial),
        scaling=make_scaling({"rope_type": rope_type, **parameters}),
    )
    assert_same_table(model_frequencies(rotary), theirs, head_dim, theta, partial)
    assert model_attention_scaling(rotary) == pytest.approx(temperature, rel=1e-12)


@pytest.mark.parametrize("name", ["rope", "3d-rpe", "3d-rpe-definition", "3d-rpe-dual-chunk", "dca", "rerope"])
def test_a_chunk_law_keeps_the_frequencies_underneath_it(name):
    scaling = {"rope_type": "llama3", **SCALINGS["llama3"]}
    law = make_law(name, pretrained=131072, context=262144, head_dim=128, rope_theta=5e5, rope_scaling=scaling)
    assert torch.equal(law.frequencies(), model_frequencies(law.rotary))
    theirs, _ = their_table("llama3", 128, 5e5, 1.0, positions=131072, **SCALINGS["llama3"])
    assert_same_table(law.frequencies(), theirs, 128, 5e5, 1.0)


def test_linear_squeezes_a_scaled_model_further():
    scaling = {"rope_type": "llama3", **SCALINGS["llama3"]}
    law = make_law("linear", pretrained=131072, context=262144, head_dim=128, rope_theta=5e5, rope_scaling=scaling)
    assert torch.equal(law.frequencies(), model_frequencies(law.rotary) / 2)


def test_angles_stay_correct_at_position_one_million():
    """cos and sin of p θ_l against integer-exact arithmetic; bfloat16 positions would be off by thousands."""
    position = 1_000_000
    law = make_law("rope", pretrained=8192, context=2_000_000, head_dim=128, rope_theta=1e4)
    angles = law.relative_angles(position, 0)
    for pair in (0, 1, 17, 63):
        exact = position * math.exp(-2 * pair / 128 * math.log(1e4))
        assert math.cos(angles[pair]) == pytest.approx(math.cos(exact), abs=1e-9)
        assert math.sin(angles[pair]) == pytest.approx(math.sin(exact), abs=1e-9)
    assert math.cos(angles[0]) == pytest.approx(math.cos(1_000_000), abs=1e-12)
    step = law.relative_angles(position + 1, 0) - angles
    torch.testing.assert_close(step, law.frequencies(), rtol=0, atol=1e-9)
    assert torch.tensor(position + 1, dtype=torch.bfloat16) == torch.tensor(position, dtype=torch.bfloat16)
