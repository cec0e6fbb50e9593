"""What every law promises, and the questions that it answers about itself."""

from __future__ import annotations

import copy
import json
import math
import pickle
from importlib import import_module

import pytest
import torch

from law_oracles import LLAMA_3, P, assert_same_table, their_table
from rpe3d import laws, make_law
from rpe3d.geometry import LAWS, Region
from rpe3d.geometry.frequencies import model_frequencies

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


@pytest.mark.parametrize("name", [n for n in laws() if n not in ("ntk", "dynamic", "yarn", "longrope", "cope")])
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
    """A law written to a file is the same law when it is read."""
    law = example(name)
    assert make_law(**json.loads(json.dumps(law.to_dict()))) == law
    assert hash(make_law(**law.to_dict())) == hash(law)


@pytest.mark.parametrize("name", laws())
def test_a_law_describes_itself(name):
    info = laws()[name]
    assert info.description
    later = {"3d-rpe": {"far", "block", "first", "decay", "full"}, "dca": {"attention_factor", "growth"}}.get(
        name, set()
    )
    assert set(info.parameters) - set(example(name).to_dict()) == later
    assert all(info.parameters.values())


def test_a_scaled_models_law_survives_json():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    law = example("3d-rpe", rope_scaling=scaling, rotary_dim=8, interleaved=True)
    assert make_law(**json.loads(json.dumps(law.to_dict()))) == law


@pytest.mark.parametrize("name", ["rope", "3d-rpe", "3d-rpe-definition", "3d-rpe-dual-chunk", "dca", "rerope"])
def test_a_chunk_law_keeps_the_frequencies_underneath_it(name):
    scaling = {"rope_type": "llama3", **LLAMA_3}
    law = make_law(name, pretrained=131072, context=262144, head_dim=128, rope_theta=5e5, rope_scaling=scaling)
    assert torch.equal(law.frequencies(), model_frequencies(law.rotary))
    theirs, _ = their_table("llama3", 128, 5e5, 1.0, positions=131072, **LLAMA_3)
    assert_same_table(law.frequencies(), theirs, 128, 5e5, 1.0)


@pytest.mark.parametrize(("name", "near"), [("string", "shift"), ("dpe", "window")])
def test_inputs_within_the_exact_part_cannot_tell_it_from_rope(name, near):
    law = make_law(name, pretrained=64, context=100, head_dim=16, **{"scales": (2, 5)} if name == "dpe" else {})
    length = getattr(law, near)
    rope = make_law("rope", pretrained=64, context=100, head_dim=16)
    key = P[:length]
    assert torch.equal(law.relative_angles(length - 1, key), rope.relative_angles(length - 1, key))
    assert not torch.equal(law.relative_angles(2 * length, P), rope.relative_angles(2 * length, P))


@pytest.mark.parametrize(
    "name", ["3d-rpe", "dca", "self-extend", "rerope", "leaky-rerope", "streaming-llm", "string", "linear"]
)
@pytest.mark.parametrize("context", [8192, 12000, 65536, 1_000_000])
def test_by_default_no_law_shows_a_position_the_model_has_not_seen(name, context):
    if name == "string":
        context = min(context, 2 * 8192 - 128)
    law = make_law(name, pretrained=8192, context=context, head_dim=64)
    last = context - 1
    key = torch.cat([torch.arange(0, context, 997), torch.arange(20), torch.arange(context - 9000, context)])
    f = law.relative_position(last, key.clamp(0, last))
    seen = f[~f.isnan()]
    assert seen.min() >= 0
    assert seen.max() < 8192


def small(name="3d-rpe", **parameters):
    return make_law(name, pretrained=64, context=512, head_dim=32, **parameters)


def test_plain_rope_ends_where_the_law_says():
    """w + c for 3D-RPE; a window for those that have one; nowhere for those that only scale."""
    assert small(chunk=4, window=20).exact_up_to == 24
    assert small("dca").exact_up_to == small("dca").chunk
    assert small("rerope", window=10).exact_up_to == 10
    assert small("streaming-llm", window=10, sinks=4).exact_up_to == 10
    assert small("streaming-llm", window=10, sinks=0).exact_up_to == 10
    assert small("yarn").exact_up_to == math.inf


def test_where_a_law_is_exact_no_pair_is_turned():
    for name in ("3d-rpe", "dca", "3d-rpe-dual-chunk", "self-extend", "string", "dpe", "streaming-llm"):
        made = small(name)
        p = torch.arange(int(made.exact_up_to))
        angles = made.relative_angles(p[:, None], p[None, :])
        true = (p[:, None] - p[None, :])[..., None] * made.frequencies()
        causal = p[:, None] >= p[None, :]
        torch.testing.assert_close(angles[causal], true[causal])


def test_one_turn_for_all_pairs_needs_no_attention():
    assert small("3d-rpe-definition").single_turn == small("3d-rpe-definition").regions[0].key
    assert small("yarn").single_turn is not None
    assert small().single_turn is None
    assert small("streaming-llm", sinks=0).single_turn is None


def test_a_chunk_law_has_a_chunk_and_others_none():
    assert small("3d-rpe", chunk=4, window=20).chunk_in_use == 4
    assert small("3d-rpe-definition", interpolate=True, chunk=8).chunk_in_use == 64  # 8 chunks, now for 512 tokens
    assert {name for name in laws() if example(name).chunk_in_use is None} == {
        "rope", "linear", "ntk", "dynamic", "yarn", "longrope", "cope", "logn", "self-extend", "rerope", "leaky-rerope",
        "streaming-llm", "string", "dpe", "lampe",
    }  # fmt: skip


@pytest.mark.parametrize("name", laws())
def test_a_law_that_keeps_frequencies_and_scaling_has_the_model_s(name):
    law, rope = example(name), example("rope")
    assert law.keeps_frequencies == torch.equal(law.frequencies(), rope.frequencies())
    assert law.keeps_scaling == (name not in ("yarn", "longrope", "lampe"))
    if "attention_factor" in law.parameters():
        changed = make_law(name, pretrained=64, context=300, head_dim=16, attention_factor=1.25)
        assert not changed.keeps_scaling


def test_rope_alone_is_the_stock_model():
    assert [name for name in laws() if example(name).is_stock] == ["rope"]


def test_dynamic_ntk_and_longrope_alone_grow():
    assert [name for name, law in LAWS.items() if law.grows] == ["dynamic", "longrope"]


def test_a_law_s_own_parameters_are_ready_for_json_and_make_it_again():
    law = example("dpe")
    assert law.own == {"window": 8, "scales": [2, 16, 1, 11]}
    assert make_law("dpe", pretrained=64, context=300, head_dim=16, **json.loads(json.dumps(law.own))) == law
    assert example("rope").own == {}


def test_what_came_later_is_named_in_files_only_where_it_is_not_the_default():
    """So that files and configs of a law are those from before, and are still read."""
    model = {"pretrained": 256, "context": 1024, "head_dim": 16}
    assert set(make_law("3d-rpe", **model).own) == {"chunk", "window", "reach", "focus", "fade", "sinks"}
    assert set(make_law("dca", **model).own) == {"chunk", "window"}
    assert make_law("dca", **model, attention_factor=1.5).own["attention_factor"] == 1.5
    choosing = make_law("3d-rpe", **model, far=4)
    assert [choosing.own[name] for name in ("far", "block", "first")] == [4, 16, 128]
    assert make_law(**choosing.to_dict()) == choosing


def test_laws_are_listed_in_the_order_of_their_kinds():
    assert list(laws()) == [
        "rope", "linear", "ntk", "dynamic", "yarn", "longrope", "cope", "logn", "3d-rpe", "3d-rpe-definition",
        "3d-rpe-dual-chunk", "dca", "self-extend", "rerope", "leaky-rerope", "streaming-llm", "string", "dpe", "lampe",
    ]  # fmt: skip


def test_a_law_needs_its_own_file_and_nothing_else(tmp_path, monkeypatch):
    """A file in the folder of laws is found, after those that have a place in the list."""
    package = import_module("rpe3d.geometry.laws")  # `from rpe3d.geometry import laws` is the function
    (tmp_path / "halved.py").write_text(
        "from dataclasses import dataclass\nfrom rpe3d.geometry.laws.rope import Rope\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Halved(Rope):\n    name = 'halved'\n    summary = 'half'\n"
    )
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    found = package.found()
    assert list(found) == [*LAWS, "halved"]
    assert found["halved"].summary == "half"


def test_what_a_law_keeps_stays_with_it_and_does_not_travel():
    """Numbers on a device are made once for a law; a copy, a pickle and an equal law make their own."""
    law, made = example("3d-rpe"), []
    for _ in range(2):
        assert law.kept("numbers", lambda: made.append(1) or len(made)) == 1
    for other in (copy.deepcopy(law), pickle.loads(pickle.dumps(law)), example("3d-rpe")):
        assert other == law
        assert hash(other) == hash(law)
        assert other.kept("numbers", lambda: "its own") == "its own"
    assert law.kept("numbers", lambda: None) == 1
