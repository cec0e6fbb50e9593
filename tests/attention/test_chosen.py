"""A chosen far field against its definition, written again with complex numbers and loops; and what it must not do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rpe3d import ConfigError, make_law
from rpe3d.attention import attention, explain, reference
from rpe3d.attention.chooser import Chooser
from rpe3d.attention.problem import check, rotated
from rpe3d.testing import gradients, random_problem, small_law

CHUNK, WINDOW, BLOCK = 8, 16, 4


def choosing(far=3, **changes):
    """Near: two chunks before a query's own. Without fading unless asked for."""
    own = {"chunk": CHUNK, "window": WINDOW, "reach": 48, "focus": 0.0, "fade": 0.0, "sinks": 0, "block": BLOCK}
    return small_law("3d-rpe", **{"context": 1024, "head_dim": 8, "far": far} | own | changes)


def problem(law, n=100, **options):
    given = {"t": n, "s": n, "h": 4, "g": 2, "dtype": torch.float64}
    return random_problem(law, **given | options)


def as_planes(x, positions, law, sign):
    """Vectors [n, d] as complex numbers [n, d / 2], turned by their positions."""
    half = x.shape[1] // 2
    z = x[:, :half] + 1j * x[:, half:]
    theta = law.frequencies().numpy()
    return z * np.exp(1j * sign * np.outer(positions, theta))


def in_bfloat16(z):
    """Complex numbers whose parts have the precision of bfloat16."""
    parts = torch.from_numpy(np.stack([z.real, z.imag])).bfloat16().double().numpy()
    return parts[0] + 1j * parts[1]


def by_hand(x, b=0):
    """Attention of sequence b by the definitions of `Choice` and of the law, a query and a key at a time."""
    law, choice = x.law, x.law.regions[-1].choice
    q, k, v = (y[b].numpy() for y in (x.q, x.k, x.v))
    h, t, _ = q.shape
    g, s, _ = k.shape
    places, theta = np.arange(s), law.frequencies().numpy()
    relative = law.relative_position(torch.arange(s)[:, None], torch.arange(s)).numpy()
    out, blocks = np.zeros((h, t, v.shape[2])), {}
    for head in range(h):
        group = head // (h // g)
        keys = as_planes(k[group], places, law, -1)
        for row in range(t):
            p = s - t + row
            first_near = max(0, (p // CHUNK - WINDOW // CHUNK) * CHUNK)
            count = first_near // BLOCK
            picked = set(range(count))
            if count > choice.most:
                centre = keys[:CHUNK].mean(0)
                begins = [max(0, i * BLOCK - BLOCK // 2) for i in range(count)]
                means = [keys[a : (i + 1) * BLOCK].mean(0) - centre for i, a in enumerate(begins)]
                w = sum(0.9**i * (keys[p - i] - centre) for i in range(16) if p >= i)
                heads = range(group * (h // g), (group + 1) * (h // g))
                wish = np.mean([as_planes(q[i][row : row + 1], [p], law, -1)[0] for i in heads], axis=0)
                aim = in_bfloat16(w / np.linalg.norm(w) + wish / np.linalg.norm(wish))
                score = [np.floor(np.vdot(in_bfloat16(m / np.linalg.norm(m)), aim).real * 2**14 + 0.5) for m in means]
                first = 2 if choice.most == 18 else 1
                order = sorted(range(first, count), key=lambda i: (-score[i], -i))
                picked = {*range(first), *order[: choice.most - first]}
            blocks[group, row] = picked
            mine = as_planes(q[head][row : row + 1], [p], law, -1)[0]
            logs = np.full(s, -np.inf)
            for j in range(p + 1):
                if j >= first_near or j // BLOCK in picked:
                    logs[j] = (mine * np.exp(1j * theta * relative[p, j]) * keys[j].conj()).sum().real * x.scale
            weights = np.exp(logs - logs.max())
            out[head, row] = weights @ v[group] / weights.sum()
    return torch.from_numpy(out), blocks


@pytest.mark.parametrize(("far", "n"), [(1, 90), (3, 90), (6, 90), (18, 130)])  # the last sees two blocks anyway
def test_it_is_its_definition(far, n):
    x = problem(choosing(far), n=n)
    out, blocks = by_hand(x)
    torch.testing.assert_close(reference.attend(x)[0][0], out, rtol=0, atol=1e-11)
    found = Chooser(x, x.law.regions[-1]).blocks(x)[0]
    for (group, row), picked in blocks.items():
        assert set(found[group, row].nonzero()[:, 0].tolist()) == picked


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("faded", [{}, {"focus": 1.5, "fade": 0.5, "sinks": 2}])
@pytest.mark.parametrize("impl", ["auto", "reference", "blocked"])
def test_every_implementation_makes_the_same_choice(impl, rotated, faded, monkeypatch):
    from rpe3d.attention.chosen import tiles

    monkeypatch.setattr(tiles, "SCORES", 40 * 4 * 300)  # tiles of 40, which end anywhere in a chunk
    x = replace(problem(choosing(**faded), n=300), rotated=rotated)
    truth = reference.attend(x)
    for queries in (range(300), range(299, 300), range(240, 250), range(170, 300)):
        end = queries.stop
        q, k, v = x.q[:, :, queries.start : end], x.k[:, :, :end], x.v[:, :, :end]
        for found, sure in zip(attention(q, k, v, x.law, rotated=rotated, impl=impl), truth, strict=True):
            torch.testing.assert_close(found, sure[:, :, queries.start : end], rtol=0, atol=1e-12)
    if rotated:
        assert explain(x)[0] == "chosen"
        assert explain(replace(x, q=x.q[:, :, -1:], queries=range(299, 300)))[0] == "decode"


def test_vectors_before_rope_and_after_it_choose_alike():
    x = replace(problem(choosing(), n=120), rotated=False)
    q, k = rotated(x, x.q, x.k)
    turned = replace(x, q=q, k=k, rotated=True)
    torch.testing.assert_close(reference.attend(x)[0], reference.attend(turned)[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("faded", [{}, {"focus": 1.5, "fade": 0.5, "sinks": 2}])
def test_with_as_many_blocks_as_there_are_it_is_the_law_without_a_choice(faded):
    few, every = choosing(25, **faded), choosing(0, **faded)
    x = problem(few, n=25 * BLOCK)
    truth = reference.attend(replace(x, law=every))
    for one, other in zip(reference.attend(x), truth, strict=True):
        assert torch.equal(one, other)
    fewer = reference.attend(replace(x, law=choosing(5, **faded)))[0]
    assert (fewer - truth[0]).abs().max() > 0.1


def test_no_output_depends_on_a_later_token():
    """Not through a mean, a centre, or a vote of neighbours: whatever follows a token, its output stays."""
    x = problem(choosing(), n=160)
    before = reference.attend(x)[0]
    for cut in (41, 64, 95, 96, 130):
        others = [y.clone() for y in (x.q, x.k, x.v)]
        for y in others:
            y[:, :, cut:] = torch.randn_like(y[:, :, cut:])
        after = reference.attend(replace(x, q=others[0], k=others[1], v=others[2]))[0]
        assert torch.equal(before[:, :, :cut], after[:, :, :cut])
        assert (before[:, :, cut:] - after[:, :, cut:]).abs().max() > 0.1


def test_steps_and_pieces_with_a_cache_are_the_whole_prompt():
    x = problem(choosing(), n=150)
    whole = reference.attend(x)[0]
    for start, stop in ((0, 1), (0, 60), (60, 61), (61, 150), (149, 150)):
        q, k, v = x.q[:, :, start:stop], x.k[:, :, :stop], x.v[:, :, :stop]
        out, _ = attention(q, k, v, x.law, rotated=True)
        torch.testing.assert_close(out, whole[:, :, start:stop], rtol=0, atol=1e-12)


def test_tiles_keep_no_more_than_there_is_room_for(monkeypatch):
    from rpe3d.attention.chosen import tiles

    monkeypatch.setattr(tiles, "SCORES", 40 * 4 * 300)
    x = problem(choosing(), n=300)
    truth = reference.attend(x)[0]
    for room, least, most in ((tiles.KEPT, 8, 8), (300000, 1, 7), (0, 0, 0)):
        monkeypatch.setattr(tiles, "KEPT", room)
        made = tiles.Tiles(x)
        for _ in range(2):
            torch.testing.assert_close(made(x.q, x.k, x.v, None)[0], truth, rtol=0, atol=1e-12)
        assert least <= len(made.steps) <= most
        assert sum(step.nbytes() for step in made.steps.values()) <= room


def test_padding_on_either_side_changes_nothing():
    n, pad = 110, 13
    x = problem(choosing(), n=n)
    whole = reference.attend(x)[0]
    for left in (True, False):
        empty = torch.full((1, 4, pad, 8), torch.nan, dtype=torch.float64)
        parts = [[empty[:, : y.shape[1]], y] if left else [y, empty[:, : y.shape[1]]] for y in (x.q, x.k, x.v)]
        q, k, v = (torch.cat(part, 2).nan_to_num(9.0) for part in parts)
        slots = torch.arange(n + pad)
        tokens = slots >= pad if left else slots < n
        places = (slots - pad).clamp(min=0) if left else slots
        given = {
            "query_positions": places,
            "key_positions": places,
            "query_mask": tokens[None],
            "key_mask": tokens[None],
        }
        padded = check(q, k, v, x.law, rotated=True, **given)
        for out in (reference.attend(padded)[0], attention(q, k, v, x.law, rotated=True, **given)[0]):
            torch.testing.assert_close(out[:, :, tokens], whole, rtol=0, atol=1e-12)
        assert explain(padded)[0] == "chosen"


def test_a_batch_of_padding_alone_sees_nothing():
    x = problem(choosing(), n=40)
    nothing = torch.zeros(1, 40, dtype=torch.bool)
    for impl in ("auto", "reference", "blocked"):
        out, lse = attention(x.q, x.k, x.v, x.law, rotated=True, key_mask=nothing, impl=impl)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 1e200])
def test_keys_that_come_later_are_no_part_of_a_choice_whatever_they_hold(junk):
    """As in the slots of a static cache that nobody has filled: 0 times what is no number is none."""
    x = problem(choosing(), n=130)
    k = x.k.clone()
    k[:, :, 101:] = junk
    truth = reference.attend(x)[0][:, :, 100:101]
    for impl in ("auto", "reference", "decode"):
        places = {"query_positions": range(100, 101), "key_positions": range(130)}
        found, _ = attention(x.q[:, :, 100:101], k, x.v, x.law, rotated=True, impl=impl, **places)
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)


def test_positions_before_0_and_such_as_fall_behind_padding_are_refused():
    x = problem(choosing(), n=60)
    places = torch.arange(60) - 5
    with pytest.raises(ConfigError, match="a key is at position -5"):
        attention(x.q, x.k, x.v, x.law, rotated=True, query_positions=places, key_positions=places)
    places, tokens = torch.arange(60) % 30, torch.ones(1, 60, dtype=torch.bool)
    tokens[:, 30] = False
    given = {"query_positions": places, "key_positions": places, "query_mask": tokens, "key_mask": tokens}
    with pytest.raises(ConfigError, match="fall from 29 to 1"):
        attention(x.q, x.k, x.v, x.law, rotated=True, **given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_text_of_one_token_chooses_alike_in_a_prompt_and_in_a_step(dtype):
    """Its keys differ by their rounding alone, and so do the scores of blocks: rounding must not choose."""
    x = problem(choosing(), n=300, dtype=dtype)
    x = replace(x, rotated=False, k=x.k[:, :, :1].expand(-1, -1, 300, -1))
    q, k = rotated(x, x.q, x.k)
    whole, _ = attention(q, k, x.v, x.law, rotated=True)
    for p in range(40, 300, 13):
        step, _ = attention(q[:, :, p : p + 1], k[:, :, : p + 1], x.v[:, :, : p + 1], x.law, rotated=True)
        torch.testing.assert_close(step, whole[:, :, p : p + 1], rtol=0, atol=1e-5)


def test_the_first_block_is_always_chosen_and_of_blocks_alike_the_nearer():
    x = problem(choosing(4), n=120)
    same = x.k.new_ones(1, 2, 1, 8).expand(1, 2, 120, 8)
    x = replace(x, rotated=False, k=same)
    found = Chooser(x, x.law.regions[-1]).blocks(x)[0, 0]
    for p in range(120):
        count = max(0, p // CHUNK - WINDOW // CHUNK) * CHUNK // BLOCK
        expected = {0, *range(max(1, count - 3), count)} if count > 4 else set(range(count))
        assert set(found[p].nonzero()[:, 0].tolist()) == expected


def test_gradients_are_those_of_attention_over_what_was_chosen():
    x = problem(choosing(), n=70)
    weight = torch.randn(1, 4, 70, 8, dtype=torch.float64)
    mask = reference.visible(x)[:, None] & reference.chosen(x)
    dense = replace(x, law=choosing(0))

    def masked(q, k, v):
        scores = reference._scores(dense, q, k.repeat_interleave(2, 1)) * x.scale
        return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1),)

    for solve in (
        lambda q, k, v: reference.attend(replace(x, q=q, k=k, v=v)),
        lambda q, k, v: attention(q, k, v, x.law, rotated=True, impl="blocked"),
    ):
        for ours, truth in zip(gradients(x, solve, weight), gradients(x, masked, weight), strict=True):
            torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"block": 7}, "does not divide chunk 16: choose block 4"),
        ({"far": -1}, "far"),
        ({"far": 2.5}, "far"),
        ({"decay": 0}, "decay"),
        ({"decay": 1.1}, "decay"),
        ({"block": 0}, "block"),
    ],
)
def test_what_cannot_be_chosen_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        make_law("3d-rpe", pretrained=256, context=1024, head_dim=8, chunk=16, **given)


def test_a_choice_comes_without_fading_unless_asked_for():
    law = make_law("3d-rpe", pretrained=256, context=1024, head_dim=8, far=8)
    assert (law.focus, law.fade, law.block) == (0, 0, 16)
    assert make_law("3d-rpe", pretrained=256, context=1024, head_dim=8, far=8, fade=0.5).fade == 0.5
    assert make_law("3d-rpe", pretrained=64, context=1024, head_dim=8, far=8).block == 4
