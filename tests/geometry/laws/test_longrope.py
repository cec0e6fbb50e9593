"""LongRoPE against Hugging Face's table and temperature."""

from __future__ import annotations

import pytest
import torch

from law_oracles import (
    MODELS,
    PRETRAINED,
    assert_same_table,
    law_for,
    their_table,
)
from rpe3d import make_law


@pytest.mark.parametrize("length", [1, PRETRAINED, PRETRAINED + 1, 4 * PRETRAINED])
@pytest.mark.parametrize(("head_dim", "theta", "partial"), MODELS)
def test_longrope_is_hugging_faces_table_and_temperature_at_every_length(head_dim, theta, partial, length):
    pairs = int(head_dim * partial) // 2
    draw = torch.Generator().manual_seed(0)
    factors = {
        name: (1 + most * torch.rand(pairs, generator=draw).sort()[0]).tolist()
        for name, most in (("long_factor", 40.0), ("short_factor", 1.0))
    }
    theirs, temperature = their_table(
        "longrope",
        head_dim,
        theta,
        partial,
        length=length,
        original_max_position_embeddings=PRETRAINED,
        positions=4 * PRETRAINED,
        **factors,
    )
    law = law_for("longrope", head_dim, theta, partial, **factors)
    assert_same_table(law.frequencies(length), theirs, head_dim, theta, partial)
    assert law.attention_scaling == pytest.approx(temperature, rel=1e-12)


def test_without_factors_longrope_is_interpolation_beyond_the_pretrained_length():
    law, model = law_for("longrope", 64, 1e4, 1.0), law_for("rope", 64, 1e4, 1.0)
    assert torch.equal(law.frequencies(PRETRAINED), model.frequencies())
    torch.testing.assert_close(law.frequencies(), law_for("linear", 64, 1e4, 1.0).frequencies(), rtol=1e-15, atol=0)


def test_factors_can_be_written_as_text():
    law = make_law("longrope", pretrained=64, context=256, head_dim=8, long_factor="1-1.5-4-16")
    assert law.long_factor == (1.0, 1.5, 4.0, 16.0)
    assert law == make_law("longrope", pretrained=64, context=256, head_dim=8, long_factor=[1, 1.5, 4, 16])
