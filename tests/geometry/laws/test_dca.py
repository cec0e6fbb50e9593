"""Dual chunk attention against ChunkLlama's tables, written here a second time."""

from __future__ import annotations

import torch

from law_oracles import (
    CAUSAL,
    KEY,
    MODEL,
    QUERY,
    P,
)
from rpe3d import make_law


def test_dca_is_the_published_formula():
    """An et al. 2024 as ChunkLlama computes it: key table p mod c, three query tables, one per chunk relation."""
    law = make_law("dca", **MODEL)
    w = 64 * 3 // 4
    c = w - 64 // 16
    assert (law.chunk, law.window) == (c, w)
    key_table = P % c
    own, following = torch.arange(c), (torch.arange(c) + c).clamp(max=w)
    apart = QUERY // c - KEY // c
    shown = torch.where(apart == 0, own[QUERY % c], torch.where(apart == 1, following[QUERY % c], following[c - 1]))
    expected = (shown - key_table[KEY]).double()
    assert torch.equal(law.relative_position(QUERY, KEY)[CAUSAL], expected[CAUSAL])
    assert expected[CAUSAL].min() >= 0
    assert expected[CAUSAL].max() == w


def test_dca_is_exact_for_local_neighbours_across_a_border():
    """Its local window: the last w - c tokens before a chunk keep their true distance."""
    law = make_law("dca", **MODEL)
    border = 3 * law.chunk
    query = torch.arange(border, border + law.window - law.chunk + 1)
    assert torch.equal(law.relative_position(query, border - 1), (query - border + 1).double())
