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
