"""Models whose queries choose their far keys: whatever a cache went through, the logits are those of the whole text."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from rpe3d import extend, law_of, make_law
from rpe3d.attention import decode
from rpe3d.attention.problem import check
from rpe3d.models import positions
from tiny_models import make

LAW = {"chunk": 8, "window": 16, "reach": 48, "far": 3, "block": 4}
PADDING = [("before", True), ("before, skipped", True), ("within", False)]


@pytest.fixture(scope="module")
def model():
    return extend(make("llama"), "3d-rpe", context=512, **LAW).double()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 97, (2, 160), generator=torch.Generator().manual_seed(0))


def whole(model, ids, **given):
    with torch.no_grad():
        return model(ids, **given).logits


def test_the_choice_matters_and_lasts(model, ids, tmp_path):
    every = extend(make("llama"), "3d-rpe", context=512, **LAW | {"far": 0}).double()
    far = (whole(model, ids) - whole(every, ids)).abs().amax((0, 2))
    assert far[:32].max() == 0  # up to there two far blocks are all there is, then four
    assert far[32:].min() > 1e-3
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert law_of(again) == law_of(model)
    assert law_of(again).far == 3
    torch.testing.assert_close(whole(again, ids), whole(model, ids), rtol=0, atol=1e-12)


def test_a_cache_that_is_filled_in_pieces_cropped_and_filled_again(model, ids):
    """A dynamic cache, as a second prompt, an assistant's rejected tokens and a reordered beam leave it."""
    truth = whole(model, ids)
    with torch.no_grad():
        cache = model(ids[:, :90]).past_key_values
        for stop in (91, 92, 120):
            start = cache.get_seq_length()
            out = model(ids[:, start:stop], past_key_values=cache)
            torch.testing.assert_close(out.logits, truth[:, start:stop], rtol=0, atol=1e-10)
        model(ids[:, :40].flip(1), past_key_values=cache)  # another text, thrown away
        cache.crop(-100)  # far below what the choice has looked at
        out = model(ids[:, 60:], past_key_values=cache)
        torch.testing.assert_close(out.logits, truth[:, 60:], rtol=0, atol=1e-10)
        cache.crop(-60)
        cache.reorder_cache(torch.tensor([1, 0]))
        out = model(ids[:, 100:].flip(0), past_key_values=cache)
        torch.testing.assert_close(out.logits, truth[:, 100:].flip(0), rtol=0, atol=1e-10)


def test_padding_beams_and_static_caches(model, ids):
    padded = torch.cat([torch.zeros_like(ids[:1, :37]), ids[:1, :123]], 1)
    mask = torch.cat([torch.zeros_like(ids[:1, :37]), torch.ones_like(ids[:1, :123])], 1)
    both = torch.cat([padded, ids[1:]]), torch.cat([mask, torch.ones_like(ids[1:])])
    places = (both[1].cumsum(1) - 1).clamp(min=0)
    found = whole(model, both[0], attention_mask=both[1], position_ids=places)
    torch.testing.assert_close(found[0, 37:], whole(model, ids[:1, :123])[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(found[1], whole(model, ids[1:])[0], rtol=0, atol=1e-10)
    for given in ({}, {"num_beams": 3}):
        plain = {"max_new_tokens": 6, "do_sample": False, "attention_mask": both[1], **given}
        uncached = model.generate(both[0], use_cache=False, **plain)
        assert torch.equal(model.generate(both[0], **plain), uncached)


def test_padding_that_a_model_counts_changes_no_choice(model, ids):
    """Its vectors are rotated by the slots' numbers, and a choice rounds them without positions: those of the text."""
    padded, mask = (torch.nn.functional.pad(x, (13, 0)) for x in (ids, torch.ones_like(ids)))
    found = whole(model, padded, attention_mask=mask)[:, 13:]
    torch.testing.assert_close(found, whole(model, ids), rtol=0, atol=1e-3)  # tables of cos and sin are float32


def test_a_prompt_within_the_window_is_the_stock_model(model, ids):
    stock = make("llama").double()
    torch.testing.assert_close(whole(model, ids[:, :24]), whole(stock, ids[:, :24]), rtol=0, atol=1e-12)


@pytest.fixture
def padded_step():
    """A law that chooses, and steps of two rows of 80 slots, the second with 9 of padding: its mask and positions."""
    law = make_law("3d-rpe", pretrained=64, context=512, head_dim=32, chunk=32, window=32, reach=64, far=3, block=16)
    by_slot = torch.full((2, 1), 79)
    by_token = by_slot - torch.tensor([[0], [9]])

    def coded(padding):
        mask = torch.ones(2, 80, dtype=torch.bool)
        mask[1, padding] = False
        return positions.layer_mask(mask, 2, 1, 80, 79, mask.device)

    left, within = coded(slice(9)), coded(slice(30, 39))
    return law, {"before": (left, by_slot), "before, skipped": (left, by_token), "within": (within, by_slot)}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(("padding", "runs"), PADDING)
def test_kernels_of_a_step_take_only_tokens_that_stand_at_0_and_on(padded_step, padding, runs):
    """They know no padding but what lies before position 0, where a text after padding is placed however it counts."""
    law, steps = padded_step
    code, ids = steps[padding]
    where = positions._layout(2, 1, 80, code, ids)
    q, k = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 80, 32)
    problem = check(*where.gathered(q, k, k), law, **where.arguments)
    assert (decode.step_refusal(problem) is None) == runs


@pytest.mark.parametrize(("padding", "sound"), PADDING)
def test_a_graph_that_cannot_refuse_such_padding_gives_nan(padded_step, padding, sound):
    code, ids = padded_step[1][padding]
    where = positions._in_a_graph(80, code[:, 0, 0], ids)
    out = torch.zeros(2, 4, 1, 32)
    assert where.returned(out).isfinite().all()
    assert where.returned(out, chosen=True).isfinite().all() == sound
