"""LaMPE's positions by the words of its paper; tests/models/test_lampe_recorded.py has its authors' code."""

from __future__ import annotations

import math

import pytest
import torch

from law_oracles import CAUSAL, KEY, MODEL, QUERY
from rpe3d import make_law
from rpe3d.geometry import Steps, Turn
from rpe3d.geometry.laws.lampe import FITS


def published(query, key, length, mapped, head, tail):
    """The position of one pair, with a true division and a search for T as the authors have it."""

    def position(p):
        return math.floor(p * mapped / (length - 1) + 1e-9)

    last = tail
    while last + 1 < length and position(last) == position(last + 1):
        last += 1
    first = head - (position(head) + 1)
    second = (length - 1 - last) - position(length - 1 - last) - first
    if query - key < head:
        return query - key
    if not tail or query - key < length - last:
        return position(query) + first - position(key)
    return query - second - key


@pytest.mark.parametrize(
    ("length", "mapped", "head", "tail"), [(512, 40, 8, 3), (512, 37, 11, 0), (300, 63, 9, 20), (512, 5, 1, 1)]
)
def test_every_pair_is_shown_the_published_position(length, mapped, head, tail):
    law = make_law("lampe", length=length, mapped=mapped, head=head, tail=tail, **MODEL)
    shown = law.relative_position(QUERY, KEY)
    for query in (0, 1, head, 100, 298, 299, 300, 400, 511):
        expected = [published(query, key, length, mapped, head, tail) for key in range(query + 1)]
        assert shown[query, : query + 1].tolist() == expected
    assert shown[CAUSAL].min() == 0


@pytest.mark.parametrize("tail", [200, 0])
def test_the_grains_join_without_a_gap_below_the_pretrained_length(tail):
    law = make_law("lampe", pretrained=8192, context=65536, head_dim=64, tail=tail)
    shown = law.relative_position(torch.arange(65536), 0)
    step = shown.diff()
    assert set(step.tolist()) == {0.0, 1.0}
    assert torch.equal(shown[:512], torch.arange(512).double())
    assert bool((step[-200:] == 1).all()) == (tail == 200)
    assert shown.max() < 8192


@pytest.mark.parametrize(
    ("pretrained", "like"),
    [(2048, "llama-2"), (4096, "llama-2"), (8192, "llama-3"), (32768, "mistral"), (262144, "llama-3.1")],
)
def test_a_model_takes_the_fit_of_the_nearest_pretrained_length_in_its_own_units(pretrained, like):
    law = make_law("lampe", pretrained=pretrained, context=4 * pretrained, head_dim=64)
    fit = FITS[like]
    share = fit.mapped(4 * fit.pretrained, fit.pretrained) / fit.pretrained
    assert law.like == like
    assert law.mapped / pretrained == pytest.approx(share, abs=1 / pretrained)


def test_the_mapping_length_grows_with_the_text():
    """The authors' fit for Llama-3: 0.13, 0.24, 0.55 and 0.75 of its 8192 positions at 1, 2, 4 and 8 x."""
    mapped = [make_law("lampe", pretrained=8192, context=n * 8192, head_dim=64).mapped for n in (1, 2, 4, 8)]
    assert [round(length / 8192, 2) for length in mapped] == [0.13, 0.24, 0.55, 0.75]


def test_a_prompt_has_its_own_positions_in_a_longer_context():
    model = {"pretrained": 8192, "context": 65536, "head_dim": 64}
    law = make_law("lampe", length=16384, **model)
    assert law.mapped == make_law("lampe", **model | {"context": 16384}).mapped
    assert make_law("lampe", length=1000, **model).regions == make_law("rope", **model).regions


def test_steps_that_are_whole_tokens_are_those_of_a_turn():
    p = torch.arange(1000)
    assert torch.equal(Steps(up=1, over=7, start=3.0).position(p), Turn(chunk=7, start=3.0).position(p))
    assert Steps(up=5, over=5).is_stock
    far = torch.tensor([2**31 - 1])
    assert int(Steps(up=2**31 - 2, over=2**31 - 1).position(far)) == 2**31 - 2
