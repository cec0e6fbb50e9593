"""Models whose queries choose their far keys: whatever a cache went through, the logits are those of the whole text."""

from __future__ import annotations

import pytest
import torch

from rpe3d import extend, law_of
from tiny_models import make

LAW = {"chunk": 8, "window": 16, "reach": 48, "far": 3, "block": 4}


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


def test_a_prompt_within_the_window_is_the_stock_model(model, ids):
    stock = make("llama").double()
    torch.testing.assert_close(whole(model, ids[:, :24]), whole(stock, ids[:, :24]), rtol=0, atol=1e-12)
