"""Static NTK-aware scaling against Hugging Face's table."""

from __future__ import annotations

import pytest

from law_oracles import (
    PRETRAINED,
    assert_same_table,
    law_for,
    their_table,
)


def test_static_ntk_is_hugging_faces_dynamic_table_at_the_whole_context():
    """α = L / L_p is what dynamic NTK reaches at L (bloc97's static form)."""
    theirs, _ = their_table("dynamic", 128, 1e4, 1.0, factor=1.0, length=4 * PRETRAINED)
    assert_same_table(law_for("ntk", 128, 1e4, 1.0).frequencies(), theirs, 128, 1e4, 1.0)


def test_ntk_stretches_the_slowest_pair_by_alpha_and_keeps_the_fastest():
    stock, ntk = (law_for(name, 128, 1e4, 1.0).frequencies() for name in ("rope", "ntk"))
    assert ntk[0] == stock[0] == 1.0
    assert stock[-1] / ntk[-1] == pytest.approx(4.0, rel=1e-12)
