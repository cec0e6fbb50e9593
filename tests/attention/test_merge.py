"""The merge of partial attentions: against attention over all keys at once, and against its formula in float64."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from rpe3d.attention.merge import Part, merge
from rpe3d.config import ConfigError

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
IMPL = pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=needs_triton)])


def partials(n, device, shape=(2, 3, 5, 64), dtype=torch.float32):
    """Random parts in three memory layouts: as a kernel leaves them, transposed, and as slices of something longer."""
    b, h, t, e = shape
    parts = []
    for i in range(n):
        if i % 3 == 0:
            o, lse = torch.randn(b, h, t, e), torch.randn(b, h, t, 1)[..., 0]
        elif i % 3 == 1:
            o, lse = torch.randn(b, t, h, e).transpose(1, 2), torch.randn(h, b, t).transpose(0, 1)
        else:
            o, lse = torch.randn(b, h, t + 4, e)[:, :, 3:-1], torch.randn(b, h, 2 * t)[..., ::2]
        parts.append((o.to(device, dtype), 3 * lse.to(device)))
    return parts


def truth(parts, sinks=None):
    """Σ softmax(lse_i) o_i in float64; a part that saw nothing is left out by hand."""
    logs = torch.stack([s.double() for _, s in parts], -1)
    outs = torch.stack([o.double() for o, _ in parts], -1).masked_fill((logs == -torch.inf)[..., None, :], 0.0)
    if sinks is not None:
        logs = torch.cat([logs, sinks.double()[None, :, None, None].expand(*logs.shape[:3], 1)], -1)
    weights = logs.softmax(-1).nan_to_num(0.0)[..., : len(parts)]
    return (outs * weights[..., None, :]).sum(-1), logs.logsumexp(-1)


def poisoned_results(parts, dtype=None):
    o, lse = parts[0]
    out = torch.full(o.shape, torch.nan, dtype=dtype or o.dtype, device=o.device)
    return out, torch.full(lse.shape, torch.nan, device=o.device)


def assert_equal(parts, out, lse, sinks=None, expected=None):
    """Within one unit in the last place of the largest result, and a few of float32 for the sum itself."""
    for ours, exact in zip((out, lse), expected or truth(parts, sinks), strict=True):
        assert torch.equal(ours == -torch.inf, exact == -torch.inf)
        ours, exact = ours.double().nan_to_num(neginf=0.0), exact.nan_to_num(neginf=0.0)
        unit = torch.finfo(out.dtype if ours.ndim == 4 else torch.float32).eps + 4 * torch.finfo(torch.float32).eps
        assert not ours.isnan().any()
        assert (ours - exact).abs().max() <= unit * exact.abs().max().clamp(min=1.0)


@IMPL
def test_faded_parts_weigh_less_together(impl, device):
    """Their logarithms are lower by fade[0] of their common one, and by fade[1], before anything else; no others."""
    parts = partials(3, device)
    fade = torch.stack([torch.linspace(0, 0.5, 5, device=device), torch.linspace(0, 4, 5, device=device)])
    marked = [Part(*part, faded=i != 1) for i, part in enumerate(parts)]
    out, lse = poisoned_results(parts)
    merge(marked, out, lse, fade=fade, impl=impl)
    together = torch.logaddexp(parts[0][1], parts[2][1])
    less = fade[0] * together.masked_fill(together == -torch.inf, 0.0) + fade[1]
    assert_equal([(o, s if i == 1 else s - less) for i, (o, s) in enumerate(parts)], out, lse)


def test_parts_of_the_keys_give_what_all_keys_give(device):
    """Flash-decoding's identity, in float64: softmax over a union from softmaxes over its parts."""
    q, k, v = (torch.randn(2, 3, n, 16, dtype=torch.float64, device=device) for n in (5, 70, 70))
    scores = q @ k.transpose(-1, -2)
    parts = []
    for span in (slice(0, 1), slice(1, 40), slice(40, 70)):
        parts.append((scores[..., span].softmax(-1) @ v[:, :, span], scores[..., span].logsumexp(-1)))
    out, lse = torch.empty_like(q), torch.empty_like(scores[..., 0])
    merge(parts, out, lse, impl="torch")
    torch.testing.assert_close(out, scores.softmax(-1) @ v, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-13)


@IMPL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 3, 12])
def test_any_number_of_parts_in_any_layout(n, dtype, impl, device):
    parts = partials(n, device, dtype=dtype)
    out, lse = poisoned_results(parts)
    merge(parts, out, lse, impl=impl)
    assert_equal(parts, out, lse)


@IMPL
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 17, 80), (2, 1, 33, 128), (1, 1, 3, 256)])
def test_odd_shapes_and_results_that_are_views(shape, impl, device):
    parts = partials(2, device, shape=shape)
    b, h, t, e = shape
    holder = torch.full((b, t + 2, h, e + 7), torch.nan, device=device)
    out, lse = holder[:, 1:-1, :, :e].transpose(1, 2), torch.full((b, t, h), torch.nan, device=device).transpose(1, 2)
    merge(parts, out, lse, impl=impl)
    assert_equal(parts, out, lse)
    assert holder[:, [0, -1]].isnan().all()
    assert holder[..., e:].isnan().all()


@needs_triton
@pytest.mark.parametrize("wide", ["out", "part"])
def test_heads_may_lie_more_than_2_to_the_31_elements_apart(wide, device):
    """A million tokens of 32 heads of dimension 128. Memory that is not touched costs nothing on a CPU."""
    parts = partials(2, device, (1, 3, 5, 64), torch.bfloat16)
    far = torch.empty(2**31 + 2**10, dtype=torch.bfloat16, device=device).as_strided((1, 3, 5, 64), (1, 2**30, 64, 1))
    out, lse = poisoned_results(parts)
    if wide == "out":
        out = far
    else:
        far.copy_(parts[0][0])
        parts[0] = (far, parts[0][1])
    merge(parts, out, lse, impl="triton")
    assert_equal(parts, out, lse)


@IMPL
def test_a_part_may_be_of_another_type_than_the_result(impl, device):
    parts = partials(3, device)
    out, lse = poisoned_results(parts, torch.bfloat16)
    merge(parts, out, lse, impl=impl)
    assert_equal(parts, out, lse)


@IMPL
def test_a_part_that_saw_nothing_does_not_leak(impl, device):
    """Its output may be anything, NaN and infinity included; where no part saw anything: zeros and -inf."""
    parts = partials(3, device)
    parts[0][1][0] = -torch.inf
    parts[0][0][0] = torch.nan
    parts[2][1][:, 1] = -torch.inf
    parts[2][0][:, 1] = torch.inf
    for o, lse in parts:
        o[1, 2, 3], lse[1, 2, 3] = torch.nan, -torch.inf
    out, lse = poisoned_results(parts)
    merge(parts, out, lse, impl=impl)
    assert_equal(parts, out, lse)
    assert (out[1, 2, 3] == 0).all()
    assert lse[1, 2, 3] == -torch.inf


@IMPL
def test_a_part_may_hold_some_of_the_rows(impl, device):
    """Rows that it does not hold are rows that it did not see."""
    whole, some, few = partials(3, device, shape=(2, 3, 20, 64))
    for start, stop, part in ((3, 20, some), (0, 1, few)):
        held = (torch.arange(20, device=device) >= start) & (torch.arange(20, device=device) < stop)
        part[1].masked_fill_(~held, -torch.inf)
    parts = [whole, Part(some[0][:, :, 3:], some[1][:, :, 3:], 3), Part(few[0][:, :, :1], few[1][:, :, :1])]
    for given, full in ((parts, [whole, some, few]), (parts[1:], [some, few])):
        out, lse = poisoned_results([whole])
        merge(given, out, lse, impl=impl)
        assert_equal(full, out, lse)


@IMPL
@pytest.mark.parametrize("step", [6, 8])
def test_a_part_may_be_repetitions_of_rows(step, impl, device):
    """Three times six rows, one after the other or two rows apart, from row 1 on."""
    whole = partials(1, device, shape=(1, 3, 25, 64))[0]
    o, lse = torch.randn(3, 3, 6, 64, device=device), torch.randn(3, 3, 6, device=device)
    placed = torch.full((1, 3, 25, 64), torch.nan, device=device), torch.full((1, 3, 25), -torch.inf, device=device)
    for n in range(3):
        rows = slice(1 + n * step, 7 + n * step)
        placed[0][0, :, rows], placed[1][0, :, rows] = o[n], lse[n]
    out, merged = poisoned_results([whole])
    merge([whole, Part(o, lse, 1, step)], out, merged, impl=impl)
    assert_equal([whole, placed], out, merged)


@IMPL
def test_the_rows_of_a_part_may_stand_backwards(impl, device):
    """In each of its repetitions."""
    whole = partials(1, device, shape=(1, 3, 25, 64))[0]
    o, lse = torch.randn(3, 3, 6, 64, device=device), torch.randn(3, 3, 6, device=device)
    found = []
    for part in (Part(o, lse, 1, 8, flipped=True), Part(o.flip(2), lse.flip(2), 1, 8)):
        found.append(poisoned_results([whole]))
        merge([whole, part], *found[-1], impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@IMPL
def test_sinks_join_the_denominator_alone(impl, device):
    sinks = torch.tensor([0.5, -torch.inf, 30.0], device=device)
    parts = partials(2, device)
    for o, lse in parts:
        o[0, :, 0], lse[0, :, 0] = torch.nan, -torch.inf
    out, lse = poisoned_results(parts)
    merge(parts, out, lse, sinks=sinks, impl=impl)
    assert_equal(parts, out, lse, sinks)
    assert (out[0, :, 0] == 0).all()
    assert torch.equal(lse[0, :, 0], sinks)


@IMPL
@pytest.mark.parametrize("n", [1, 3])
def test_the_result_may_be_one_of_the_parts(n, impl, device):
    parts = partials(n, device, shape=(2, 3, 40, 64))
    sinks = torch.randn(3, device=device)
    expected = truth(parts, sinks)
    out, lse = parts[-1]
    merge(parts, out, lse, sinks=sinks, impl=impl)
    assert_equal(parts, out, lse, expected=expected)


@IMPL
def test_far_apart_log_sum_exps_neither_overflow_nor_vanish(impl, device):
    parts = partials(3, device)
    for (_, lse), shift in zip(parts, (-1e4, 0.0, 1e4), strict=True):
        lse += shift
    out, lse = poisoned_results(parts)
    merge(parts, out, lse, impl=impl)
    assert torch.equal(out, parts[2][0])
    assert torch.equal(lse, parts[2][1])


def test_without_a_gpu_auto_takes_plain_operations():
    parts = partials(2, "cpu")
    results = [poisoned_results(parts) for _ in range(2)]
    for (out, lse), impl in zip(results, ("auto", "torch"), strict=True):
        merge(parts, out, lse, impl=impl)
    assert torch.equal(results[0][0], results[1][0])


def test_what_does_not_fit_is_refused(device):
    parts = partials(13, device)
    out, lse = poisoned_results(parts)
    with pytest.raises(ConfigError, match="there are 13 parts"):
        merge(parts, out, lse)
    with pytest.raises(ConfigError, match="there are 0 parts"):
        merge([], out, lse)
    with pytest.raises(ConfigError, match=r"part 0 is \(2, 3, 5, 64\) and \(2, 3, 5\) from row 1"):
        merge([Part(*parts[0], 1)], out, lse)
    with pytest.raises(ConfigError, match=r"part 1 is \(2, 2, 5, 64\)"):
        merge([parts[0], (parts[1][0][:, 1:], parts[1][1][:, 1:])], out, lse)
    with pytest.raises(ConfigError, match="part 0 is not contiguous in its last dimension"):
        merge([(torch.empty(2, 3, 64, 5, device=device).mT, parts[0][1])], out, lse)
    with pytest.raises(ConfigError, match=r"sinks is \(2,\)"):
        merge(parts[:1], out, lse, sinks=torch.zeros(2, device=device))
    with pytest.raises(ConfigError, match=r"is float64|is not installed"):
        merge([(o.double(), s) for o, s in parts[:2]], out, lse, impl="triton")
