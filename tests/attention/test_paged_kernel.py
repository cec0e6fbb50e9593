"""The decoding step over pages, held to the 2x rule on the same keys in one piece."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rpe3d import ConfigError, make_law
from rpe3d.attention import reference
from rpe3d.testing import assert_as_good, in_float64, random_problem, small_law

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("poisoned")

LAWS = ("rope", "3d-rpe", "3d-rpe-definition", "3d-rpe-dual-chunk", "dca", "streaming-llm")


def law_for(name, **changes):
    return small_law(name, **{"context": 1024, "head_dim": 32} | changes)


def paged(k, v, lengths, page):
    """Keys [b, g, s, d] in shuffled pages [n, page, g, d] with NaN wherever no key is, and the page numbers."""
    (b, g, _, d), each = k.shape, -(-k.shape[2] // page)
    places = torch.randperm(b * each + 3, generator=torch.Generator().manual_seed(0)).to(k.device)
    table = places[: b * each].view(b, each).int()
    caches = [torch.full((b * each + 3, page, g, d), torch.nan, dtype=k.dtype, device=k.device) for _ in range(2)]
    for row, length in enumerate(lengths):
        for cache, x in zip(caches, (k, v), strict=True):
            for p in range(length):
                cache[table[row, p // page], p % page] = x[row, :, p]
    table = torch.where(
        torch.arange(each, device=k.device) * page < torch.tensor(lengths, device=k.device)[:, None], table, -1
    )
    return *caches, table


def run(law, device, *, lengths, t=1, page=16, splits=None, **options):
    """Return every sequence as a problem of its own, and what the kernel gives for it over pages."""
    from rpe3d.attention.decode import paged as paged_kernel

    options = {"scale": 0.2} | options
    whole = random_problem(law, device, b=len(lengths), t=t, s=max(lengths), **options)
    keys, values, table = paged(whole.k, whole.v, lengths, page)
    seen = torch.tensor(lengths, dtype=torch.int32, device=device)
    split = {} if splits is None else {"splits": splits, "least_tiles": 1}
    given = {"scale": whole.scale, "softcap": whole.softcap, "sinks": whole.sinks}
    out, lse = paged_kernel.attend(whole.q, keys, values, law, pages=table, lengths=seen, **given, **split)
    for i, n in enumerate(lengths):
        one = slice(i, i + 1)
        q, k, v = whole.q[one], whole.k[one, :, :n], whole.v[one, :, :n]
        yield replace(whole, q=q, k=k, v=v, queries=range(n - t, n), keys=range(n)), out[one], lse[one]


def assert_all_as_good(results):
    for x, out, lse in results:
        assert_as_good(x, out, lse)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", LAWS)
def test_every_law_over_pages_is_the_reference(name, splits, device):
    assert_all_as_good(run(law_for(name), device, lengths=[151, 7, 64], splits=splits))


@pytest.mark.parametrize("page", [1, 16, 48])
def test_pages_of_any_size(page, device):
    assert_all_as_good(run(law_for("3d-rpe"), device, lengths=[130, 97], page=page))


def test_several_queries_softcap_sinks_and_interleaved_pairs(device):
    law = law_for("3d-rpe", interleaved=True, rotary_dim=16)
    sinks = torch.randn(6)
    assert_all_as_good(run(law, device, lengths=[151, 80], t=3, softcap=5.0, sinks=sinks, splits=2))


def test_half_precision_is_as_good_as_its_rounding(device):
    for x, *found in run(law_for("dca", head_dim=64), device, lengths=[151, 33], dtype=torch.float16):
        assert_as_good(x, *found)
        for ours, truth in zip(found, reference.attend(in_float64(x)), strict=True):
            torch.testing.assert_close(ours.double(), truth, rtol=0, atol=5e-3)


def test_a_row_that_is_not_in_use_is_zeros(device):
    from rpe3d.attention.decode import paged as paged_kernel

    q, cache = torch.randn(2, 4, 1, 32, device=device), torch.randn(4, 16, 2, 32, device=device)
    table, lengths = torch.zeros(2, 4, dtype=torch.int32, device=device), torch.tensor([0, 5], device=device)
    out, lse = paged_kernel.attend(q, cache, cache, law_for("3d-rpe"), pages=table, lengths=lengths.int(), scale=1.0)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    assert (out[1] != 0).all()


# 3D-RPE of `law_for` has chunks of 16 and a window of 32: plain RoPE up to 48 tokens.
MIXED = [0, 1, 16, 17, 47, 48, 49, 64, 0, 151, 700]


def steps(law, device, *, sequences=16, **options):
    from rpe3d.attention.decode import paged as paged_kernel

    return paged_kernel.Steps(law, device, sequences=sequences, heads=6, groups=2, **options)


def step_beside_reference(made, law, device, lengths, *, page=16, wider=7, **options):
    """Run sequences of all lengths in one launch, with a table that is wider than any of them, and judge each."""
    whole = random_problem(law, device, b=len(lengths), s=max(lengths), scale=0.2, **options)
    keys, values, table = paged(whole.k, whole.v, lengths, page)
    garbage = torch.full((len(lengths), wider), 2**31 - 1, dtype=torch.int32, device=device)
    table = torch.where(table < 0, 2**31 - 1, table)  # what lies beyond a sequence is never looked up
    table = torch.cat([table, garbage], 1)
    out = torch.full((len(lengths), 1, 6, law.rotary.head_dim), torch.nan, device=device, dtype=whole.q.dtype)
    out = out.transpose(1, 2)
    seen = torch.tensor(lengths, dtype=torch.int32, device=device)
    lse = made(whole.q, keys, values, out, pages=table, lengths=seen, scale=0.2).clone()
    for i, n in enumerate(lengths):
        one = slice(i, i + 1)
        if n == 0:
            assert (out[one] == 0).all()
            assert (lse[one] == -torch.inf).all()
            continue
        q, k, v = whole.q[one], whole.k[one, :, :n], whole.v[one, :, :n]
        assert_as_good(replace(whole, q=q, k=k, v=v, queries=range(n - 1, n), keys=range(n)), out[one], lse[one])
    return out


@pytest.mark.parametrize(
    ("name", "splits"),
    [("3d-rpe", None), ("3d-rpe", 1), ("3d-rpe", 5), ("dca", None), ("dca", 5), ("streaming-llm", 5)],
)
def test_sequences_of_all_lengths_share_a_launch(name, splits, device):
    """None, one token, page edges, the edge of plain RoPE and beyond; page numbers past a sequence are garbage."""
    law = law_for(name)
    split = {} if splits is None else {"splits": splits, "least_tiles": 1}
    step_beside_reference(steps(law, device, **split), law, device, MIXED)


def test_one_long_sequence_among_short_ones_is_shared_out(device, monkeypatch):
    """Of four programs at once, two per key head: half of all keys each, so that 700 of 716 tokens take two."""
    from rpe3d.attention.decode import paged as paged_kernel

    monkeypatch.setattr(paged_kernel, "LEAST_KEYS", 32)
    monkeypatch.setattr(paged_kernel, "_processors", lambda _: 4)  # on a GPU as well
    law = law_for("3d-rpe", focus=0, fade=0)
    made = steps(law, device, sequences=3, least_tiles=1)
    made.room.fill_(torch.nan)
    step_beside_reference(made, law, device, [9, 700, 7])
    ((bound, (*_, logs, arrivals)),) = made._bound.values()
    assert bound.grid[0] == 2
    assert (arrivals == 0).all()
    written = ~logs[: 3 * 6 * 2].view(3, 6, 2).isnan()
    assert written.any(1).tolist() == [[True, False], [True, True], [True, False]]


def test_a_launch_is_bound_once_for_all_layers_and_lengths(device):
    """What a CUDA graph has captured must not depend on the lengths: the grid and all arguments are the same."""
    law = law_for("3d-rpe")
    made = steps(law, device)
    first = step_beside_reference(made, law, device, [700, 48, 1]).clone()
    step_beside_reference(made, law, device, [700, 0, 699])
    again = random_problem(law, device, b=3, s=700, scale=0.2)
    assert len(made._bound) == 1
    assert again.q.shape == first.shape
    assert (made.arrivals == 0).all()
    step_beside_reference(made, law, device, [700, 12])
    assert len(made._bound) == 2
    rooms = {results[1].data_ptr() for _, results in made._bound.values() if results[1] is not None}
    assert all(made.room.data_ptr() <= place < made.room.data_ptr() + made.room.nbytes for place in rooms)


@pytest.mark.parametrize("waves", [1, 8, 64])
def test_scratch_is_large_enough_for_every_batch(waves):
    """The bound that `Steps` computes, held to what launches ask for, on an H200's 132 multiprocessors."""
    from rpe3d.attention.decode import paged as paged_kernel
    from rpe3d.attention.decode.launch import Launch

    for name in ("3d-rpe", "dca"):
        law = make_law(name, pretrained=8192, context=131072, head_dim=128)
        for h, g in ((32, 8), (8, 8), (64, 1), (28, 4), (7, 1)):
            rows, made = waves * 132 * min(64, h // g), paged_kernel.plan(law)
            room = int(rows * ((1 + made.fades / 2) * 128 + 1 + 1.5 * made.fades)) + 600 * h
            for b in (*range(1, 140), 256, 600):
                tiles = g * -(-(h // g) // 64)
                q = torch.empty(b, h, 1, 128, device="meta")
                launch = Launch(law, q, g, 131072, splits=paged_kernel.split(tiles, b, 131072, 132, waves))
                assert launch.room() <= room
                assert launch.counters <= 600 * h
                assert launch.splits == 1 or launch.splits * tiles * b <= waves * 132


def test_splits_depend_on_the_batch_and_the_table_alone():
    from rpe3d.attention.decode.paged import split

    found = {b: split(8, b, 131072, 132, waves=8) for b in (1, 2, 8, 16, 64, 128, 512)}
    assert found == {1: 16, 2: 16, 8: 16, 16: 8, 64: 2, 128: 1, 512: 1}
    assert split(8, 1, 512, 132) == 2


def test_vectors_that_do_not_lie_side_by_side_are_refused(device):
    law = law_for("3d-rpe")
    q, cache = torch.randn(1, 6, 32, 1, device=device).mT, torch.randn(2, 16, 2, 32, device=device)
    numbers = torch.zeros(1, 2, dtype=torch.int32, device=device)
    scattered = torch.randn(1, 6, 1, 64, device=device)[..., ::2]
    with pytest.raises(ConfigError, match="contiguous vectors"):
        steps(law, device)(scattered, cache, cache, q.clone(), pages=numbers, lengths=numbers[:, 0], scale=1.0)


def test_a_law_that_turns_keys_one_by_one_is_refused(device):
    from rpe3d.attention.decode import paged as paged_kernel

    law = law_for("leaky-rerope")
    x = torch.randn(1, 2, 1, 32, device=device)
    with pytest.raises(ConfigError, match="cannot run leaky-rerope"):
        paged_kernel.attend(x, x, x, law, pages=x, lengths=x, scale=1.0)


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [("3d-rpe", {}, 4), ("3d-rpe", {"sinks": 1}, 4), ("streaming-llm", {}, 4), ("rope", {}, 4), ("dca", {}, 8)],
)
def test_a_law_that_turns_in_more_ways_is_launched_with_more_warps(name, parameters, expected, device, monkeypatch):
    """With four, `dca`'s registers spill. First tokens that do not fade turn as the other far ones do."""
    from rpe3d.attention.decode import paged as paged_kernel

    launched = []
    monkeypatch.setattr(paged_kernel._paged, "bind", lambda *launch: lambda *first: launched.append(launch[-1]))
    law = make_law(name, pretrained=8192, context=65536, head_dim=128, **parameters)
    q, cache = torch.randn(1, 4, 1, 128, device=device), torch.randn(2, 16, 2, 128, device=device)
    numbers = torch.zeros(1, 2, dtype=torch.int32, device=device)
    given = {"pages": numbers, "lengths": numbers[:, 0] + 20, "scale": 1.0}
    for options in ({}, {"num_warps": 2}):
        paged_kernel.attend(q, cache, cache, law, **given, **options)
    assert [options["num_warps"] for options in launched] == [expected, 2]
