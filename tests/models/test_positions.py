"""Where tokens stand: read from the device once in a forward, whatever the number of layers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import rpe3d
from rpe3d.attention.contract import Placed, placed
from rpe3d.models import positions
from rpe3d.models.positions import layer_mask, layout

BOUNDED = {"chunk": 8, "window": 16, "reach": 32}


@pytest.fixture
def reads(monkeypatch):
    """One entry for every time that positions are read from the device."""
    made = []

    def counted(function):
        return lambda *given: made.append(given) or function(*given)

    monkeypatch.setattr(positions, "_facts", counted(positions._facts))
    monkeypatch.setattr("rpe3d.attention.contract.placed", counted(placed))
    return made


def left_padded(ids):
    batch = torch.cat([ids, torch.cat([torch.zeros(1, 30, dtype=torch.long), ids[:, :90]], 1)])
    return batch, (batch != 0).long()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_padded_prompt_is_read_once_for_all_layers(tiny, ids, reads, mode):
    model = rpe3d.extend(tiny(num_hidden_layers=6), context=256, **BOUNDED)
    batch, mask = left_padded(ids)
    reads.clear()  # extend tries one token
    with mode():
        model(batch, attention_mask=mask, use_cache=False)
        assert len(reads) == 1
        model(batch, attention_mask=mask, use_cache=False)
        assert len(reads) == 2  # another forward


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_position_ids_that_are_changed_in_place_are_read_again(tiny, ids, mode):
    """Layers of one forward share what is read of them; the next forward must not."""
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    with mode():
        place = torch.arange(120)[None]
        first = model(ids, position_ids=place, use_cache=False).logits
        place += 3  # no multiple of the chunk, so borders fall elsewhere
        second = model(ids, position_ids=place, use_cache=False).logits
        again = model(ids, position_ids=place.clone(), use_cache=False).logits
        back = model(ids, position_ids=torch.arange(120)[None], use_cache=False).logits
    assert not torch.allclose(first, second, rtol=0, atol=2e-4)
    torch.testing.assert_close(again, second)
    torch.testing.assert_close(back, first)


@pytest.mark.parametrize("slots", [40, 64])
def test_a_mask_that_masks_nothing_is_no_mask(slots):
    """`generate` always gives one. All sequences are one task then; a static cache's empty slots are left out."""
    q, k = torch.zeros(3, 2, 40, 4), torch.zeros(3, 2, slots, 4)
    mask = layer_mask(torch.ones(3, 40, dtype=torch.bool), 3, 40, slots, 0, "cpu")
    where = layout(q, k, mask, torch.arange(40)[None], 0)
    assert (where.queries, where.keys, where.keys_used) == (range(40), range(40), 40)
    assert where.query_mask is where.key_mask is None


def test_padding_on_either_side_is_known_as_runs_of_tokens():
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[1, :10] = False
    mask[2, 25:] = False
    ids = (mask.cumsum(1) - 1).clamp(min=0)
    given = layer_mask(mask, 3, 40, 40, 0, "cpu")
    where = layout(torch.zeros(3, 2, 40, 4), torch.zeros(3, 2, 40, 4), given, ids, 0)
    assert isinstance(where.queries, Placed)
    assert isinstance(where.keys, Placed)
    expected = ((slice(0, 40), range(40)), (slice(10, 40), range(30)), (slice(0, 25), range(25)))
    assert where.queries.runs == where.keys.runs == expected


@pytest.mark.parametrize(
    ("row", "mask", "run"),
    [
        ([4, 5, 6, 7], None, (slice(0, 4), range(4, 8))),
        ([4, 5, 7, 8], None, None),
        ([0, 1, 0, 1], None, None),
        ([9, 9, 2, 3], [0, 0, 1, 1], (slice(2, 4), range(2, 4))),
        ([0, 1, 9, 3], [1, 1, 0, 1], None),
        ([7, 7, 7, 7], [0, 0, 0, 0], (slice(0, 0), range(0))),
    ],
    ids=["consecutive", "a gap", "packed", "padded", "a hole", "nothing"],
)
def test_the_run_of_a_row(row, mask, run):
    given = None if mask is None else torch.tensor([mask], dtype=torch.bool)
    assert placed(torch.tensor([row]), given).runs == (run,)


@pytest.mark.parametrize("gradients", [False, True])
def test_known_runs_change_no_result(ids, gradients):
    """`attention` with positions whose runs are known, and without: the same tasks."""
    from rpe3d.attention import attention

    law = rpe3d.make_law("3d-rpe", pretrained=64, context=256, head_dim=16, **BOUNDED)
    q, k, v = (torch.randn(2, 2, 100, 16, requires_grad=gradients) for _ in range(3))
    mask = torch.ones(2, 100, dtype=torch.bool)
    mask[1, :33] = False
    where = (mask.cumsum(1) - 1).clamp(min=0)
    results = []
    with nullcontext() if gradients else torch.no_grad():
        for given in (where, placed(where, mask)):
            masks = {"query_mask": mask, "key_mask": mask}
            out, _ = attention(q, k, v, law, query_positions=given, key_positions=given, **masks)
            results.append(torch.autograd.grad(out.sum(), q)[0] if gradients else out)
    assert torch.equal(*results)
