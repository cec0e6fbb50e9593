"""Dynamic NTK against Hugging Face's table at every length."""

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


def test_dynamic_grows_with_the_text():
    law = law_for("dynamic", 64, 1e4, 1.0)
    assert law.grows
    assert not torch.equal(law.frequencies(2 * PRETRAINED), law.frequencies(PRETRAINED))
