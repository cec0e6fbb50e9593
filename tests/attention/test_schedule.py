"""The schedule of library calls covers every visible pair exactly once, in the region that it belongs to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpe3d import laws, make_law
from rpe3d.attention.blocked.schedule import schedule, skipping
from rpe3d.attention.problem import placed
from rpe3d.geometry import Region
from rpe3d.train.pose import skipped_positions


def alone(call):
    """Every repetition and every piece of a call."""
    for piece in call.pieces:
        yield replace(call, pieces=(), **piece._asdict())
    for n in range(0 if call.pieces else call.times):
        yield moved(call, n)


def moved(call, n):
    """The n-th repetition of a call."""
    return replace(call, query=call.query + n * call.step, key=call.key + n * call.step, times=1, step=0)


def covered(blocks, queries, keys):
    """How often each pair (query, key) is computed, and in which region."""
    times = torch.zeros(queries.stop, keys.stop, dtype=torch.long)
    region = torch.full_like(times, -1)
    rows_seen = []
    for block in blocks:
        rows_seen += block.rows
        for call in block.calls:
            for one in alone(call):
                row, column = torch.arange(one.rows)[:, None], torch.arange(one.columns)[None, :]
                shown = {"full": row == row, "causal": column <= row, "upper": column >= row}[one.shape]
                shown = shown.expand(one.rows, one.columns)
                assert one.query >= block.rows.start
                assert one.query + one.rows <= block.rows.stop
                assert one.key >= 0
                assert one.key + one.columns <= keys.stop
                square = (slice(one.query, one.query + one.rows), slice(one.key, one.key + one.columns))
                times[square] += shown
                region[square][shown] = one.region
    assert rows_seen == list(queries)
    return times, region


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(laws())),
    st.integers(1, 170),
    st.integers(0, 169),
    st.sampled_from([1, 7, 32, 1000]),
    st.integers(8, 40),
    st.sampled_from([0, 6, 12, 15, 24]),
    st.integers(0, 3),
)
def test_every_visible_pair_is_in_exactly_one_call(name, length, start, rows, pretrained, window, sinks):
    """Any law, any part of the queries against all keys so far, any block size."""
    start = min(start, length - 1)
    mine = {"chunk": 3, "window": window, "reach": window + 3, "focus": 0, "fade": 0.5, "sinks": sinks}
    chunks = {"3d-rpe": mine} if 0 < window <= pretrained - 3 else {}
    context = pretrained if name == "string" else 200
    law = make_law(name, pretrained=pretrained, context=context, head_dim=4, **chunks.get(name, {}))
    queries, keys = range(start, length), range(length)
    times, region = covered(schedule(law.regions, queries, keys, rows), queries, keys)
    p = torch.arange(length)
    query, key = torch.broadcast_tensors(p[:, None], p[None, :])
    expected = torch.full_like(region, -1)
    for i, r in enumerate(law.regions):
        expected[r.contains(query, key) & (key <= query)] = i
    expected[:start] = -1
    assert torch.equal(times, (expected >= 0).long())
    assert torch.equal(region, expected)


@settings(max_examples=150, deadline=None)
@given(
    st.sets(st.integers(1, 180), min_size=1, max_size=3),
    st.integers(1, 170),
    st.integers(0, 169),
    st.sampled_from([1, 7, 32, 1000]),
)
def test_bands_of_distances_may_have_two_ends(cuts, length, start, rows):
    """As the middle of LaMPE has, between its head and its tail."""
    firsts, lasts = [None, *sorted(cuts)], [*(cut - 1 for cut in sorted(cuts)), None]
    regions = tuple(Region(first=first, last=last) for first, last in zip(firsts, lasts, strict=True))
    queries, keys = range(min(start, length - 1), length), range(length)
    times, region = covered(schedule(regions, queries, keys, rows), queries, keys)
    p = torch.arange(length)
    expected = torch.bucketize(p[:, None] - p, torch.tensor(sorted(cuts)), right=True)
    expected[(p[:, None] < p) | (p < queries.start)[:, None]] = -1
    assert torch.equal(times, (expected >= 0).long())
    assert torch.equal(region, expected)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["3d-rpe", "dca", "3d-rpe-dual-chunk", "3d-rpe-definition"]),
    st.integers(6, 90),
    st.integers(2, 6),
    st.integers(0, 2),
    st.randoms(),
)
def test_every_visible_pair_of_skipped_positions_is_in_exactly_one_call(name, length, parts, sinks, draw):
    mine = {"chunk": 3, "window": 9, "reach": 16, "focus": 0, "fade": 0.5, "sinks": sinks} if name == "3d-rpe" else {}
    law = make_law(name, pretrained=24, context=400, head_dim=4, **mine)
    p = torch.tensor([skipped_positions(length, 400, parts, draw) for _ in range(2)])
    sequences = placed(p, None).places or ((range(length),),) * 2
    assert [[q for run in places for q in run] for places in sequences] == p.tolist()
    times, region = covered(skipping(law.regions, sequences), range(2 * length), range(2 * length))
    query, key = torch.broadcast_tensors(p.flatten()[:, None], p.flatten()[None, :])
    expected = torch.full_like(region, -1)
    for i, r in enumerate(law.regions):
        expected[r.contains(query, key) & (key <= query)] = i
    expected[:length, length:] = expected[length:, :length] = -1  # another sequence
    assert torch.equal(times, (expected >= 0).long())
    assert torch.equal(region, expected)


def test_windows_of_two_parts_are_two_calls():
    """Of PoSE: each part sees itself, and the second the first."""
    law = make_law("3d-rpe", pretrained=8192, context=100_000, head_dim=64)
    (block,) = skipping(law.regions, ((range(700), range(50_000, 51_348)), (range(2000), range(30_000, 30_048))))
    assert [(call.region, call.shape, call.rows, call.columns) for call in block.calls] == [
        (0, "causal", 4096, 4096),
        (1, "full", 4096, 4096),
    ]
    own, far = block.calls
    assert own.pieces == ((0, 700, 0, 700), (700, 1348, 700, 1348), (2048, 2000, 2048, 2000), (4048, 48, 4048, 48))
    assert far.pieces == ((700, 1348, 0, 700), (4048, 48, 2048, 2000))


@pytest.mark.parametrize(("chunk", "calls"), [(512, 5), (1024, 4)])
def test_a_block_of_bounded_attention_is_a_handful_of_calls(chunk, calls):
    """2048 rows: own chunks, near chunks, what is far for all, and log2 squares of the staircase."""
    law = make_law("3d-rpe", pretrained=8192, context=131072, head_dim=128, chunk=chunk, window=5 * chunk // 2 * 2)
    blocks = list(schedule(law.regions, range(131072), range(131072), 2048))
    assert max(len(block.calls) for block in blocks) == calls


@pytest.mark.parametrize(("sinks", "calls"), [(0, 4), (1, 6)])
def test_a_long_staircase_is_two_triangles(sinks, calls):
    """A small model's 32k tokens are one block beside the head: two near calls, two triangles, and two for sinks."""
    law = make_law("3d-rpe", pretrained=8192, context=32768, head_dim=64, sinks=sinks)
    head, block = schedule(law.regions, range(32768), range(32768), 58254)
    assert [call.shape for call in head.calls] == ["causal"]
    assert len(block.calls) == calls
    assert {call.shape for call in block.calls if law.regions[call.region].fade} >= {"causal", "upper"}
