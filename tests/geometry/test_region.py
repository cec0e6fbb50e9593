"""The one description that attention executes: regions of pairs and their turns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpe3d.geometry import PairTurns, Phase, Region, Turn
from rpe3d.geometry.region import by_pair

POSITION = torch.arange(300)


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


@given(st.integers(1, 50), st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_a_turn_is_stock_where_it_says_so_in_chunks_of_any_size(chunk, positions):
    """x(p) = (p mod c) + c (p div c) is p itself; a region then has it as `Turn()`, which code compares with."""
    turn, p = Turn(chunk=chunk, offset=1.0, stride=float(chunk)), torch.tensor(positions)
    assert torch.equal(turn.position(p), p.double())
    assert turn.is_stock
    assert Region(query=turn, key=turn) == Region()


@pytest.mark.parametrize(
    "change",
    [{"offset": 0.5}, {"stride": 3.0}, {"start": 1.0}, {"ceiling": 2.0}, {"phase": Phase(base=10.0, sign=1)}],
)
def test_a_turn_that_moves_anything_is_not_stock(change):
    turn = Turn(**{"chunk": 4, "offset": 1.0, "stride": 4.0} | change)
    assert not turn.is_stock
    assert Region(query=turn).query is turn
    theta = torch.ones(1, dtype=torch.float64)
    assert turn.angle(POSITION, theta, stock=True).abs().max() > 0


def test_planes_that_turn_differently_are_stock_where_all_are():
    assert PairTurns(groups=((4, Turn()), (4, Turn(chunk=2, offset=1.0, stride=2.0)))).is_stock
    assert not PairTurns(groups=((4, Turn()), (4, Turn(chunk=2)))).is_stock
