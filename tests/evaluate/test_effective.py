"""The effective context: found where it is, and turned into a law by a stated rule."""

from __future__ import annotations

import pytest
import torch

import rpe3d
from rpe3d.config import ConfigError
from rpe3d.evaluate import Tokens, effective
from rpe3d.evaluate.effective import (
    WAYS,
    Distance,
    Weighed,
    averaged,
    cheapest,
    effective_context,
    longest,
    make_nested,
    measure_distances,
    pick,
    ways,
    weigh,
)
from rpe3d.geometry.laws.bounded import FADE, FOCUS
from rpe3d.models import restore

NAN = float("nan")
TEXT = [Tokens(name="a", ids=torch.arange(1, 6000)), Tokens(name="b", ids=torch.arange(6000, 9000))]


def quiet(what, done, total):
    pass


@pytest.mark.parametrize("first", [(), (0,)])
def test_passages_are_nested_and_repeated_once_at_their_distances(first):
    trial = make_nested(TEXT, 2048, seed=1, first=first)
    assert len(trial.tokens) == 2048
    assert tuple(trial.tokens[: len(first)].tolist()) == first
    distances = [again - start for start, again in zip(trial.first, trial.again, strict=True)]
    assert distances == [256 * i for i in range(1, 8)] + [2048 - 64 - len(first)]
    covered = torch.zeros(2048, dtype=torch.int64)
    for start, again in zip(trial.first, trial.again, strict=True):
        assert torch.equal(trial.tokens[start : start + 64], trial.tokens[again : again + 64])
        for at in (start, again):
            covered[at : at + 64] += 1
    assert covered.max() == 1  # no passage lies on another
    assert len(trial.tokens.unique()) == 2048 - 8 * 64  # and nothing else is there twice
    assert not torch.equal(trial.tokens, make_nested(TEXT, 2048, seed=2, first=first).tokens)


@pytest.mark.parametrize(("memory", "found"), [(3000, 2048), (1300, 1280), (1100, 1024), (300, 256), (0, 0)])
def test_a_reader_with_a_known_memory_has_that_effective_context(monkeypatch, memory, found):
    """A stand-in that knows a token again if it met it at most `memory` tokens ago."""

    def remembers(model, tokens):
        (row,) = tokens.tolist()
        met, losses = {}, []
        for at, token in enumerate(row):
            losses.append(0.5 if at - met.get(token, -10_000) <= memory else 4.0)
            met[token] = at
        return torch.tensor([losses[1:]])

    monkeypatch.setattr(effective, "token_nll", remembers)
    distances = measure_distances(None, TEXT, 2048, [0, 1], (), quiet)
    assert [one.distance for one in distances] == [256 * i for i in range(1, 9)]
    assert {one.first for one in distances} == {one.text for one in distances} == {4.0}
    assert [one.again for one in distances] == [0.5 if min(one.distance, 1984) <= memory else 4.0 for one in distances]
    assert effective_context(distances) == found


def test_losses_are_the_models_own(model):
    text = [Tokens(name="a", ids=torch.randint(1, 257, (1000,), generator=torch.Generator().manual_seed(0)))]
    trial = make_nested(text, 256, seed=0)
    with torch.no_grad():
        logits = model(trial.tokens[None]).logits[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], trial.tokens[1:], reduction="none")
    (*_, last) = measure_distances(model, text, 256, [0], (), quiet)
    start, again = trial.first[-1], trial.again[-1]
    assert last.first == pytest.approx(losses[start : start + 7].mean().item(), rel=1e-4)
    assert last.again == pytest.approx(losses[again : again + 7].mean().item(), rel=1e-4)


def shares(*values):
    return [Distance(distance=1024 * i, first=2.0, again=2.0 * v, text=2.0) for i, v in enumerate(values, 1)]


def test_a_share_is_averaged_with_its_neighbours():
    assert averaged(shares(0.1, 0.7, 0.4, 1.0)) == pytest.approx([0.3, 0.4, 0.7, 0.8])


@pytest.mark.parametrize(
    ("measured", "found"),
    [
        ([0.12, 0.16, 0.27, 0.28, 0.62, 0.33, 0.76, 0.94], 5120),  # the default model, Python's language reference
        ([0.2] * 8, 8192),
        ([0.5] * 8, 8192),
        ([0.51] * 8, 0),
        ([0.9] * 8, 0),
        ([0.1, 0.1, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1], 2048),  # what comes after a failure does not count
    ],
)
def test_the_effective_context_ends_at_the_first_failure(measured, found):
    assert effective_context(shares(*measured)) == found


@pytest.mark.parametrize(
    ("effective", "pretrained", "chunk", "windows", "reach", "far"),
    [
        (5120, 8192, 512, (2560, 2048), 3840, 120),
        (8192, 8192, 512, (2560, 2048), 4096, 128),
        (2048, 2048, 128, (640, 512), 1024, 32),
        (4096, 4096, 256, (1280, 1024), 2048, 64),
        (32768, 32768, 512, (10240, 8192), 16384, 512),
        (131072, 131072, 512, (40960, 32768), 65536, 2048),
        (1024, 2048, 128, (512, 384), 768, 24),
        (64, 64, 16, (16, 16), 32, 8),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_all_follows_from_the_effective_context(effective, pretrained, chunk, windows, reach, far, way):
    """The rules in the docstring of `pick`; `make_law` takes what they give."""
    picked = pick(effective, pretrained, 8 * pretrained, way)
    weights = {
        "even": {"focus": FOCUS, "fade": FADE, "sinks": 0},
        "anchored": {"focus": 1.0, "fade": 0.5, "sinks": 1},
        "chosen": {"focus": 0.0, "fade": 0.0, "sinks": 0, "far": far, "block": 16},
        "wide": {"focus": 0.0, "fade": 0.0, "sinks": 0, "far": max(8, reach // 16), "block": 16},
    }[way]
    assert picked == {"chunk": chunk, "window": windows[way == "anchored"], "reach": reach} | weights
    rpe3d.make_law("3d-rpe", pretrained=pretrained, context=8 * pretrained, head_dim=64, **picked)


@pytest.mark.parametrize("effective", [32, 100, 160, 250, 1000, 3001])
@pytest.mark.parametrize("times", [2, 8])
def test_a_chosen_far_field_is_a_law_whatever_the_chunk(effective, times):
    """Where 16 does not divide the chunk, blocks are those of the law's own default; no key fades."""
    law = rpe3d.make_law(
        "3d-rpe",
        pretrained=4096,
        context=times * 4096,
        head_dim=64,
        **pick(effective, 4096, times * 4096, "chosen"),
    )
    usual = rpe3d.make_law("3d-rpe", pretrained=4096, context=8192, head_dim=64, chunk=law.chunk, far=1)
    assert (law.block, law.first, law.focus, law.fade) == (usual.block, usual.first, usual.focus, usual.fade)
    assert law.far == max(8, law.reach // 2 // law.block)
    even = pick(effective, 4096, times * 4096)
    assert (law.chunk, law.window, law.reach) == (even["chunk"], even["window"], even["reach"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pretrained", [64, 1000, 2048, 8192])
def test_a_context_that_the_model_uses_is_exact(pretrained, way):
    picked = pick(pretrained, pretrained, pretrained, way)
    law = rpe3d.make_law("3d-rpe", pretrained=pretrained, context=pretrained, head_dim=64, **picked)
    assert not law.chooses
    q, k = torch.tensor([pretrained - 1]), torch.arange(pretrained)
    assert torch.equal(law.relative_position(q, k), (q - k).double())


@pytest.mark.parametrize("pretrained", [2048, 4096, 8192, 32768])
def test_the_rule_agrees_in_form_with_the_defaults_of_3d_rpe(pretrained):
    """The default takes 2/3 of the pretrained length for the effective context."""
    law = rpe3d.make_law("3d-rpe", pretrained=pretrained, context=8 * pretrained, head_dim=64)
    chosen = pick(2 * pretrained // 3, pretrained, 8 * pretrained)
    assert chosen["reach"] == pytest.approx(law.reach, rel=0.01)
    assert chosen["window"] == pytest.approx(law.window, rel=0.21)  # a chunk
    assert (chosen["focus"], chosen["fade"], chosen["sinks"]) == (law.focus, law.fade, law.sinks)
    assert chosen["chunk"] in (min(512, law.chunk), law.chunk // 2) or chosen["chunk"] == 128


@pytest.mark.parametrize("way", ["anchored", "chosen"])
def test_all_ways_are_weighed_on_the_same_windows_and_the_model_is_stock_again(model, way):
    text = [Tokens(name="a", ids=torch.randint(2, 250, (4000,), generator=torch.Generator().manual_seed(0)))]
    found = weigh(model, 160, 256, text, 512, [0, 1], (), quiet)
    assert rpe3d.law_of(model) is None
    assert list(found) == ["even", "anchored", "chosen", "wide"]
    extended = rpe3d.extend(model, "3d-rpe", context=512, **pick(160, 256, 512, way))
    alone = measure_distances(extended, text, 512, [0, 1], (), quiet)
    restore(model)
    assert found[way].again == pytest.approx(sum(one.again for one in alone) / 8)
    assert found[way].text == pytest.approx(sum(one.text for one in alone) / 8)
    assert found[way] != found["even"]
    assert found["even"].cost == found["even"].text + found["even"].again


def test_only_the_ways_that_are_asked_for_are_weighed(model):
    text = [Tokens(name="a", ids=torch.randint(2, 250, (4000,), generator=torch.Generator().manual_seed(0)))]
    assert list(weigh(model, 160, 256, text, 512, [0], (), quiet, ways=["even", "chosen"])) == ["even", "chosen"]


@pytest.mark.parametrize(
    ("costs", "found"),
    [
        ({"even": 2.0, "anchored": 1.5, "chosen": 1.0}, "chosen"),
        ({"even": 2.0, "anchored": 1.0, "chosen": 1.5}, "anchored"),
        ({"even": 1.0, "anchored": 1.0, "chosen": 1.0}, "even"),
        ({"even": 2.0, "anchored": 1.0, "chosen": 1.0}, "anchored"),
        ({"even": 2.0, "anchored": 1.0}, "anchored"),
        ({"even": 1.0, "anchored": NAN, "chosen": NAN}, "even"),
        ({"even": NAN, "anchored": 1.0, "chosen": 0.5}, "chosen"),
        ({"even": 2.0, "anchored": 1.5, "chosen": 1.0, "wide": 0.9}, "wide"),
        ({"even": 2.0, "anchored": 1.5, "chosen": 1.0, "wide": 1.0}, "chosen"),
    ],
)
def test_the_lowest_cost_wins_and_of_two_alike_the_earlier(costs, found):
    """A cost is that of text and of repetitions together."""
    assert cheapest({way: Weighed(text=cost / 4, again=cost * 3 / 4) for way, cost in costs.items()}) == found


@pytest.mark.parametrize(("chosen", "found"), [(1.0, "chosen"), (1.009, "chosen"), (1.011, "even"), (NAN, "even")])
def test_for_longer_texts_a_choice_is_picked_that_costs_hardly_more(chosen, found):
    costs = {"even": 1.0, "anchored": 1.5, "chosen": chosen}
    weighed = {way: Weighed(text=cost / 4, again=cost * 3 / 4) for way, cost in costs.items()}
    assert cheapest(weighed, longer=True) == found
    assert cheapest(weighed) == "even"
    assert cheapest({"even": weighed["even"]}, longer=True) == "even"
    wider = weighed | {"wide": Weighed(text=0.25, again=0.7501)}
    assert cheapest(wider, longer=True) == ("chosen" if chosen == 1.0 else "wide")  # the cheaper of two choices


@pytest.mark.parametrize(
    ("effective", "pretrained", "chosen", "found"),
    [
        (5120, 8192, True, list(WAYS)),
        (5120, 8192, False, ["even", "anchored"]),
        (256, 256, True, ["even", "anchored", "chosen"]),
    ],
)
def test_twice_as_many_blocks_are_weighed_where_that_is_another_law(effective, pretrained, chosen, found):
    """A reach of 128 has 8 blocks of 16 in all, the fewest in both ways."""
    assert ways(effective, pretrained, 2 * pretrained, chosen=chosen) == found


@pytest.mark.parametrize("first", [(), (0,)])
def test_a_window_is_as_long_as_the_texts_allow(first):
    length = longest(TEXT)
    assert length == 7199
    make_nested(TEXT, length, seed=0, first=first)
    with pytest.raises(ConfigError, match="the texts have 8999 tokens"):
        make_nested(TEXT, length + 64, seed=0, first=first)


def test_too_little_text_or_too_few_positions_are_refused():
    with pytest.raises(ConfigError, match="the texts have 8999 tokens, but measuring 8192 positions takes 10240"):
        make_nested(TEXT, 8192, seed=0)
    with pytest.raises(ConfigError, match="the model has 128 positions, too few to measure"):
        measure_distances(None, TEXT, 128, [0], (), quiet)
