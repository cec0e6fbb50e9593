"""Where tokens stand: read from the device once in a forward, whatever the number of layers."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

import rpe3d
from rpe3d import ConfigError
from rpe3d.attention.problem import Placed, placed
from rpe3d.models import positions
from rpe3d.models.positions import layer_mask, layout

BOUNDED = {"chunk": 8, "window": 16, "reach": 32, "focus": 0, "fade": 0}


@pytest.fixture
def reads(monkeypatch):
    """One entry for every time that positions are read from the device."""
    made = []

    def counted(function):
        return lambda *given: made.append(given) or function(*given)

    monkeypatch.setattr(positions, "_facts", counted(positions._facts))
    monkeypatch.setattr("rpe3d.attention.problem.placed", counted(placed))
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
def test_position_ids_that_are_changed_behind_torch_s_back_are_read_again(tiny, ids, mode):
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    with mode():
        place = torch.arange(120)[None]
        model(ids, position_ids=place, use_cache=False)
        place.numpy()[:] += 3
        second = model(ids, position_ids=place, use_cache=False).logits
        again = model(ids, position_ids=place.clone(), use_cache=False).logits
    torch.testing.assert_close(again, second)


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


def chats(ids):
    """Two chats of two turns, the first padded to one length, with positions as `generate` has them; and each alone."""
    batch = torch.cat([ids, ids.flip(1)])
    mask = torch.ones_like(batch)
    mask[1, 40:63] = 0
    return batch, mask, (mask.cumsum(1) - 1).clamp(min=0), [batch[0:1], batch[1:2, mask[1] > 0]]


def test_padding_between_turns_and_what_is_decoded_after_it(tiny, ids):
    """A query saw nothing of its own key here, and was off by more than it is large."""
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    batch, mask, where, alone = chats(ids)
    with torch.no_grad():
        for cut in (120, 119, 100, 63, 50):  # in one piece, the last token, a turn, some of the padding as well
            first = model(batch[:, :cut], attention_mask=mask[:, :cut], position_ids=where[:, :cut])
            cache, last = first.past_key_values, first.logits[:, -1]
            if cut < 120:
                rest = {"attention_mask": mask, "position_ids": where[:, cut:], "past_key_values": cache}
                last = model(batch[:, cut:], **rest).logits[:, -1]
            for b, row in enumerate(alone):
                torch.testing.assert_close(last[b], model(row).logits[0, -1], rtol=0, atol=2e-4)


def test_a_right_padded_batch_that_is_then_decoded(tiny, ids):
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    batch, mask = ids[:, :90].repeat(2, 1), torch.ones(2, 120, dtype=torch.long)
    mask[1, 60:90] = 0
    where = mask.cumsum(1) - 1
    with torch.no_grad():
        out = model(batch, attention_mask=mask[:, :90], position_ids=where[:, :90])
        for t in range(90, 100):
            given = {"attention_mask": mask[:, : t + 1], "position_ids": where[:, t : t + 1]}
            out = model(ids[:, t : t + 1].repeat(2, 1), past_key_values=out.past_key_values, **given)
        for b, text in enumerate((ids[:, :100], torch.cat([ids[:, :60], ids[:, 90:100]], 1))):
            torch.testing.assert_close(out.logits[b, -1], model(text).logits[0, -1], rtol=0, atol=2e-4)


def test_generate_on_a_right_padded_batch_is_refused(tiny, ids):
    """It puts the token after 70 others and 50 of padding at position 1, in every model."""
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    mask = (torch.arange(120) < 70).long()[None]
    with pytest.raises(ConfigError, match="do not continue from the 70 cached tokens"):
        model.generate(ids * mask, attention_mask=mask, max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("length", [1, 7, 30])
def test_positions_that_do_not_start_at_0_with_a_cache_and_no_mask(tiny, ids, length):
    """Keys of earlier forwards stand before the queries, wherever these stand."""
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    place = torch.arange(100, 190)[None]
    with torch.no_grad():
        whole = model(ids[:, :90], position_ids=place).logits
        first = model(ids[:, : 90 - length], position_ids=place[:, : 90 - length])
        given = {"position_ids": place[:, 90 - length :], "past_key_values": first.past_key_values}
        pieces = torch.cat([first.logits, model(ids[:, 90 - length : 90], **given).logits], 1)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=2e-4)


def test_threads_may_note_where_their_texts_begin(monkeypatch):
    """Each drops the oldest when there are too many: a thread failed on what another had dropped."""
    monkeypatch.setattr(positions, "_starts", {0: None})
    monkeypatch.setattr(positions, "_MOST_STARTS", 8)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def texts(thread):
        for n in range(1, 3000):
            at = 10_000 * thread + n
            positions.Row(0, 0, 0, 1, 0, 0, 1, at, at, True, True).note()

    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(texts, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert len(positions._starts) == 8
    assert 0 in positions._starts


def test_pieces_that_are_filled_up_with_padding(tiny, ids):
    """Buckets of 32: the last piece ends in padding in every row."""
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    with torch.no_grad():
        whole = model(ids[:, :50]).logits
        first = model(ids[:, :32])
        piece = torch.nn.functional.pad(ids[:, 32:50], (0, 14))
        mask = torch.tensor([[1] * 50 + [0] * 14])
        given = {"attention_mask": mask, "position_ids": torch.arange(32, 64)[None]}
        second = model(piece, past_key_values=first.past_key_values, **given).logits
    torch.testing.assert_close(second[:, :18], whole[:, 32:], rtol=0, atol=2e-4)


def test_a_piece_of_padding_alone(tiny, ids):
    """`prefill_chunk_size` below the left padding."""
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    padded = torch.cat([torch.zeros(1, 50, dtype=torch.long), ids[:, :70]], 1)
    mask = (padded != 0).long()
    given = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    made = model.generate(padded, prefill_chunk_size=20, **given)
    assert torch.equal(made[:, 120:], model.generate(ids[:, :70], max_new_tokens=5, do_sample=False)[:, 70:])


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        (torch.arange(120) * 2, "restart or skip within a row"),
        (torch.cat([torch.arange(60), torch.arange(60)]), "restart or skip within a row"),
    ],
    ids=["skips", "packed"],
)
def test_positions_that_do_not_count_on_are_refused(tiny, ids, positions, words):
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    with pytest.raises(ConfigError, match=words):
        model(ids, position_ids=positions[None], attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("length", [1, 40])
def test_positions_that_skip_from_one_forward_to_the_next_are_refused(tiny, ids, length):
    """Nobody kept where the cached keys stand, so only those that count on can be placed."""
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    cache = model(ids[:, :20]).past_key_values
    with pytest.raises(ConfigError, match="do not continue from the 20 cached tokens"):
        model(ids[:, 20 : 20 + length], position_ids=torch.arange(111, 111 + length)[None], past_key_values=cache)


def test_a_graph_cannot_refuse_and_gives_no_number(tiny, ids):
    """Padding between tokens in a compiled step: NaN, where it would be wrong; a number, where it is right."""
    from transformers import StaticCache

    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    batch, mask, where, _ = chats(ids)
    forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    cache = StaticCache(config=model.config, max_cache_len=128)
    with torch.no_grad():
        model(batch[:, :119], attention_mask=mask[:, :119], position_ids=where[:, :119], past_key_values=cache)
        given = {"past_key_values": cache, "position_ids": where[:, 119:]}
        assert forward(batch[:, 119:], attention_mask=mask, **given).logits.isnan().all()
    eager = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    cache = StaticCache(config=model.config, max_cache_len=128)
    mask[1] = (torch.arange(120) >= 23).long()
    where = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(batch[:, :119], attention_mask=mask[:, :119], position_ids=where[:, :119], past_key_values=cache)
        given = {"past_key_values": cache, "position_ids": where[:, 119:]}
        last = eager(batch[:, 119:], attention_mask=mask, **given).logits[:, -1]
    for b, row in enumerate((batch[:1], batch[1:, 23:])):
        torch.testing.assert_close(last[b], model(row).logits[0, -1], rtol=0, atol=2e-4)


@pytest.mark.parametrize(("position", "known"), [(20, True), (5, False), (0, False), (111, False)])
def test_a_compiled_step_that_does_not_count_on_gives_no_number(tiny, ids, position, known):
    """Outside a graph such positions are refused. Keys before position 0, or that had skipped, were taken for real."""
    from transformers import StaticCache

    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    cache = StaticCache(config=model.config, max_cache_len=64)
    forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        last = forward(ids[:, 20:21], position_ids=torch.tensor([[position]]), past_key_values=cache).logits[:, -1]
        if known:
            torch.testing.assert_close(last, model(ids[:, :21]).logits[:, -1], rtol=0, atol=2e-4)
        else:
            assert last.isnan().all()


def test_a_compiled_prompt_with_gaps_that_begins_anywhere(tiny, ids):
    """All of its tokens are queries, so all is known: it was no number."""
    model = rpe3d.extend(tiny(), context=256, **BOUNDED)
    mask = torch.ones_like(ids)
    mask[:, 30:50] = 0
    given = {"attention_mask": mask, "position_ids": torch.arange(3, 123)[None]}
    forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(forward(ids, **given).logits, model(ids, **given).logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_mixed_precision_trains_as_the_stock_model_does(tiny, ids, family):
    """float32 weights under autocast: norms of q and k leave them float32, and v is bfloat16."""
    model = tiny(family)
    short = ids[:, :20]  # within the exact window, so both are the same function

    def gradients():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(short, labels=short, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    stock = gradients()
    rpe3d.extend(model, context=256, **BOUNDED)
    for ours, truth in zip(gradients(), stock, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=0.05 * float(truth.abs().max()) + 1e-8)


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
