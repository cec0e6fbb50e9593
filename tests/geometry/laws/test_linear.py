"""Position interpolation against its formula and Hugging Face's table."""

from __future__ import annotations

import pytest
import torch

from law_oracles import (
    KEY,
    LLAMA_3,
    MODEL,
    MODELS,
    QUERY,
    assert_same_table,
    law_for,
    their_table,
)
from rpe3d import make_law
from rpe3d.geometry.frequencies import model_frequencies


def test_position_interpolation_squeezes_into_the_pretrained_length():
    """Chen et al. 2023: p L_p / L."""
    law = make_law("linear", **MODEL)
    assert torch.equal(law.relative_position(QUERY, KEY), (QUERY - KEY).double() / 8)


@pytest.mark.parametrize(("head_dim", "theta", "partial"), MODELS)
def test_linear_is_hugging_faces_table(head_dim, theta, partial):
    theirs, _ = their_table("linear", head_dim, theta, partial, factor=4.0)
    ours = law_for("linear", head_dim, theta, partial).frequencies()
    assert_same_table(ours, theirs, head_dim, theta, partial)


def test_linear_squeezes_a_scaled_model_further():
    scaling = {"rope_type": "llama3", **LLAMA_3}
    law = make_law("linear", pretrained=131072, context=262144, head_dim=128, rope_theta=5e5, rope_scaling=scaling)
    assert torch.equal(law.frequencies(), model_frequencies(law.rotary) / 2)
