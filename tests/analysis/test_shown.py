"""What a law shows, and whether the model has met it."""

from __future__ import annotations

import math

import pytest
import torch

from rpe3d import laws, make_law
from rpe3d.analysis import ours
from rpe3d.analysis.shown import KINDS, distances, kinds, runs, shown

MODEL = {"pretrained": 512, "context": 4096, "head_dim": 32}


def example(name, **given):
    return make_law(name, **(MODEL | given))


@pytest.mark.parametrize("name", laws())
def test_what_is_shown_is_the_law_s_own_angle_in_every_plane(name):
    """Phases aside: the forms that have one differ from their angles by one number for all planes."""
    law = example(name)
    query, key = torch.tensor([4095, 4095, 4095, 700, 64]), torch.tensor([4095, 4000, 3, 20, 0])
    angles = law.relative_angles(query, key)
    theta = law.model_frequencies()
    mine = torch.stack([shown(law, query, key, plane) * theta[plane] for plane in range(16)], dim=-1)
    phase = angles - mine
    torch.testing.assert_close(phase, phase[:, :1].expand_as(phase), rtol=0, atol=1e-9, equal_nan=True)
    if "phi_base" not in law.parameters():
        torch.testing.assert_close(phase.nan_to_num(), torch.zeros_like(phase), rtol=0, atol=1e-9)
    if law.single_position:
        expected = law.relative_position(query, key)
        torch.testing.assert_close(shown(law, query, key), expected, rtol=0, atol=1e-9, equal_nan=True)


def naive_kind(law, query, key):
    """The definition of the four kinds, plane by plane in plain Python."""
    angles, theta = law.relative_angles(query, key).tolist(), law.model_frequencies().tolist()
    if any(math.isnan(angle) for angle in angles):
        return "not attended"
    for angle, slow in zip(angles, theta, strict=True):
        turned = angle % math.tau
        if turned >= slow * law.pretrained and math.tau - turned > 1e-9:
            return "unseen"
    exact = all(abs(angle - (query - key) * slow) < 1e-6 for angle, slow in zip(angles, theta, strict=True))
    return "exact" if exact else "compressed"


@pytest.mark.parametrize("name", laws())
def test_kinds_are_their_definition(name):
    law = example(name)
    last = law.context - 1
    places = [0, 1, 63, 64, 127, 300, 511, 512, 900, 1800, 3500, last]
    found = kinds(law, last, last - torch.tensor(places))
    assert [KINDS[kind] for kind in found.tolist()] == [naive_kind(law, last, last - at) for at in places]


@pytest.mark.parametrize("name", laws())
def test_runs_say_of_every_distance_what_kinds_say(name):
    """Changes are found to the token, though only one distance in eight is looked at."""
    law = example(name)
    last = law.context - 1
    found = runs(law, points=512)
    every = [run.kind for run in found for _ in range(run.first, run.last + 1)]
    assert every == [KINDS[kind] for kind in kinds(law, last, last - torch.arange(law.context)).tolist()]


def test_the_regions_of_the_laws_on_a_model_of_8k():
    """Golden: RoPE is exact up to 8192 and unseen beyond; 3D-RPE exact up to w + c = 3072."""
    table = ours.regions()

    def of(law):
        return [tuple(row[2:]) for row in table.where(law=law).rows]

    assert of("rope") == [("exact", 0, 8191), ("unseen", 8192, 65535)]
    assert of("3d-rpe") == [("exact", 0, 3071), ("compressed", 3072, 65535)]
    assert of("linear") == [("exact", 0, 0), ("compressed", 1, 65535)]
    assert of("streaming-llm") == [("exact", 0, 4091), ("not attended", 4092, 65531), ("compressed", 65532, 65535)]
    assert "unseen" in {kind for kind, *_ in of("3d-rpe-definition")}
    assert {kind for kind, *_ in of("yarn")} == {"exact", "compressed"}


def test_the_positions_of_the_laws_on_a_model_of_8k():
    """Golden, for the last query and the key 65535 tokens back: the formulas of each law by hand."""
    table = ours.positions()
    far = {row[0]: row[3:] for row in table.where(distance=65535).rows}
    slope = (4096 - 512 - 2560) / (65536 - 2560)
    assert far["rope"] == (65535, 65535)
    assert far["linear"] == pytest.approx((65535 / 8,) * 2)
    assert far["3d-rpe"] == pytest.approx((511 + 512 * (slope * 127 + (1 - slope) * 5),) * 2)
    assert far["rerope"] == (1024, 1024)
    assert far["dca"] == (6144, 6144)
    assert far["yarn"] == pytest.approx((65535, 65535 / 8))
    assert far["streaming-llm"] == (4095, 4095)
    assert [row[3] for row in table.where(law="streaming-llm").rows].count(None) > 900


def test_distances_are_all_of_a_short_context_and_both_ends_of_a_long_one():
    assert distances(example("rope", pretrained=16, context=20), 64).tolist() == list(range(20))
    some = distances(example("rope"), 100).tolist()
    assert (some[0], some[-1], len(set(some))) == (0, 4095, 100)
