"""PoSE's positions are those of its paper (arXiv 2309.10400, section 3.2), written here a second time."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rpe3d.train.pose import skipped_positions


def runs_of(positions):
    """Starts and lengths of consecutive runs."""
    starts = [i for i, p in enumerate(positions) if i == 0 or p != positions[i - 1] + 1]
    return [(positions[i], j - i) for i, j in zip(starts, [*starts[1:], len(positions)], strict=True)]


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_chunks_are_moved_by_biases_that_never_fall(parts):
    """pos(chunk i) = u_i + st_i + [0, l_i), u_0 = 0, u_(i-1) <= u_i <= L_t - L_c."""
    length, context, draw = 64, 1000, random.Random(0)
    for _ in range(200):
        positions = skipped_positions(length, context, parts, draw)
        assert len(positions) == length
        assert positions[0] == 0
        assert positions[-1] < context
        biases = [p - i for i, p in enumerate(positions)]
        assert biases == sorted(biases)
        assert biases[-1] <= context - length
        assert len(runs_of(positions)) <= parts  # two neighbours may draw the same bias


def authors_positions(length, scaled_max, draw):
    """The published training script for two chunks, line by line: lt1 = 0, rt1, and then a bias for the second."""
    first = draw.randint(1, (length + 1) // 2)
    positions = list(range(length))
    low = 0
    high = draw.randint(low, scaled_max - length)
    return [p + (low if i < first else high) for i, p in enumerate(positions)]


def test_two_chunks_are_drawn_as_the_authors_draw_them():
    for seed in range(50):
        assert skipped_positions(31, 200, 2, random.Random(seed)) == authors_positions(31, 200, random.Random(seed))


def test_every_distance_of_the_context_is_met():
    """What PoSE is for: relative positions up to the context, from short windows."""
    draw = random.Random(0)
    farthest = Counter(skipped_positions(16, 64, 2, draw)[-1] for _ in range(4000))
    assert set(farthest) == set(range(15, 64))
    assert max(farthest.values()) < 2.5 * min(farthest.values())
