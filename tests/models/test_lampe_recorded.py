"""The law `lampe` against the results of its authors' own file (lampe.py says how they were recorded)."""

from __future__ import annotations

import math

import pytest
import torch
from chunkllama import DIM, flat, vectors
from lampe import CASES, DATA, FITTED, HEAD, LENGTHS, SHORT, STEPS, TAIL
from safetensors.torch import load_file

import rpe3d
from rpe3d.attention import attention
from rpe3d.geometry.laws.lampe import FITS, Grains

ROUNDING = {"rtol": 0, "atol": 4e-6}  # float32 angles up to 200, for outputs up to 2
RECORDED = load_file(DATA)


def law_for(length, mapped, **changes):
    given = {"length": length, "mapped": mapped, "head": HEAD, "tail": 0} | changes
    return rpe3d.make_law("lampe", pretrained=64, context=256, head_dim=DIM, **given)


def scores(law, shown):
    """q · k of every head under the relative positions `shown`, as complex numbers."""
    q, k = (torch.complex(*x.double().chunk(2, -1)) for x in vectors()[:2])
    t, s = shown.shape
    turned = torch.exp(1j * shown[..., None] * law.frequencies())
    product = torch.einsum("bhtl,bgsl,tsl->hts", q[:, :, :t], k[:, :, :s].conj(), turned).real
    return product * law.attention_scaling**2 / math.sqrt(DIM)


def prompt(law, length, *, twice):
    """Dense attention [t, h d] under the law's positions; with the pairs that the authors' calls count twice, or not.

    Pairs at distance `head` are also counted as `head`, and with a tail those at n - T also as pairs of the middle.
    """
    p = torch.arange(length)
    distance = p[:, None] - p
    once = scores(law, law.relative_position(p[:, None], p)).masked_fill(distance < 0, -torch.inf)
    middle = law.regions[1]
    shown = torch.where(distance == HEAD, distance, middle.query.position(p)[:, None] - middle.key.position(p))
    seam = distance == (HEAD if middle.last is None else middle.last + 1)
    again = scores(law, shown).masked_fill(~seam & (distance != HEAD), -torch.inf)
    value = vectors()[2][0, 0, :length].double()
    every, values = (torch.cat([once, again], -1), torch.cat([value, value])) if twice else (once, value)
    return flat((every.softmax(-1) @ values)[None])[0].float()


@pytest.mark.parametrize(("length", "mapped"), CASES.items())
def test_a_prompt_is_the_authors_with_one_distance_counted_once(length, mapped):
    """Their calls overlap: pairs at distance `head` are counted by the window and by the middle."""
    law = law_for(length, mapped)
    torch.testing.assert_close(prompt(law, length, twice=True), RECORDED[f"prefill {length}"], **ROUNDING)
    ours = flat(attention(*(x[:, :, :length] for x in vectors()), law)[0])[0]
    torch.testing.assert_close(ours, prompt(law, length, twice=False), **ROUNDING)


@pytest.mark.parametrize("change", [{"mapped": 31}, {"head": 13}, {"length": 130}, {"attention_factor": 1.0}])
def test_a_number_off_by_one_is_found_out(change):
    out = prompt(law_for(**{"length": 131, "mapped": 32} | change), 131, twice=True)
    assert (out - RECORDED["prefill 131"]).abs().max() > 1e-3


@pytest.mark.parametrize(("length", "mapped"), CASES.items())
def test_tokens_after_a_prompt_are_the_authors_where_n_is_theirs(length, mapped):
    """While it decodes, n is the tokens so far and the shift to the middle that of the prompt: the same in these."""
    q, k, v = vectors()
    for step in range(1, STEPS + 1):
        n = length + step
        law = law_for(n, mapped)
        assert law.regions[1].query.start == law_for(length, mapped).regions[1].query.start
        out = attention(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], law, query_positions=range(n - 1, n))[0]
        torch.testing.assert_close(flat(out)[0], RECORDED[f"decode {length}"][step - 1 : step], **ROUNDING)


@pytest.mark.parametrize(("length", "mapped"), CASES.items())
def test_a_prompt_with_a_tail_is_the_authors_with_two_distances_counted_once(length, mapped):
    law = law_for(length, mapped, tail=TAIL)
    torch.testing.assert_close(prompt(law, length, twice=True), RECORDED[f"tail prefill {length}"], **ROUNDING)
    ours = flat(attention(*(x[:, :, :length] for x in vectors()), law)[0])[0]
    torch.testing.assert_close(ours, prompt(law, length, twice=False), **ROUNDING)


@pytest.mark.parametrize(("length", "mapped"), CASES.items())
def test_tokens_after_a_prompt_with_a_tail_are_the_authors(length, mapped):
    """Up to the first step of m after the prompt, where their queries stay and ours go on."""
    grains = Grains(length, mapped, HEAD, TAIL)
    assert grains.position(length - 1) == grains.position(length + STEPS - 1) == mapped
    q, k, v = (x[:, :, : length + STEPS] for x in vectors())
    law = law_for(length, mapped, tail=TAIL)
    out = flat(attention(q[:, :, length:], k, v, law, query_positions=range(length, length + STEPS))[0])[0]
    torch.testing.assert_close(out, RECORDED[f"tail decode {length}"], **ROUNDING)


def test_a_prompt_below_two_heads_is_plain_rope_at_their_temperature():
    law = law_for(SHORT, 9, tail=TAIL)
    out = flat(attention(*(x[:, :, : SHORT + STEPS] for x in vectors()), law)[0])[0]
    torch.testing.assert_close(out, RECORDED["short"], **ROUNDING)


@pytest.mark.parametrize("like", FITTED.values())
def test_mapping_lengths_are_the_authors_for_every_model_that_they_fitted(like):
    fit = FITS[like]
    assert [fit.mapped(length, fit.pretrained) for length in LENGTHS] == RECORDED[like].tolist()
