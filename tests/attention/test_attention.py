"""Every implementation against the specification in float64, for every law, forward and gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rpe3d import ConfigError, laws, make_law
from rpe3d.attention import Shared, attention, blocked, merge
from rpe3d.attention.blocked import layout, run, schedule
from rpe3d.attention.blocked.backends import BACKENDS, backend_for
from rpe3d.attention.blocked.run import Blocked
from rpe3d.attention.blocked.task import Task
from rpe3d.attention.problem import placed
from rpe3d.rotation import cos_sin, rotate, table
from rpe3d.testing import assert_as_good, assert_gradients_as_good, gradients, random_problem, small_law

TOKENS = 150


def law_for(name, **changes):
    return small_law(name, **{"head_dim": 16} | changes)


def vectors(law, b=2, t=TOKENS, s=None, dtype=torch.float64, **shape):
    """Return q, k and v, the same ones whenever they are asked for."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = random_problem(law, b=b, t=t, s=s or t, dtype=dtype, **shape)
    return x.q, x.k, x.v


def specification(q, k, v, law, **options):
    return attention(q.double(), k.double(), v.double(), law, impl="reference", **options)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", laws())
def test_the_specification_is_the_softmax_of_the_law_s_own_angles(name, turned):
    """Scores written down pair by pair from relative_angles, in complex128: nothing of attention's own code.

    The far keys of 3D-RPE, more than two chunks of 16 away and not among the first three, weigh together
    (Σ w^τ)^(1/τ) (64 / p)^(3/4) once p is above 64, each in proportion to its own w^τ, with τ = (log p / log 64)^1.5.
    """
    law = law_for(name)
    q, k, v = vectors(law, b=1, h=2, g=2)
    position = torch.arange(TOKENS)
    out, lse = attention(*stock(q, k, law), v, law, rotated=True) if turned else attention(q, k, v, law)
    length = TOKENS if law.grows else None
    angles = law.relative_angles(position[:, None], position[None, :], length)
    complexes = [torch.complex(x[..., :8], x[..., 8:]) for x in (q, k)]
    product = complexes[0][:, :, :, None] * complexes[1][:, :, None].conj()
    scores = (product * torch.exp(1j * angles)).real.sum(-1) * law.attention_scaling**2 / 4
    hidden = (position[None, :] > position[:, None]) | angles[..., 0].isnan()
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    if name == "3d-rpe":
        p = position.double().clamp(min=64)
        tau = ((p.log() / math.log(64)) ** 1.5)[:, None]
        far = (position[:, None] // 16 - position[None, :] // 16 > 2) & (position >= 3)
        sharp = torch.where(far, weights, 0.0) ** tau
        total = sharp.sum(-1, keepdim=True)
        weights = torch.where(far, sharp / total * total ** (1 / tau) * ((64 / p) ** 0.75)[:, None], weights)
    if name == "logn":
        tau = (position.double().clamp(min=64).log() / math.log(64))[:, None]
        sharp = weights**tau
        weights = sharp * sharp.sum(-1, keepdim=True) ** (1 / tau - 1)
    torch.testing.assert_close(out, weights / weights.sum(-1, keepdim=True) @ v, rtol=0, atol=1e-11)
    torch.testing.assert_close(lse, weights.sum(-1).log(), rtol=0, atol=1e-11)


def stock(q, k, law, queries=None, keys=None):
    """q and k turned by the model's own RoPE, as a Hugging Face cache holds them."""
    turned = []
    for x, p in ((q, queries), (k, keys)):
        p = torch.arange(x.shape[2]) if p is None else p
        length = k.shape[2] if law.grows else None
        angles = p[..., None].double() * law.frequencies(length)
        tables = cos_sin(angles, scaling=law.attention_scaling, dtype=torch.promote_types(x.dtype, torch.float32))
        turned.append(rotate(x, None, *tables, interleaved=law.rotary.interleaved, impl="reference")[0])
    return turned


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", laws())
def test_blocked_attention_is_as_good_as_eager(name, dtype, turned):
    x = replace(random_problem(law_for(name), b=2, t=TOKENS, s=TOKENS, dtype=dtype), rotated=turned)
    assert_as_good(x, *attention(x.q, x.k, x.v, x.law, rotated=turned, impl="blocked"), kernel=False)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 40, 41, 42, 48, 49, 55, 64, 65, 68, 69, 150])
@pytest.mark.parametrize(
    "name", ["3d-rpe", "dca", "self-extend", "streaming-llm", "3d-rpe-dual-chunk", "string", "dpe", "lampe"]
)
def test_blocked_attention_holds_at_every_alignment(name, length, poisoned):
    """Length 1, one chunk, one more, and every place where a window or a block can end."""
    law = law_for(name)
    q, k, v = vectors(law, b=1, t=length)
    truth, truth_lse = specification(q, k, v, law)
    out, lse = attention(q, k, v, law, impl="blocked")
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, truth_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 1), (6, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_heads_and_dimensions_of_real_models(heads, groups, head_dim):
    x = random_problem(law_for("3d-rpe", head_dim=head_dim), h=heads, g=groups, t=TOKENS, s=TOKENS)
    assert_as_good(replace(x, rotated=False), *attention(x.q, x.k, x.v, x.law, impl="blocked"), kernel=False)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 16])
@pytest.mark.parametrize("name", ["3d-rpe", "dpe"])
def test_partial_and_interleaved_rotary(name, interleaved, rotary_dim):
    law = law_for(name, rotary_dim=rotary_dim, interleaved=interleaved)
    q, k, v = vectors(law)
    out, _ = attention(q, k, v, law, impl="blocked")
    torch.testing.assert_close(out, specification(q, k, v, law)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("waiting", [run.WAITING, 0], ids=["together", "one by one"])
@pytest.mark.parametrize("name", laws())
def test_gradients_are_those_of_the_specification(name, waiting, monkeypatch):
    """The merge weights are part of the function: detaching them, as is common, is off by about 16 %."""
    monkeypatch.setattr(run, "WAITING", waiting)
    x = random_problem(law_for(name), b=2, t=TOKENS, s=TOKENS, dtype=torch.float64)
    weight = torch.randn(2, 6, TOKENS, 16, dtype=torch.float64)
    found = [gradients(x, partial(attention, law=x.law, impl=impl), weight) for impl in ("blocked", "reference")]
    for ours, truth in zip(*found, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize("slab", [16, 40, 1000])
@pytest.mark.parametrize("rows", [8, 24, 200])
@pytest.mark.parametrize(
    ("name", "parameters"), [("3d-rpe", {}), ("3d-rpe", {"focus": 0}), ("3d-rpe", {"sinks": 0}), ("dca", {})]
)
def test_blocks_of_rows_and_slabs_of_keys_change_nothing(name, parameters, rows, slab):
    """Long texts go in blocks of rows and their far keys in slabs, which meet in merges of up to twelve parts."""
    law = law_for(name, rotary_dim=8, **parameters)
    x = [y.requires_grad_() for y in vectors(law, b=1, t=200)]
    weight = torch.randn(1, 6, 200, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    task = Task(
        law=law,
        regions=law.regions,
        queries=range(200),
        keys=range(200),
        frequencies=law.frequencies(),
        scale=0.25,
        backend=BACKENDS["cpu"],
        precision=torch.float64,
        rows=rows,
        backward_rows=rows,
        slab=slab,
    )
    results = []
    for out, lse in (Blocked.apply(*x, None, task), attention(*x, law, rotated=True, impl="reference")):
        results.append((out, lse, *torch.autograd.grad((out * weight).sum(), x)))
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("3d-rpe", {}), ("3d-rpe", {"focus": 0, "interleaved": True}), ("3d-rpe", {"rotary_dim": 8}), ("dca", {})],
)
def test_gradients_that_kernels_add_up_are_as_good_as_the_eager_path_s(name, parameters, device, monkeypatch):
    """As on a GPU, in Triton's interpreter where there is none; what the device's own library loses is allowed."""
    for module in (merge, run):
        monkeypatch.setattr(module, "fuses", lambda out: True)
    x = random_problem(law_for(name, **parameters), device, h=4, g=2, t=90, s=90, dtype=torch.float32)

    def plain(q, k, v):
        return (scaled_dot_product_attention(q, *(y.repeat_interleave(2, 1) for y in (k, v)), is_causal=True),)

    assert_gradients_as_good(x, partial(attention, law=x.law, rotated=True, impl="blocked"), plain=plain)


@pytest.mark.parametrize("heads_together", [False, True])
def test_no_call_of_a_backward_copies_rows_of_outputs(heads_together, device, monkeypatch):
    """cuDNN takes dense ones alone (`laid_out`): fourteen calls that copied theirs took 2.7 of 68 ms at 32k."""
    law = law_for("3d-rpe")
    q, k, v = (x.float() for x in vectors(law, b=1, t=TOKENS, device=device))
    if not heads_together:
        q = q.contiguous()
    lain, library = [], backend_for(q, v)

    def spy(do, q, k, v, o, *rest):
        lain.append(layout.laid_out(do, q) is do and layout.laid_out(o, q) is o)
        return library.backward(do, q, k, v, o, *rest)

    monkeypatch.setitem(BACKENDS, library.name, replace(library, backward=spy))
    monkeypatch.setattr("rpe3d.attention.blocked.task.rotate", partial(rotate, impl="triton"))
    monkeypatch.setattr(schedule, "MOST_STAIRS", 0)
    out, _ = attention(q.requires_grad_(), k, v, law, rotated=True, impl="blocked")
    out.backward(torch.randn(out.shape, dtype=out.dtype, device=device))
    assert len(lain) > 4
    assert all(lain)


def test_tables_are_made_once_for_all_layers_and_the_oldest_go(monkeypatch):
    made, make = [], table.table
    monkeypatch.setattr(table, "table", lambda *x: made.append(x) or make(*x))
    law = law_for("3d-rpe")
    q, k, v = (x.requires_grad_() for x in vectors(law))
    found, counts = [], []
    for most in (table.KEPT, 0):
        monkeypatch.setattr(table, "KEPT", most)
        layers = Shared()
        for _ in range(3):
            out, _ = layers(q, k, v, law)
            found.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
            counts.append(len(made))
    once = counts[0]
    assert counts[:3] == [once] * 3
    assert counts[5] - counts[4] >= once
    ((_, calls),) = layers.made.values()
    (kept,) = {id(task.tables): task.tables for _, task in calls.tasks}.values()
    assert not kept.entries
    assert kept.bytes == 0
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize("name", ["3d-rpe", "dca", "self-extend"])
def test_gradcheck(name):
    law = law_for(name, head_dim=4)
    q, k, v = (x.requires_grad_() for x in vectors(law, b=1, h=2, g=1, t=91))
    assert torch.autograd.gradcheck(lambda *x: attention(*x, law, impl="blocked")[0], (q, k, v), fast_mode=True)


@pytest.mark.parametrize("name", ["rope", "3d-rpe", "dca", "self-extend", "streaming-llm"])
def test_gradients_in_float32_are_as_good_as_the_eager_path_s(name):
    x = random_problem(law_for(name), b=2, t=TOKENS, s=TOKENS)
    assert_gradients_as_good(x, partial(attention, law=x.law, rotated=True, impl="blocked"))


@pytest.mark.parametrize("impl", ["reference", "blocked", "auto"])
@pytest.mark.parametrize("name", laws())
def test_prefill_in_pieces_and_token_by_token_equals_one_forward(name, impl):
    """Facts 3: keys depend on their own position alone. Laws that grow change their frequencies on the way."""
    law = law_for(name)
    q, k, v = vectors(law)
    if law.grows:
        pytest.skip("it turns old keys anew as the text grows; its cache is the model layer's concern")
    q, k = stock(q, k, law)
    whole, whole_lse = attention(q, k, v, law, rotated=True, impl="reference")
    outs, lses = [], []
    for a, b in [(0, 63), (63, 64), (64, 121), (121, 148), (148, 149), (149, 150)]:
        out, lse = attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], law, rotated=True, impl=impl)
        outs.append(out)
        lses.append(lse)
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(lses, 2), whole_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize("name", ["rope", "3d-rpe", "dca", "rerope", "streaming-llm"])
def test_a_padded_batch_equals_each_sequence_alone(name, impl):
    """Left padding, right padding and none in one batch; rows of padding are zeros."""
    law = law_for(name)
    q, k, v = vectors(law, b=3)
    pads = [(0, 0), (13, 0), (0, 42)]
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    positions = torch.zeros(3, TOKENS, dtype=torch.long)
    for b, (left, right) in enumerate(pads):
        mask[b, :left] = False
        mask[b, TOKENS - right :] = False
        positions[b, left : TOKENS - right] = torch.arange(TOKENS - left - right)
    masks = {"query_mask": mask, "key_mask": mask, "query_positions": positions, "key_positions": positions}
    out, lse = attention(q, k, v, law, impl=impl, **masks)
    for b, (left, right) in enumerate(pads):
        tokens = slice(left, TOKENS - right)
        alone = [x[b : b + 1, :, tokens] for x in (q, k, v)]
        expected, expected_lse = attention(*alone, law, impl="reference")
        torch.testing.assert_close(out[b : b + 1, :, tokens], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse[b : b + 1, :, tokens], expected_lse, rtol=0, atol=1e-12)
        assert (out[b, :, ~mask[b]] == 0).all()
        assert (lse[b, :, ~mask[b]] == -torch.inf).all()


@pytest.mark.parametrize("name", ["3d-rpe", "dca", "rerope", "3d-rpe-definition"])
@pytest.mark.parametrize(
    ("rows", "part"),
    [(blocked.ROWS_ON_CPU, blocked.PART), (16, blocked.PART), (blocked.ROWS_ON_CPU, 2 * 4 * 16 * TOKENS)],
    ids=["all-at-once", "one-chunk-in-a-block-of-the-forward", "two-at-a-time"],
)
def test_a_batch_has_the_outputs_and_gradients_of_each_sequence_alone(monkeypatch, name, rows, part):
    """Calls that repeat over chunks take a batch as heads; those of the backward may repeat where no other do."""
    monkeypatch.setattr(blocked, "ROWS_ON_CPU", rows)
    monkeypatch.setattr(blocked, "PART", part)
    law = law_for(name)
    given = [x.requires_grad_() for x in vectors(law, b=5, h=4, g=2)]
    assert given[0].shape[1:] == (4, TOKENS, 16), "two at a time are meant"
    sinks = torch.randn(given[0].shape[1], dtype=torch.float64, requires_grad=True)
    out, lse = attention(*given, law, impl="blocked", sinks=sinks)
    change = torch.randn_like(out)
    found = torch.autograd.grad((out * change).sum(), [*given, sinks])
    total = torch.zeros_like(sinks)
    for b in range(5):
        alone = [x[b : b + 1].detach().requires_grad_() for x in given]
        expected, expected_lse = attention(*alone, law, impl="reference", sinks=sinks)
        torch.testing.assert_close(out[b : b + 1], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse[b : b + 1], expected_lse, rtol=0, atol=1e-12)
        *gradients, of_sinks = torch.autograd.grad((expected * change[b : b + 1]).sum(), [*alone, sinks])
        total += of_sinks
        for whole, one in zip(found[:3], gradients, strict=True):
            torch.testing.assert_close(whole[b : b + 1], one, rtol=0, atol=1e-11)
    torch.testing.assert_close(found[3], total, rtol=0, atol=1e-11)


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_a_row_that_sees_nothing_is_zeros(impl):
    law = law_for("3d-rpe")
    q, k, v = vectors(law, b=1, t=5)
    mask = torch.tensor([[False, False, True, True, True]])
    out, lse = attention(q, k, v, law, key_mask=mask, impl=impl)
    assert (out[:, :, :2] == 0).all()
    assert (lse[:, :, :2] == -torch.inf).all()
    assert out[:, :, 2:].abs().min() > 0


@pytest.mark.parametrize("impl", ["auto", "blocked", "reference"])
@pytest.mark.parametrize("sinks", [None, 0.7])
def test_a_batch_of_padding_alone_is_zeros(impl, sinks):
    """The contract: a row that sees nothing is zeros, and its log-sum-exp -inf, or the sink's."""
    law = law_for("3d-rpe")
    q, k, v = vectors(law, t=20, s=40, dtype=torch.float32)
    nothing = torch.zeros(2, 20, dtype=torch.bool)
    given = {"query_mask": nothing, "sinks": None if sinks is None else torch.full((6,), sinks)}
    out, lse = attention(q, k, v, law, impl=impl, **given)
    assert (out == 0).all()
    torch.testing.assert_close(lse, torch.full_like(lse, -torch.inf if sinks is None else sinks))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["rope", "3d-rpe", "dca", "self-extend"])
def test_the_log_sum_exp_has_its_gradient(name, padded):
    """As the specification has it, to float64; the library's calls know nothing of it."""
    law = law_for(name)
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    if padded:
        mask[0, 120:], mask[1, :40] = False, False
    where = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"query_positions": where, "key_positions": where, "query_mask": mask, "key_mask": mask}
    weight, sinks = torch.randn(2, 6, TOKENS, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    results = []
    for impl in ("blocked", "reference"):
        leaves = [x.clone().requires_grad_() for x in (*vectors(law), sinks)]
        out, lse = attention(*leaves[:3], law, impl=impl, sinks=leaves[3], **given)
        results.append(torch.autograd.grad((lse * weight).sum() + out.square().sum(), leaves))
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-6, 1.0, 2e4])
def test_gradients_of_the_log_sum_exp_are_not_lost_in_half_precision(size, dtype):
    """Their size is another in each sequence. A smaller dlse than 6e-8 is 0 in float16, and 65520 is infinite."""
    law = law_for("3d-rpe")
    q, k, v = (x.to(dtype) for x in vectors(law))
    weight = torch.randn(2, 6, TOKENS, dtype=torch.float64) * torch.tensor([size, 1.0])[:, None, None]
    found = []
    for kind, impl in ((dtype, "blocked"), (torch.float64, "reference")):
        leaves = [x.to(kind).requires_grad_() for x in (q, k)]
        lse = attention(*leaves, v.to(kind), law, impl=impl)[1]
        found.append(torch.autograd.grad((lse * weight.to(lse.dtype)).sum(), leaves))
    for ours, truth in zip(*found, strict=True):
        for one, true in zip(ours.double(), truth, strict=True):
            finest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            close = 4 * torch.finfo(dtype).eps * float(true.abs().max()) + 2 * finest
            torch.testing.assert_close(one, true, rtol=0, atol=close)


@pytest.mark.parametrize("known", [False, True], ids=["asked", "known"])
@pytest.mark.parametrize("name", ["3d-rpe", "3d-rpe-definition", "dca", "rope", "self-extend", "dpe"])
def test_positions_with_gaps_are_exact_too(name, known, monkeypatch):
    """As PoSE trains: chunk laws have a schedule; bands of distances go in dense tiles, in linear memory."""
    law = law_for(name)
    q, k, v = (x.requires_grad_() for x in vectors(law))
    rows = [[*range(80), *range(160, 230)], [*range(9, 40), *range(43, 57), *range(63, 168)]]
    positions = placed(torch.tensor(rows), None) if known else torch.tensor(rows)
    given = {"query_positions": positions, "key_positions": positions}
    truth, _ = attention(q, k, v, law, impl="reference", **given)
    if name not in ("self-extend", "dpe"):
        monkeypatch.setattr(blocked, "tiled", None)
    out, _ = attention(q, k, v, law, impl="blocked", **given)
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-12)
    ours, theirs = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, truth))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_many_sequences_with_gaps_have_their_own_sinks(monkeypatch):
    """More tokens in all than a slab of far keys has."""
    law = law_for("3d-rpe")
    monkeypatch.setattr(blocked, "Task", partial(Task, slab=100))
    q, k, v = (x.requires_grad_() for x in vectors(law, b=9))
    rows = [[*range(60 + b), *range(110 + 7 * b, 200 + 6 * b)] for b in range(9)]
    given = {"query_positions": torch.tensor(rows), "key_positions": torch.tensor(rows)}
    results = []
    for impl in ("reference", "blocked"):
        out, lse = attention(q, k, v, law, impl=impl, **given)
        results.append((out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11)


def test_gaps_of_queries_that_are_not_those_of_the_keys_are_exact():
    """The schedule is for tokens that see themselves: these are tiled."""
    law = law_for("3d-rpe")
    q, k, v = vectors(law, b=1)
    keys = torch.cat([torch.arange(80), torch.arange(160, 230)])
    given = {"query_positions": keys + 3, "key_positions": keys}
    out, _ = attention(q, k, v, law, impl="blocked", **given)
    torch.testing.assert_close(out, attention(q, k, v, law, impl="reference", **given)[0], rtol=0, atol=1e-12)


def test_values_may_have_another_size_than_keys():
    law = law_for("3d-rpe")
    q, k, v = vectors(law, e=24)
    out, _ = attention(q, k, v, law, impl="blocked")
    torch.testing.assert_close(out, attention(q, k, v, law, impl="reference")[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["rope", "3d-rpe", "rerope"])
def test_softcap_sinks_and_scale_are_honoured(name):
    """Gemma's softcap by hand; a sink is a key whose value is zero (gpt-oss)."""
    law = law_for(name)
    for options in ({"softcap": 3.0}, {"scale": 0.1}, {"sinks": torch.randn(6, dtype=torch.float64)}):
        results = []
        for impl in ("reference", "blocked"):
            q, k, v = (x.requires_grad_() for x in vectors(law))
            leaves = [q, k, v]
            given = dict(options)
            if "sinks" in given:
                given["sinks"] = given["sinks"].clone().requires_grad_()
                leaves.append(given["sinks"])
            out, lse = attention(q, k, v, law, impl=impl, **given)
            results.append((out, lse, *torch.autograd.grad(out.square().sum(), leaves)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    law = law_for("rope")
    q, k, v = vectors(law, b=1, t=20)
    capped, _ = attention(q, k, v, law, softcap=3.0)
    sunk, lse = attention(q, k, v, law, sinks=torch.full((6,), 0.7, dtype=torch.float64))
    turned_q, turned_k = stock(q, k, law)
    scores = turned_q @ turned_k.repeat_interleave(3, 1).transpose(-1, -2) / 4
    causal = torch.ones(20, 20, dtype=torch.bool).tril()
    values = v.repeat_interleave(3, 1)
    expected = (3 * torch.tanh(scores / 3)).masked_fill(~causal, -torch.inf).softmax(-1) @ values
    torch.testing.assert_close(capped, expected, rtol=0, atol=1e-12)
    weights = scores.masked_fill(~causal, -torch.inf).exp()
    total = weights.sum(-1) + torch.tensor(0.7).double().exp()
    torch.testing.assert_close(sunk, weights @ values / total[..., None], rtol=0, atol=1e-7)
    torch.testing.assert_close(lse, total.log(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("length", [1, 20, 48])
def test_bounded_attention_on_short_inputs_is_the_library_s_own(length):
    """Fact 1: up to w + c tokens nothing is changed, bit for bit."""
    law = law_for("3d-rpe")
    q, k, v = vectors(law, t=length, dtype=torch.float32)
    q, k = stock(q, k, law)
    out, _ = attention(q, k, v, law, rotated=True, impl="blocked")
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["rope", "3d-rpe", "self-extend", "dpe"])
def test_inference_compiles_to_one_graph_and_the_same_bits(name):
    """torch.compile(fullgraph=True): a prefill, and decoding steps with positions as tensors."""
    law = law_for(name)
    q, k, v = vectors(law)

    def prefill(q, k, v, sinks):
        return attention(q, k, v, law, sinks=sinks)

    def step(q, k, v, position):
        return attention(q, k, v, law, rotated=True, query_positions=position, key_positions=torch.arange(TOKENS))

    cases = [(prefill, (q, k, v, torch.linspace(0, 1, 6)))]
    cases += [(step, (q[:, :, t : t + 1], k, v, torch.tensor([t]))) for t in (140, 149)]
    with torch.no_grad():
        for function, given in cases:
            compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
            for a, b in zip(function(*given), compiled(*given), strict=True):
                assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at it when it resumes
def test_training_under_compile_breaks_the_graph_and_keeps_the_gradients():
    law = law_for("3d-rpe")
    results = []
    for compile_it in (False, True):
        q, k, v = (x.requires_grad_() for x in vectors(law))

        def loss(q, k, v):
            return attention(q * 2, k, v, law)[0].square().sum()

        function = torch.compile(loss, backend="aot_eager") if compile_it else loss
        results.append(torch.autograd.grad(function(q, k, v), (q, k, v)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


WRONG = [
    ({"q": torch.randn(1, 2, 5)}, "q is"),
    ({"q": torch.ones(1, 2, 5, 16, dtype=torch.long)}, "pass floating point"),
    ({"k": torch.randn(1, 2, 5, 8)}, "do not fit"),
    ({"v": torch.randn(1, 2, 6, 16)}, "do not fit"),
    ({"k": torch.randn(1, 2, 5, 16).bfloat16()}, "move them to one dtype"),
    ({"q": torch.randn(1, 3, 5, 16)}, "3 query heads are not a multiple of 2 key heads"),
    ({"q": torch.randn(1, 2, 0, 16)}, "at least one of each"),
    ({"q": torch.randn(1, 2, 6, 16)}, "6 queries are more than 5 keys"),
    ({"law": make_law("rope", pretrained=32, head_dim=8)}, "built for head dimension 8, the vectors have 16"),
    ({"query_positions": torch.tensor([0, 1, 3, 2, 4])}, "query_positions fall from 3 to 2 at token 3 of sequence 0"),
    ({"query_positions": torch.arange(5.0)}, "pass integers"),
    ({"key_positions": range(5)}, "key_positions are given without query_positions"),
    ({"query_positions": range(4)}, "for 5 tokens"),
    ({"key_mask": torch.ones(1, 4, dtype=torch.bool)}, "pass bool"),
    ({"sinks": torch.zeros(3)}, "one number per query head"),
    ({"softcap": 0.0}, "softcap is 0.0"),
    ({"scale": float("nan")}, "scale is nan"),
    ({"impl": "fast"}, "impl 'fast' is not known"),
    ({"impl": "blocked", "backend": "cuda"}, "backend 'cuda' is not known"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_input_is_one_clear_sentence(wrong, message):
    law = law_for("3d-rpe")
    q, k, v = vectors(law, b=1, h=2, g=2, t=5, dtype=torch.float32)
    given = {"q": q, "k": k, "v": v, "law": law} | wrong
    with pytest.raises(ConfigError, match=message) as caught:
        attention(**given)
    assert "\n" not in str(caught.value)


def test_vectors_that_are_scattered_in_memory_are_read_right():
    law = law_for("3d-rpe")
    q, k, v = (torch.randn(1, 2, 16, TOKENS).mT for _ in range(3))
    ours, truth = (attention(q, k, v, law, rotated=True, impl=impl)[0] for impl in ("blocked", "reference"))
    torch.testing.assert_close(ours, truth)


def test_a_window_of_one_token_is_that_token():
    """One call, of one key, which is not the first."""
    law = law_for("streaming-llm", window=1, sinks=0)
    q, k, v = vectors(law, b=1, t=1, s=11)
    out, lse = attention(q, k, v, law, rotated=True, impl="blocked")
    expected, expected_lse = attention(q, k, v, law, rotated=True, impl="reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)


def test_a_second_derivative_is_refused_by_library_calls():
    law = law_for("3d-rpe")
    q, k, v = (x.requires_grad_() for x in vectors(law))
    out, lse = attention(q, k, v, law, impl="blocked")
    for loss in (out.sum(), lse.sum()):
        with pytest.raises(ConfigError, match="no second derivative"):
            torch.autograd.grad(loss, q, create_graph=True)


def test_what_a_batch_keeps_for_the_backward_is_no_copy_of_its_vectors():
    """Sequences go together as heads, which takes a copy of q, k and v for the moment alone."""
    law = law_for("3d-rpe")
    q, k, v = (x.requires_grad_() for x in vectors(law, b=5))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attention(q, k, v, law, impl="blocked", rotated=True)
    own = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    assert sum(x.untyped_storage().data_ptr() in own for x in kept) >= 3
    assert sum(x.numel() for x in kept if x.untyped_storage().data_ptr() not in own) <= 2.5 * q.numel()


@pytest.mark.parametrize("name", [name for name in laws() if law_for(name).grows])
@pytest.mark.parametrize("queries", [range(300), range(20, 63)])
def test_frequencies_that_grow_are_those_of_the_whole_text_in_every_tile(name, queries):
    """Values of another width go a tile of queries at a time; some keys may come after the last query."""
    law = law_for(name)
    q, k, v = vectors(law, t=len(queries), s=300, e=8)
    places = {"query_positions": queries, "key_positions": range(300)}
    out, lse = attention(q, k, v, law, impl="blocked", **places)
    expected, expected_lse = attention(q, k, v, law, impl="reference", **places)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("t", [1, 60])
@pytest.mark.parametrize("impl", ["auto", "blocked", "reference"])
@pytest.mark.parametrize("parameters", [{}, {"far": 2, "block": 2, "first": 0}])
def test_what_lies_in_padding_does_not_matter(parameters, impl, t, softcap, device):
    """Not even NaN, which survives a product with a weight of zero."""
    law = make_law("3d-rpe", pretrained=32, context=256, head_dim=16, **parameters)
    q = torch.randn(2, 2, t, 16, dtype=torch.float64, device=device)
    k, v = (torch.randn(2, 2, 60, 16, dtype=torch.float64, device=device) for _ in range(2))
    there = torch.ones(2, 60, dtype=torch.bool, device=device)
    there[0, :9] = False
    places = (there.cumsum(1) - 1).clamp(min=0)
    where = {"query_positions": places[:, -t:], "key_positions": places}
    where |= {"query_mask": there[:, -t:], "key_mask": there, "softcap": softcap}
    expected = attention(q, k, v, law, impl=impl, **where)
    for y in (k, v):
        y[0, :, :9] = torch.nan
    for ours, truth in zip(attention(q, k, v, law, impl=impl, **where), expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)
