"""The gradient of a chosen far field by kernels: that of the specification, for the choice that the kernels made."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from test_chosen_kernels import Given, law_for, picked, problem
from torch.utils.checkpoint import checkpoint

from rpe3d import ConfigError
from rpe3d.attention import attention, chosen, explain
from rpe3d.testing import assert_gradients_as_good, gradients

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]
LONG = 147  # the last queries choose 5 of 8 blocks


def solving(made):
    """A problem as kernels, as a function of vectors."""
    return lambda q, k, v, sinks=None: made(q, k, v, sinks)


def assert_exact(x, made=None, **options):
    """By the 2x rule, against the specification that is told what the kernels chose."""
    made = chosen.Kernels(x) if made is None else made
    y = x if x.rotated else replace(x, **dict(zip("qk", chosen.rotated(x, x.q, x.k), strict=True)))
    region = x.law.regions[-1]
    given = {region: Given(picked(y, made), region.choice.size, x.q.shape[1] // x.k.shape[1])}
    assert_gradients_as_good(x, solving(made), choosers=given, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"dtype": torch.float32, "h": 4, "g": 1},
        {"dtype": torch.float32, "t": 50, "s": 203},
        {},
        {"h": 4, "g": 1},
        {"h": 10, "g": 1},
        {"h": 2, "g": 2},
        {"b": 2},
        {"t": 77},
    ],
)
def test_gradients_are_as_good_as_the_eager_path_s(options, device):
    """Heads that choose together, one by one and more than a program has; batches; a prompt's end; nothing far."""
    assert_exact(problem(law_for(), device, **{"dtype": torch.bfloat16, "t": LONG} | options))


@pytest.mark.parametrize(
    ("law", "dtype"),
    [
        ({"block": 4, "far": 11}, torch.float32),
        ({"block": 32, "far": 2}, torch.float32),
        ({"chunk": 128, "window": 128, "reach": 256, "block": 128, "far": 1, "head_dim": 16}, torch.float32),
        ({"interleaved": True}, torch.float32),
        ({"rotary_dim": 16}, torch.float32),
        ({"rotary_dim": 24, "interleaved": True, "head_dim": 40}, torch.bfloat16),
        ({"head_dim": 80}, torch.float16),
        ({"head_dim": 256}, torch.bfloat16),
    ],
)
def test_blocks_and_vectors_of_any_size_have_their_gradient(law, dtype, device):
    x = problem(law_for(**{"far": 5} | law), device, dtype=dtype, t=403 if "chunk" in law else LONG, h=2, g=1)
    assert chosen.kernels_refusal(x) is None
    assert_exact(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
def test_sinks_and_the_log_sum_exp_have_their_gradient(sinks, dtype, device):
    extra = {"sinks": torch.randn(4).to(dtype)} if sinks else {}
    assert_exact(problem(law_for(), device, dtype=dtype, t=LONG, **extra), logs=True)


def test_the_log_sum_exp_alone_has_its_gradient(device):
    """The output has none then, and autograd gives None in its place."""
    x = problem(law_for(), device, t=LONG)
    made = chosen.Kernels(x)
    weight, logs = torch.zeros_like(x.q), torch.randn(x.q.shape[:3], device=device)
    both = gradients(x, solving(made), weight, logs)
    q, k = (y.detach().clone().requires_grad_() for y in (x.q, x.k))
    alone = torch.autograd.grad((made(q, k, x.v, None)[1] * logs).sum(), (q, k))
    torch.testing.assert_close(alone, both[:2])
    assert not both[2].any()


def test_vectors_before_rope_have_their_gradient(device):
    x = replace(problem(law_for(), device, t=LONG), rotated=False)
    assert_exact(x)


def test_a_sequence_in_a_batch_has_the_gradient_that_it_has_alone(device):
    """Padded on the left, on the right and entirely; slots of padding have none."""
    law, (n, pad) = law_for(), (130, 17)
    x = problem(law, device, b=3, t=LONG, s=LONG)
    starts = torch.tensor([pad, 0, 0])
    places = (torch.arange(LONG) - starts[:, None]).clamp(min=0).to(device)
    mask = torch.zeros(3, LONG, dtype=torch.bool)
    mask[0, pad:] = mask[1, :n] = True
    given = {"query_positions": places, "key_positions": places, "query_mask": mask, "key_mask": mask}
    y = problem(law, device, b=3, t=LONG, s=LONG, sinks=torch.randn(4), **given)
    y = replace(y, q=x.q, k=x.k, v=x.v)
    weight = torch.randn_like(x.q) * y.query_mask[:, None, :, None]
    logs = torch.randn(x.q.shape[:3], device=device) * y.query_mask[:, None]
    found = gradients(y, solving(chosen.Kernels(y)), weight, logs)
    dsinks = torch.zeros_like(y.sinks)
    for b, tokens in enumerate((slice(pad, LONG), slice(n), slice(0))):
        here = (slice(b, b + 1), slice(None), tokens)
        outside = (b, slice(None), ~y.query_mask[b])
        assert not any(g[outside].any() for g in found[:3])
        if b == 2:
            continue
        length = tokens.stop - (tokens.start or 0)
        alone = problem(law, device, t=length, s=length, sinks=y.sinks)
        alone = replace(alone, q=x.q[here], k=x.k[here], v=x.v[here])
        truth = gradients(alone, solving(chosen.Kernels(alone)), weight[here], logs[here])
        for ours, theirs in zip(found[:3], truth, strict=False):
            torch.testing.assert_close(ours[here], theirs, rtol=1e-4, atol=1e-5)
        dsinks += truth[3]
    torch.testing.assert_close(found[3], dsinks, rtol=1e-4, atol=1e-4)


def test_padding_alone_has_no_gradient(device):
    mask = torch.zeros(1, 40, dtype=torch.bool, device=device)
    x = problem(law_for(), device, t=40, s=40, query_mask=mask, key_mask=mask)
    for found in gradients(x, solving(chosen.Kernels(x)), torch.ones_like(x.q)):
        assert not found.any()


def test_a_little_memory_is_enough(device, monkeypatch):
    """One key head, one tile of queries and few scores at a time give what all of them at once do."""
    from rpe3d.attention.chosen import backward

    x = problem(law_for(), device, b=2, t=LONG)
    weight = torch.randn_like(x.q)
    made = chosen.Kernels(x)
    (span,) = made.spans
    whole = gradients(x, solving(made), weight)
    assert len(list(made.few_heads(span, x.q, x.k))) == 1
    made.room = made.levels = made.aims = 1
    monkeypatch.setattr(backward, "ROOM", 1)
    assert len(list(made.few_heads(span, x.q, x.k))) == 2
    assert [len(some) for some in made._stretches(span.queries, 2, 1, 1)] == [32, 32]
    for ours, truth in zip(gradients(x, solving(made), weight), whole, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)


def far_part(x, made, weight):
    """What far keys give to dq, dk and dv."""
    from rpe3d.attention.chosen import backward

    (span,) = made.spans
    out, lse = made(x.q, x.k, x.v, None)
    found = [torch.zeros(y.shape, dtype=torch.float32, device=y.device) for y in (x.q, x.k, x.v)]
    backward.add_far(made, span, x.q, x.k, x.v, weight, lse, backward.products(weight, out), *found)
    return found


def test_the_far_part_has_the_same_bits_in_every_run(device):
    """No sum depends on which program comes first."""
    x = problem(law_for(), device, t=230, h=2, g=1, dtype=torch.bfloat16)
    made, weight = chosen.Kernels(x), torch.randn_like(x.q)
    first = far_part(x, made, weight)
    for ours, before in zip(far_part(x, made, weight), first, strict=True):
        assert torch.equal(ours, before)
        assert ours.any()


def test_no_gradient_reaches_a_key_that_nobody_chose(device):
    x = problem(law_for(), device, t=233)
    made = chosen.Kernels(x)
    weight = torch.randn_like(x.q)
    weight[:, :, :-1] = 0
    near = torch.arange(233) >= (232 // 32 - 2) * 32
    blocks = picked(x, made)[0, :, -1]
    seen = near | torch.nn.functional.pad(blocks.repeat_interleave(16, 1), (0, 233 - blocks.shape[1] * 16))
    assert not seen.all(1).any()
    _, *found = gradients(x, solving(made), weight)
    for gradient in found:
        assert torch.equal((gradient[0] != 0).any(-1).cpu(), seen)


def test_no_gradient_depends_on_a_later_token(device):
    x = problem(law_for(), device, t=LONG)
    made = chosen.Kernels(x)
    for cut in (101, 128):
        weight = torch.randn_like(x.q)
        weight[:, :, cut:] = 0
        vectors = [y.clone() for y in (x.q, x.k, x.v)]
        for y in vectors:
            y[:, :, cut:] = torch.randn_like(y[:, :, cut:])
        changed = replace(x, **dict(zip("qkv", vectors, strict=True)))
        for before, after in zip(*(gradients(y, solving(made), weight) for y in (x, changed)), strict=True):
            torch.testing.assert_close(before[:, :, :cut], after[:, :, :cut], rtol=1e-5, atol=1e-6)
            assert not before[:, :, cut:].any()
            assert not after[:, :, cut:].any()


@pytest.mark.parametrize("mutant", ["none", "no delta", "turned once more", "no scale", "one tile short"])
def test_a_wrong_gradient_does_not_pass(mutant, device, monkeypatch):
    from rpe3d.attention.chosen import backward

    x = problem(law_for(), device, t=LONG, dtype=torch.bfloat16)
    made = chosen.Kernels(x)
    if mutant == "no delta":
        monkeypatch.setattr(backward, "products", lambda do, out: torch.zeros_like(do[..., 0], dtype=torch.float32))
    elif mutant == "turned once more":
        turn = backward.rotate  # of queries in bfloat16, and of gradients in float32 back

        def once_more(y, _, cos, sin, **given):
            return turn(y, None, cos, -sin if y.dtype == torch.float32 else sin, **given)

        monkeypatch.setattr(backward, "rotate", once_more)
    elif mutant == "no scale":
        made.problem = replace(made.problem, scale=1.2 * x.scale)  # of both far parts; the near calls have their own
    elif mutant == "one tile short":
        inverse = backward.inverse
        monkeypatch.setattr(backward, "inverse", lambda *given: (*(y := inverse(*given))[:2], (y[2] - 1).clamp(min=0)))
    if mutant == "none":
        assert_exact(x, made)
        return
    with pytest.raises(AssertionError, match=r"d[qkv]: .* > 2"):
        assert_exact(x, made)


def test_a_second_derivative_is_refused(device):
    x = problem(law_for(), device, t=101, h=1, g=1)
    q = x.q.detach().clone().requires_grad_()
    out, _ = chosen.Kernels(x)(q, x.k, x.v, None)
    with pytest.raises(ConfigError, match="no second derivative"):
        torch.autograd.grad(out.square().sum(), q, create_graph=True)


def test_activations_may_be_recomputed(device):
    x = problem(law_for(), device, t=101, h=2, g=1)
    weight, solve = torch.randn_like(x.q), solving(chosen.Kernels(x))
    again = gradients(x, partial(checkpoint, solve, use_reentrant=False), weight)
    for ours, truth in zip(again, gradients(x, solve, weight), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)


def test_training_takes_the_kernels_on_a_gpu_and_the_specification_elsewhere(device):
    """And the specification in float32, whose gradients by kernels an H200 has not shown to be good enough."""
    x = problem(law_for(), device, t=LONG)
    learning = replace(x, q=x.q.detach().clone().requires_grad_())
    assert explain(x)[0] == "chosen"
    assert explain(learning)[0] == "blocked"
    where = "its kernels run on a GPU, not on cpu"
    if device.type == "cuda":
        half = [y.bfloat16() for y in (x.q, x.k, x.v)]
        assert explain(replace(x, q=half[0].requires_grad_(), k=half[1], v=half[2]))[0] == "chosen"
        where = "the kernels' gradient is for float16 and bfloat16"
    assert chosen.refusal(learning) == f"it has no gradient here: {where}"
    weight = torch.randn_like(x.q)
    solve = partial(attention, law=x.law, rotated=True)
    for ours, truth in zip(*(gradients(x, y, weight) for y in (solve, solving(chosen.Kernels(x)))), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)
