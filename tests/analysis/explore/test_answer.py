"""Answers are the library's own numbers, in the page's form, and refusals are its own words."""

from __future__ import annotations

import json

import pytest
import torch

from rpe3d import laws, make_law
from rpe3d.analysis.cost import cost
from rpe3d.analysis.explore.answer import answer, slow_plane
from rpe3d.analysis.shown import distances, runs, shown
from rpe3d.config import ConfigError
from rpe3d.geometry import decay_bound, resolution

MODEL = {"pretrained": 512, "context": 8192, "head_dim": 32, "rope_theta": 10000}


def close(listed, tensor):
    """Equal to five digits, None where there is NaN."""
    assert [value is None for value in listed] == tensor.isnan().tolist()
    mine = torch.tensor([0.0 if value is None else value for value in listed], dtype=torch.float64)
    torch.testing.assert_close(mine, tensor.nan_to_num(), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", laws())
def test_every_number_is_the_library_s(name):
    found = answer({"law": name, **MODEL})
    law = make_law(name, **MODEL)
    last, plane = 8191, slow_plane(law)
    assert found["error"] is None
    distance = torch.tensor(found["distance"])
    assert (found["distance"][0], found["distance"][-1], len(distance)) == (0, last, 200)
    bound = decay_bound(law, last, last - distances(law, 3200)).tensor_split(40)
    for name, of in (("mean", torch.nanmean), ("low", torch.Tensor.min), ("high", torch.Tensor.max)):
        seen = [piece[~piece.isnan()] for piece in bound]
        close(found["bound"][name], torch.stack([of(p) if len(p) else torch.tensor(torch.nan) for p in seen]).double())
    close(found["resolution"][1:], resolution(law, last, last - distance[1:])[:, plane])
    assert found["runs"] == runs(law, 1024)
    assert found["cost"] == cost(law)._asdict()
    positions = torch.tensor(found["matrix"]["positions"])
    for i in (0, 17, 35):
        close(found["matrix"]["rows"][i], shown(law, positions[i], positions[: i + 1], plane))
    for path, angles in zip(found["sphere"]["distance"], found["sphere"]["angle"], strict=True):
        close(angles, law.relative_angles(last, last - torch.tensor(path))[:, plane])
    assert found["trained"] == pytest.approx(512 * law.model_frequencies()[plane].item(), rel=1e-4)


def test_the_line_of_positions_has_the_peaks_and_the_valleys_of_every_tooth():
    """Chunks of 32 in 200 buckets of 41: an even sample would miss them."""
    law = make_law("3d-rpe", **MODEL)
    found = answer({"law": "3d-rpe", **MODEL})["shown"]
    assert len(found) == 400
    f = law.relative_position(8191, 8191 - torch.arange(8192))
    assert max(found) == pytest.approx(f.max().item(), abs=3)
    for bucket in range(10, 200):
        around = f[bucket * 8192 // 200 : (bucket + 1) * 8192 // 200]
        low, high = sorted(found[2 * bucket : 2 * bucket + 2])
        assert around.min() - 3 <= low <= around.min() + 3
        assert around.max() - 3 <= high <= around.max() + 3


def test_text_and_numbers_ask_the_same():
    """An address has text, a grid numbers."""
    asked = {"law": "3d-rpe", **MODEL, "chunk": 64, "window": 128}
    assert answer({name: str(value) for name, value in asked.items()}) == answer(asked)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"window": 100}, {"window": 100}),
        ({"chunk": 64, "window": 128, "reach": 150}, {"chunk": 64, "window": 128, "reach": 150}),
        ({"context": 256}, {"context": 256}),
        ({"head_dim": 31}, {"head_dim": 31}),
        ({"chunk": "many"}, {"chunk": "many"}),
        ({"rope_theta": "1"}, {"rope_theta": 1}),
        ({"pretrained": "1"}, {"pretrained": 1}),
        ({"law": "rope-3d"}, {"name": "rope-3d"}),
    ],
)
def test_a_law_that_cannot_be_is_refused_in_the_library_s_words(given, made):
    with pytest.raises(ConfigError) as refusal:
        make_law(**({"name": "3d-rpe", **MODEL} | made))
    found = answer({"law": "3d-rpe", **MODEL} | given)
    assert found == {"error": {"problem": refusal.value.problem, "hint": refusal.value.hint}}


@pytest.mark.parametrize("given", [{"plane": 16}, {"plane": -1}, {"head_dim": 4096}])
def test_what_the_page_cannot_draw_is_refused_too(given):
    problem = answer({"law": "3d-rpe", **MODEL} | given)["error"]["problem"]
    assert next(iter(given)) in problem


@pytest.mark.parametrize("asked", [{"law": "rope"}, {"law": "rope", **MODEL, "colour": "red"}, {}])
def test_a_question_that_is_none_raises(asked):
    with pytest.raises(ConfigError):
        answer(asked)


def test_the_sentence_says_what_the_runs_say():
    rope, bounded, sinks = (answer({"law": name, **MODEL})["sentence"] for name in ("rope", "3d-rpe", "streaming-llm"))
    assert rope == "exact for the nearest 512 tokens; 94\u00a0% at angles never seen in training."
    assert bounded.startswith("exact for the nearest 192 tokens; 98\u00a0% of the distances compressed; no angle")
    assert "97\u00a0% not attended to" in sinks


def test_the_smallest_and_the_largest_model_have_answers_without_nan():
    for name in laws():
        for pretrained, context, head_dim in ((2, 2, 4), (2, 3, 4), (131072, 1048576, 256)):
            asked = {"law": name, "pretrained": pretrained, "context": context, "head_dim": head_dim}
            json.dumps(answer({**asked, "rope_theta": 1e6}), allow_nan=False)


def test_every_parameter_of_far_keys_can_be_set_and_copied():
    """One value, one meaning: a slider changes its own parameter alone."""
    given = {"reach": 300, "focus": 1.5, "fade": 0, "sinks": 2, "far": 8, "block": 4, "first": 16, "decay": 0.8}
    found = answer({"law": "3d-rpe", **MODEL, **given})
    law = make_law("3d-rpe", **MODEL, **given)
    assert found["parameters"] == {"chunk": law.chunk, "window": law.window, **given}
    assert "reach=300, focus=1.5, fade=0, sinks=2, far=8, block=4, first=16, decay=0.8)" in found["code"]
    told = "--reach 300 --set focus=1.5 --set fade=0 --set sinks=2 --set far=8 --set block=4 --set first=16 --set decay"
    assert told + "=0.8 --out" in found["command"]
    usual = make_law("3d-rpe", **MODEL)
    assert answer({"law": "3d-rpe", **MODEL, "reach": 300})["parameters"]["focus"] == usual.focus


def test_the_sentence_says_what_far_keys_weigh():
    """(log p / log R)^focus and (R / p)^fade at p = 8191, R = 256."""
    said = answer({"law": "3d-rpe", **MODEL, "focus": 1, "fade": 0.5})["sentence"]
    assert said.endswith("the last query sharpens far keys 1.62 times and keeps 18\u00a0% of their weight.")
    chosen = answer({"law": "3d-rpe", **MODEL, "far": 8, "block": 4})["sentence"]
    assert chosen.endswith("a query sees at most 32 far keys.")
