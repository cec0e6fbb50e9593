"""Perplexity protocols against plain loops with the model's own loss."""

from __future__ import annotations

import math

import pytest
import torch

from rpe3d.evaluate import perplexity
from rpe3d.evaluate.tasks.perplexity import PROTOCOLS, batches, by_position, mean_nll, score, tail_of

LENGTH = 300


def own_loss(model, tokens, scored=None):
    """transformers' loss of one window; with `scored`, of its last tokens alone."""
    labels = tokens[None].clone()
    if scored is not None:
        labels[:, :-scored] = -100
    with torch.no_grad():
        return model(tokens[None], labels=labels).loss.item()


def test_overlap_mean_is_the_mean_over_windows_of_one_stream(model, texts):
    """ChunkLlama and LongLoRA: windows at range(0, len - length, 256), every target counts."""
    stream = torch.cat([text.ids for text in texts])
    losses = [own_loss(model, stream[at : at + LENGTH]) for at in range(0, len(stream) - LENGTH, 256)]
    assert len(losses) == 6
    expected = math.exp(sum(losses) / len(losses))
    found = perplexity(model, texts, LENGTH, protocol="overlap_mean", first=(0,))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("first", [(), (0,)])
def test_sliding_new_tokens_counts_each_token_once(model, texts, first):
    """YaRN's loop: BOS in front, targets seen before are masked, the mean over windows of all texts."""
    losses = []
    counted = 0
    for text in texts:
        previous = 0
        for begin in range(0, len(text.ids), 256):
            end = min(begin + LENGTH - len(first), len(text.ids))
            window = torch.cat([torch.tensor(first, dtype=torch.int64), text.ids[begin:end]])
            fresh = min(end - previous, len(window) - 1)
            losses.append(own_loss(model, window, fresh))
            counted += fresh
            previous = end
            if end == len(text.ids):
                break
    assert counted == sum(len(text.ids) - 1 + len(first) for text in texts)
    expected = math.exp(sum(losses) / len(losses))
    found = perplexity(model, texts, LENGTH, protocol="sliding_new_tokens", first=first)
    assert found == pytest.approx(expected, rel=1e-5)


def test_sliding_windows_of_one_stride_do_not_score_what_has_no_context(model, texts):
    """At 256 tokens every token of a window is new, and transformers' loss leaves out the first of each window."""
    parts = [text.ids[at : at + 256] for text in texts for at in range(0, len(text.ids), 256)]
    expected = math.exp(sum(own_loss(model, part) for part in parts) / len(parts))
    assert perplexity(model, texts, 256, protocol="sliding_new_tokens") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("first", [(), (0,)])
def test_windows_counts_every_predicted_token_the_same(model, texts, first):
    cut = PROTOCOLS["windows"](texts, LENGTH, 3, first)
    assert [len(w) for w in cut] == [LENGTH] * 3
    assert [(w.text, w.start) for w in cut] == [("a", (700 + len(first)) // 4), ("a", (700 + len(first)) * 3 // 4),
                                                ("b", (400 + len(first)) // 2)]  # fmt: skip
    losses = [own_loss(model, w.tokens) for w in cut]
    found = perplexity(model, texts, LENGTH, windows=3, first=first)
    assert found == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)
    assert perplexity(model, texts, LENGTH, windows=3, first=first, batch=2) == pytest.approx(found, rel=1e-5)


def test_a_window_never_crosses_a_text_and_short_texts_have_none(texts):
    for window in PROTOCOLS["windows"](texts, 900, 4, ()):
        assert window.text == "a"
        assert torch.equal(window.ids, texts[0].ids[window.start :][:900])
    assert {w.text for w in PROTOCOLS["sliding_new_tokens"](texts, 900, None, ())} == {"a"}


def test_a_sample_of_a_published_protocol_is_spread_over_its_windows(texts):
    every = PROTOCOLS["overlap_mean"](texts, LENGTH, None, ())
    some = PROTOCOLS["overlap_mean"](texts, LENGTH, 2, ())
    assert [(w.text, w.start) for w in some] == [(every[i].text, every[i].start) for i in (1, 4)]
    assert (every[4].text, every[4].start) == ("b", 4 * 256 - 1000)


def test_the_tail_and_the_curve_are_of_the_same_losses(model, texts):
    cut = PROTOCOLS["windows"](texts, LENGTH, 2, ())
    scores = score(model, cut, LENGTH)
    nll, tail = mean_nll(scores)
    with torch.no_grad():
        logits = model(torch.stack([w.tokens for w in cut])).logits
    targets = torch.stack([w.tokens for w in cut])[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none")
    assert nll == pytest.approx(losses.mean().item(), rel=1e-5)
    assert tail == pytest.approx(losses[:, -150:].mean().item(), rel=1e-5)
    curve = by_position(scores, LENGTH)
    assert [(b["from"], b["to"], b["n"]) for b in curve] == [(0, 128, 254), (128, 256, 256), (256, 300, 88)]
    assert curve[1]["nll"] == pytest.approx(losses[:, 127:255].mean().item(), rel=1e-5)
    assert sum(b["nll"] * b["n"] for b in curve) == pytest.approx(losses.sum().item(), rel=1e-5)


def test_the_tail_is_4096_tokens_or_half_of_a_shorter_window():
    assert [tail_of(n) for n in (300, 4096, 8192, 65536)] == [150, 2048, 4096, 4096]


def test_a_batch_holds_windows_of_one_length(texts):
    cut = PROTOCOLS["sliding_new_tokens"](texts, LENGTH, None, ())
    groups = batches(cut, 3)
    assert [w for group in groups for w in group] == cut
    assert all(len({len(w) for w in group}) == 1 and len(group) <= 3 for group in groups)
    assert len(groups) > len(cut) // 3
