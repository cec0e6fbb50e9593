"""The one description that attention executes: regions of pairs and their turns."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpe3d import laws, make_law
from rpe3d.geometry import PairTurns, Phase, Region, Turn
from rpe3d.geometry.region import by_pair

POSITION = torch.arange(300)
OWN = {"string": {"context": 124}, "dpe": {"scales": (2, 16, 1, 11)}}


def example(name, **parameters):
    return make_law(name, **{"pretrained": 64, "context": 300, "head_dim": 16} | OWN.get(name, {}) | parameters)


@pytest.mark.parametrize("name", laws())
def test_regions_do_not_overlap_and_cover_every_causal_pair(name):
    """streaming-llm alone leaves pairs out, those between its sinks and its window."""
    law = example(name)
    query, key = torch.broadcast_tensors(POSITION[:, None], POSITION[None, :])
    times = torch.stack([region.contains(query, key) for region in law.regions]).sum(0)
    causal = times[key <= query]
    assert causal.max() == 1
    if name == "streaming-llm":
        distance = query - key
        seen = (distance >= 0) & ((distance < law.window) | (key < law.sinks))
        assert torch.equal(times[key <= query] == 1, seen[key <= query])
        assert causal.min() == 0
    else:
        assert causal.min() == 1


@pytest.mark.parametrize("name", laws())
def test_a_law_needs_its_own_attention_if_it_has_more_than_frequencies(name):
    law = example(name)
    assert law.needs_attention == (law.regions != (Region(),))


@pytest.mark.parametrize("name", laws())
def test_relative_angles_are_the_turn_of_the_query_less_that_of_the_key(name):
    law = example(name)
    theta = law.frequencies()
    query, key = torch.broadcast_tensors(POSITION[:, None], POSITION[None, :])
    expected = torch.full((*query.shape, len(theta)), torch.nan, dtype=torch.float64)
    for region in law.regions:
        angles = region.query.angle(query, theta) - region.key.angle(key, theta)
        expected = torch.where(region.contains(query, key)[..., None], angles, expected)
    torch.testing.assert_close(law.relative_angles(query, key), expected, rtol=0, atol=1e-11, equal_nan=True)


@pytest.mark.parametrize("name", [n for n in laws() if n not in ("ntk", "dynamic", "yarn")])
def test_a_law_with_a_relative_position_turns_every_plane_by_it(name):
    law = example(name)
    if not law.single_position:
        with pytest.raises(ValueError, match="no single relative position"):
            law.relative_position(5, 3)
        return
    query, key = torch.broadcast_tensors(POSITION[:, None], POSITION[None, :])
    f = law.relative_position(query, key)
    assert f.dtype == torch.float64
    torch.testing.assert_close(
        law.relative_angles(query, key),
        f[..., None] * law.model_frequencies(),
        rtol=0,
        atol=1e-11,
        equal_nan=True,
    )


@pytest.mark.parametrize("name", laws())
def test_a_law_survives_json(name):
    """DESIGN section 4: config has a JSON round trip."""
    law = example(name)
    assert make_law(**json.loads(json.dumps(law.to_dict()))) == law
    assert hash(make_law(**law.to_dict())) == hash(law)


@pytest.mark.parametrize("name", laws())
def test_a_law_describes_itself(name):
    info = laws()[name]
    assert info.description
    assert set(info.parameters) <= set(example(name).to_dict())
    assert all(info.parameters.values())


def test_a_scaled_models_law_survives_json():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    law = example("3d-rpe", rope_scaling=scaling, rotary_dim=8, interleaved=True)
    assert make_law(**json.loads(json.dumps(law.to_dict()))) == law


@given(st.integers(0, 2**31 - 1))
def test_the_stock_turn_is_the_position_itself(p):
    assert Turn().position(torch.tensor(p)).item() == p


def test_a_turn_is_its_formula():
    turn = Turn(
        chunk=4,
        offset=2.0,
        stride=3.0,
        start=0.5,
        ceiling=5.0,
        phase=Phase(base=10.0, sign=-1, constant=1.0),
    )
    p = torch.tensor([0, 3, 4, 7, 100])
    assert turn.position(p).tolist() == [0.5, 5.5, 3.5, 8.5, 75.5]
    angles = turn.angle(p, torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert angles[2].tolist() == [3.5 + 1 - 0.1, 1.75 + 1 - 0.1]


def test_planes_that_turn_differently_are_turned_one_group_after_the_other():
    turns = Turn(chunk=4, start=1.0), Turn(stride=0.5), Turn()
    together = PairTurns(groups=tuple(zip((1, 3, 2), turns, strict=True)))
    theta = torch.linspace(1, 0.01, 6, dtype=torch.float64)
    for stock in (False, True):
        groups = zip(turns, theta.split([1, 3, 2]), strict=True)
        alone = [turn.angle(POSITION, part, stock=stock) for turn, part in groups]
        assert torch.equal(together.angle(POSITION, theta, stock=stock), torch.cat(alone, -1))


def test_planes_that_turn_differently_have_no_position_in_common():
    """No code that knows plain turns alone can take one for stock RoPE, or for chunks that turn as a whole."""
    turn = PairTurns(groups=((4, Turn()), (4, Turn(chunk=2))))
    assert turn.chunk == 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        turn.position(POSITION)


def test_groups_that_turn_alike_are_joined():
    one, two = Turn(chunk=2), Turn(chunk=3)
    assert by_pair([(3, one), (5, one)]) == one
    assert by_pair([(3, one), (1, one), (2, two), (2, one)]) == PairTurns(groups=((4, one), (2, two), (2, one)))
    assert len({by_pair([(1, one), (1, two)]), by_pair([(1, one), (1, two)]), by_pair([(1, two), (1, one)])}) == 2


def test_a_region_is_a_band_of_chunk_distances():
    query, key = torch.tensor([9, 9, 9, 9]), torch.tensor([9, 7, 3, 0])
    assert Region(unit=4, first=1, last=1).contains(query, key).tolist() == [False, True, False, False]
    assert Region(unit=4, first=1, keys=3).contains(query, key).tolist() == [False, False, False, True]
