"""The decay figure: its numbers are those of geometry, and they say what errata.md says."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from rpe3d import laws, make_law
from rpe3d.analysis import Row, decay_table, draw_decay, figure_table
from rpe3d.geometry import decay_bound


def example(name, pretrained=512, context=4096, **parameters):
    return make_law(name, pretrained=pretrained, context=context, head_dim=32, **parameters)


@pytest.fixture(scope="module")
def table():
    return figure_table(example(name) for name in laws())


def curve(table, setting, law):
    return [row for row in table if (row.setting, row.law) == (setting, law)]


@pytest.mark.parametrize("name", laws())
def test_every_row_is_the_last_query_and_the_key_at_that_distance(name):
    law = example(name, context=1000)
    rows = decay_table("model", [law], points=100)
    assert [row.distance for row in rows] == [*range(0, 1000, 10), 999]
    for row in rows:
        assert row[:6] == ("model", 512, 1000, 32, 10000.0, name)
        expected = [decay_bound(law, 999, 999 - row.distance).item(), math.nan]
        if law.single_position:
            expected[1] = law.relative_position(999, 999 - row.distance).item()
        shown = [math.nan if number is None else number for number in (row.bound, row.relative_position)]
        assert shown == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_a_short_context_is_shown_at_every_distance():
    rows = decay_table("model", [example("rope", pretrained=16, context=20)], points=2048)
    assert [row.distance for row in rows] == list(range(20))
    assert [row.relative_position for row in rows] == list(range(20))


def test_a_pair_that_is_not_attended_to_has_no_numbers():
    """streaming-llm sees its window and its sinks, nothing between; a CSV shows an empty cell, not nan."""
    law = example("streaming-llm")
    rows = decay_table("model", [law])
    unseen = [row for row in rows if law.window <= row.distance < law.context - law.sinks]
    assert unseen
    assert all(row.bound is None and row.relative_position is None for row in unseen)
    assert not any(isinstance(cell, float) and math.isnan(cell) for row in rows for cell in row)


def test_the_bound_of_3d_rpe_does_not_stay_at_or_above_5(table):
    """DESIGN 2.3 against section 3.2.1: with c = 1000 it falls to 3.92 at distance 913, and again in every chunk."""
    rows = curve(table, "paper", "3d-rpe-definition")
    bound = {row.distance: row.bound for row in rows}
    assert sorted(bound) == list(range(8000))
    assert bound[913] == pytest.approx(3.92, abs=1e-2)
    assert min(bound.values()) == pytest.approx(bound[913], abs=1e-9)
    assert all(bound[913 + 1000 * chunk] == pytest.approx(bound[913], abs=1e-9) for chunk in range(8))


def test_the_bound_of_rope_exceeds_5_at_many_distances_beyond_1000(table):
    """DESIGN 2.3 against section 3.2.1, by RoFormer's section 3.4.3 written out in real arithmetic."""
    distance = torch.arange(8000, dtype=torch.float64)[:, None]
    angle = distance * 10000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    expected = torch.hypot(angle.cos().cumsum(1), angle.sin().cumsum(1)).mean(1)
    bound = torch.tensor([row.bound for row in curve(table, "paper", "rope")], dtype=torch.float64)
    torch.testing.assert_close(bound, expected, rtol=1e-9, atol=1e-9)
    assert (bound[1001:] > 5).sum() > 2000


def test_the_figure_has_the_laws_with_a_relative_position(table):
    shown = {row.law for row in table if row.setting == "model"}
    assert shown == {"rope", "linear", "3d-rpe", "dca", "self-extend", "rerope", "leaky-rerope"}
    assert all(row.relative_position is not None for row in table if row.setting == "model")


def test_only_rope_is_shown_a_position_that_the_model_has_not_seen(table):
    beyond = {row.law for row in table if row.setting == "model" and row.relative_position >= row.pretrained}
    assert beyond == {"rope"}


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_same_table_gives_the_same_picture(table, tmp_path, suffix, start):
    for name in "ab":
        draw_decay(table, tmp_path / f"{name}.{suffix}")
    first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in "ab")
    assert first == second
    assert first.startswith(start)
    assert len(first) > 50_000


def test_drawing_shows_the_numbers_of_the_table_and_no_others(table, tmp_path):
    """A table with another bound at 913 gives another picture: nothing is computed again."""
    changed = [row._replace(bound=2.0) if row.setting == "paper" and row.distance == 913 else row for row in table]
    draw_decay(table, tmp_path / "table.svg")
    draw_decay(changed, tmp_path / "changed.svg")
    assert (tmp_path / "table.svg").read_bytes() != (tmp_path / "changed.svg").read_bytes()


def test_drawing_leaves_no_global_state(table, tmp_path):
    before = "matplotlib.pyplot" in sys.modules
    draw_decay(table, tmp_path / "figure.png")
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_a_row_is_plain_data(table):
    assert all(isinstance(cell, (str, int, float, type(None))) for row in table[::100] for cell in row)
    assert Row._fields[-3:] == ("distance", "relative_position", "bound")
