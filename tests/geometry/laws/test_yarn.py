"""YaRN against Hugging Face's table and temperature."""

from __future__ import annotations

import pytest

from law_oracles import (
    MODELS,
    PRETRAINED,
    assert_same_table,
    law_for,
    their_table,
)


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
