"""A law with another beside it: all far keys, faded, at 1/e of their weight, beside those that queries choose."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from rpe3d import ConfigError
from rpe3d.attention import Memory, attention, chosen, explain, prefill, reference
from rpe3d.attention.beside import Beside, Mix
from rpe3d.attention.blocked import Calls
from rpe3d.attention.choose import choose
from rpe3d.attention.decode import plain as decode_plain
from rpe3d.attention.spans import spans
from rpe3d.geometry import saved_law
from rpe3d.testing import assert_as_good, gradients, in_float64, random_problem, small_law

pytestmark = pytest.mark.usefixtures("poisoned")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

OWN = {"pretrained": 256, "context": 4096, "chunk": 32, "window": 64, "reach": 160, "sinks": 0, "far": 5, "block": 16}
EDGE = 96  # the first position with a far key


def law_for(**changes):
    fading = {} if "sinks" in changes else {"focus": 0.0, "fade": 0.0}
    return small_law("3d-rpe", **OWN | {"head_dim": 32, "full": "all"} | fading | changes)


def problem(law, device, *, t=200, s=None, **options):
    return random_problem(law, device, **{"h": 4, "g": 2, "t": t, "s": s or t} | options)


def alone(x):
    """The problem under the law that stands beside another."""
    return replace(x, law=x.law.both[1], sinks=None)


def by_calls(x):
    return Calls(x)(x.q, x.k, x.v, None)


def by_prefill(x):
    return prefill.Step(x, list(spans(x)))(x.q, x.k, x.v, None)


def by_decode_kernel(x):
    from rpe3d.attention.decode import kernel as decode_kernel

    return decode_kernel.Step(x)(x.q, x.k, x.v, None)


def by_plain_decode(x):
    return decode_plain.Step(x)(x.q, x.k, x.v, None)


def assert_specified(x, out, lse):
    if bool((x.positions()[0] >= EDGE).any()):
        assert_as_good(x, out, lse)
    else:
        assert not out.any()
        assert (lse == -torch.inf).all()


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("t", [1, EDGE, EDGE + 1, 150, 401])
@pytest.mark.parametrize("run", [by_calls, pytest.param(by_prefill, marks=needs_triton)])
def test_far_keys_without_near_ones_are_the_specification(run, t, sinks, device):
    """Rows before the first far key see nothing: zeros and a log-sum-exp of -inf."""
    fading = {"focus": 1.5, "fade": 0.5} if sinks else {}
    x = alone(problem(law_for(sinks=sinks, **fading), device, t=t, s=t))
    assert_specified(x, *run(x))


@pytest.mark.parametrize("s", [1, EDGE, EDGE + 1, 401])
@pytest.mark.parametrize("run", [pytest.param(by_decode_kernel, marks=needs_triton), by_plain_decode])
def test_a_step_over_far_keys_without_near_ones_is_the_specification(run, s, device):
    x = alone(problem(law_for(), device, t=1, s=s, b=2))
    assert_specified(x, *run(x))


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(
    ("t", "s"),
    [(300, 300), (70, 401), (3, 300), (1, 401), (1, EDGE), (1, EDGE + 1), (EDGE, EDGE), (EDGE + 1, EDGE + 1)],
)
def test_both_laws_are_one_softmax(t, s, softcap, device):
    """The specification joins the pairs of both in one softmax; what runs are two problems and a merge."""
    x = in_float64(problem(law_for(), device, t=t, s=s, sinks=torch.randn(4), softcap=softcap))
    made = choose(x).prepared
    assert isinstance(made, Beside)
    for ours, truth in zip(made(x.q, x.k, x.v, x.sinks.double()), reference.attend(x), strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t", "s"), [(300, 300), (1, 401)])
def test_the_second_is_held_back_by_one_nat(t, s, dtype, device):
    """Of the parts' own results, in float64: so whatever blocks rounding has the first choose."""
    x = problem(law_for(), device, t=t, s=s, dtype=dtype)
    made = choose(x).prepared
    out, lse = made(x.q, x.k, x.v, None)
    (near, log), (far, other) = ([y.double() for y in part(x.q, x.k, x.v, None)] for part in (made.first, made.second))
    total = torch.logaddexp(log, other - 1)
    truth = near * (log - total).exp()[..., None] + far * (other - 1 - total).exp()[..., None]
    close = 8 * torch.finfo(dtype).eps * float(truth.abs().max())
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=close)
    torch.testing.assert_close(lse.double(), total, rtol=1e-6, atol=1e-6)
    assert (out.double() - near).abs().max() > 0.01


def test_padding_and_masks_reach_both(device):
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[0, :37] = False
    places = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"query_positions": places, "key_positions": places, "query_mask": mask, "key_mask": mask}
    x = in_float64(problem(law_for(), device, t=300, b=2, **given))
    for ours, truth in zip(choose(x).prepared(x.q, x.k, x.v, None), reference.attend(x), strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)


def test_prompts_without_far_keys_are_answered_by_the_law_itself(device):
    """DESIGN 2.1 fact 1: not a bit tells them from the law without another."""
    x = problem(law_for(), device, t=EDGE)
    plain = attention(x.q, x.k, x.v, x.law.both[0], rotated=True)
    for ours, theirs in zip(choose(x).prepared(x.q, x.k, x.v, None), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_a_cache_is_read_with_its_memory(device):
    """Steps with what earlier ones learnt of the cache's blocks are those without."""
    memory, law = Memory(), law_for()
    whole = problem(law, device, t=310)
    for s in (300, 301, 310):
        q, k, v = whole.q[:, :, s - 1 : s], whole.k[:, :, :s], whole.v[:, :, :s]
        ours = attention(q, k, v, law, rotated=True, memory=memory)
        for a, b in zip(ours, attention(q, k, v, law, rotated=True, impl="reference"), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_gradients_go_through_the_merge(device):
    """Of output and log-sum-exp, in float64."""
    x = in_float64(problem(law_for(head_dim=16), device, t=150))
    found = (
        gradients(x, partial(attention, law=x.law, rotated=True, impl=impl), weight=x.q.sin(), logs=x.q[..., 0].cos())
        for impl in ("auto", "reference")
    )
    for ours, truth in zip(*found, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize("which", ["output", "log-sum-exp"])
def test_a_gradient_of_one_result_alone_goes_through_the_merge(which, device):
    x = in_float64(problem(law_for(head_dim=16), device, t=150))

    def run(impl):
        leaves = [y.detach().clone().requires_grad_() for y in (x.q, x.k, x.v)]
        out, lse = attention(*leaves, x.law, rotated=True, impl=impl)
        total = (out * x.q.sin()).sum() if which == "output" else (lse * x.q[..., 0].cos()).sum()
        return torch.autograd.grad(total, leaves, allow_unused=True)

    for ours, truth in zip(run("auto"), run("reference"), strict=True):
        both = [torch.zeros_like(x.v) if y is None else y for y in (ours, truth)]  # no kernel has to say so
        torch.testing.assert_close(*both, rtol=0, atol=1e-11)


def test_rows_that_one_of_two_laws_does_not_see_have_the_gradient_of_the_other(device):
    """What lies in the other's output is not looked at, not even NaN."""
    out, far, do = (torch.randn(1, 2, 4, 8, dtype=torch.float64, device=device) for _ in range(3))
    lse, log, dlse = (torch.randn(1, 2, 4, dtype=torch.float64, device=device) for _ in range(3))
    log[:, :, :2], far[:, :, :2] = -torch.inf, torch.nan
    lse[:, :, 0] = -torch.inf
    leaves = [y.requires_grad_() for y in (out, lse, far, log)]
    mixed, total = Mix.apply(*leaves)
    found = torch.autograd.grad(((mixed * do).sum(), torch.where(total.isinf(), 0.0, total * dlse).sum()), leaves)
    seen = [y.detach().clone().requires_grad_() for y in (out[:, :, 1:], lse[:, :, 1:], far[:, :, 2:], log[:, :, 2:])]
    both = torch.logaddexp(seen[1][:, :, 1:], seen[3])
    shares = [(one - both).exp()[..., None] for one in (seen[1][:, :, 1:], seen[3])]
    wanted = ((shares[0] * seen[0][:, :, 1:] + shares[1] * seen[2]) * do[:, :, 2:]).sum()
    wanted += (both * dlse[:, :, 2:]).sum()
    wanted += (seen[0][:, :, 0] * do[:, :, 1]).sum() + (seen[1][:, :, 0] * dlse[:, :, 1]).sum()
    for ours, truth in zip(found, torch.autograd.grad(wanted, seen), strict=True):
        rows = truth.shape[2]
        torch.testing.assert_close(ours[:, :, -rows:], truth, rtol=0, atol=1e-12)
        assert not ours[:, :, :-rows].any()
    mixed, _ = Mix.apply(*leaves)
    with pytest.raises(ConfigError, match="no second derivative"):
        torch.autograd.grad(mixed.nansum(), leaves, create_graph=True)


@pytest.mark.parametrize("t", [1, 2])
def test_a_step_of_padding_alone_leaves_the_sinks_as_they_are(t, device):
    """Merged in place, the log-sum-exp must not be a view of what the caller gave."""
    there = torch.zeros(1, 40, dtype=torch.bool, device=device)
    there[:, :20] = True
    places = (there.cumsum(1) - 1).clamp(min=0)
    sinks = torch.randn(2, device=device)
    before = sinks.clone()
    x = problem(
        law_for(), device, h=2, t=t, s=40, sinks=sinks,
        query_positions=places[:, -t:], key_positions=places, query_mask=there[:, -t:], key_mask=there,
    )  # fmt: skip
    out, lse = choose(x).prepared(x.q, x.k, x.v, sinks)
    assert not out.any()
    torch.testing.assert_close(
        lse, before[None, :, None].expand_as(lse), rtol=1e-6, atol=1e-6
    )  # kernels count in base 2
    lse.zero_()
    assert torch.equal(sinks, before)


def test_a_part_of_a_law_is_not_made_from_a_file():
    """Nor in a compiled graph, which holds a law as its file."""
    with pytest.raises(ConfigError, match="far keys alone"):
        saved_law(law_for().both[1].to_dict())


def test_it_is_said_how_each_law_runs(device):
    how, why = explain(problem(law_for(), device))
    assert how == "chosen"
    assert "beside it, by" in why


@pytest.mark.parametrize("impl", ["blocked", "prefill", "decode", "chosen"])
def test_an_implementation_of_one_law_is_refused(impl, device):
    x = problem(law_for(), device, t=1, s=200)
    with pytest.raises(ConfigError, match=f"{impl} runs one law") as refused:
        attention(x.q, x.k, x.v, x.law, rotated=True, impl=impl)
    assert "reference" in refused.value.hint
    if impl == "chosen":
        assert chosen.refusal(replace(x, law=x.law.both[0])) is None


def test_a_file_keeps_it():
    law = law_for()
    assert saved_law(law.to_dict()) == law
    assert law.to_dict()["full"] == "all"
    assert law.both[0] == law_for(full=None)
    assert [region.choice for region in law.both[1].regions] == [None]
