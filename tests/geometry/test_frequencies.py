"""Frequency tables against Hugging Face's own functions, which a checkpoint is trained and run with."""

from __future__ import annotations

import pytest

from law_oracles import LLAMA_3, MODELS, assert_same_table, their_table
from rpe3d.config import Rotary, make_scaling
from rpe3d.geometry.frequencies import model_attention_scaling, model_frequencies

SCALINGS = {
    "linear": {"factor": 2.5},
    "llama3": LLAMA_3,
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
