"""Attention problems at random, held to complex arithmetic in float64 that is written down here and nowhere else.

Laws, heads, lengths, positions with offsets and gaps, masks, strides, types, softcap, sinks, values of another size:
what `attention` takes it computes, by every implementation that takes it, with gradients; or it refuses in words.
"""

from __future__ import annotations

import math
import random
from functools import partial
from importlib.util import find_spec
from itertools import product

import pytest
import torch

from rpe3d import ConfigError, laws, make_law
from rpe3d.attention import attention, decode
from rpe3d.attention.problem import check
from rpe3d.geometry import LAWS

pytestmark = pytest.mark.usefixtures("one_thread")
CASES = 12
OWN = {
    "3d-rpe": [
        {"chunk": 8, "window": 16, "reach": 28, "focus": 1.5, "fade": 0.75, "sinks": 3},
        {"chunk": 16, "window": 16, "reach": 32, "focus": 0, "fade": 0},
        {"chunk": 4, "window": 12, "reach": 20, "focus": 0.5, "fade": 0},
        {"chunk": 1, "window": 9, "reach": 30, "focus": 0, "fade": 0},
        {"chunk": 8, "window": 8, "reach": 20, "far": 3, "block": 4},
        {
            "chunk": 4,
            "window": 8,
            "reach": 16,
            "far": 2,
            "block": 4,
            "decay": 0.6,
            "focus": 1.5,
            "fade": 0.5,
            "sinks": 2,
        },
        {"chunk": 2, "window": 2, "reach": 9, "far": 1, "block": 1},
        {"chunk": 8, "window": 8, "reach": 20, "far": 2, "block": 4, "full": "all"},
        {"chunk": 4, "window": 8, "reach": 16, "far": 2, "block": 4, "focus": 1, "sinks": 3, "full": "all"},
    ],
    "3d-rpe-definition": [{"chunk": 24}, {"chunk": 16, "phi_base": 1.5}],
    "3d-rpe-dual-chunk": [{"chunk": 20, "window": 24, "phi_base": 1.5}],
    "dca": [{"chunk": 20, "window": 24}, {"chunk": 16, "window": 16}],
    "self-extend": [{"window": 9, "group": 30}, {"window": 12, "group": 64}],
    "rerope": [{"window": 9}],
    "leaky-rerope": [{"window": 9, "slope": 0.05}],
    "streaming-llm": [{"window": 11, "sinks": 3}],
    "dpe": [{"window": 12, "scales": (3, 16, 1, 40)}],
    "lampe": [
        {"head": 9, "mapped": 20, "length": 90, "tail": 7},
        {"head": 3, "mapped": 31, "length": 100},
        {"head": 16, "length": 31},
        {"head": 9, "mapped": 20, "tail": 0},
    ],
}
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}


def complex_scores(q, k, angles, pairs, interleaved, scaling):
    """Re(q k* e^{i angle}) over the planes that turn, and the plain product of the rest."""

    def planes(x):
        y = x[..., : 2 * pairs]
        return (
            torch.complex(y[..., 0::2], y[..., 1::2]) if interleaved else torch.complex(y[..., :pairs], y[..., pairs:])
        )

    turned = (planes(q)[:, :, None] * planes(k)[:, None].conj() * torch.exp(1j * angles)).real.sum(-1)
    return turned * scaling**2 + q[..., 2 * pairs :] @ k[..., 2 * pairs :].mT


def unchosen(q, k, query, key, tokens, region):
    """Which keys a query does not choose, by the words of `Choice`: q [h, t, d] and k [g, s, d] before RoPE."""
    choice, group = region.choice, len(q) // len(k)
    block = key // choice.size
    hidden = torch.zeros(len(q), len(query), len(key), dtype=torch.bool)
    for g, t in product(range(len(k)), range(len(query))):
        far = region.contains(query[t].expand_as(key), (block + 1) * choice.size - 1) & tokens
        blocks, heads = block[far].unique(), slice(g * group, (g + 1) * group)
        if len(blocks) <= choice.most:
            continue

        def mean(some, keys=k[g]):
            return (keys * (some & tokens)[:, None]).sum(0) / (some & tokens).sum().clamp(min=1)

        def unit(x, of):
            return x / x.norm() if x.norm() > 1e-5 * of.norm() else torch.zeros_like(x)

        z = mean(key < min(choice.centre, region.unit))
        last = torch.where(tokens & (key <= query[t]), query[t] - key, choice.recent)
        weight = torch.where(last < choice.recent, choice.decay ** last.double(), 0.0)
        asked = q[heads, t].mean(0)
        aim = unit(weight @ (k[g] - z), weight @ k[g]) + choice.query * unit(asked, asked)
        means = [mean((key >= b * choice.size - choice.size // 2) & (block <= b)) for b in blocks]
        summaries = torch.stack([unit(m - z, m) for m in means])
        score = ((summaries.bfloat16().double() @ aim.bfloat16().double()) / choice.STEP).round()
        score[: choice.always] = torch.inf
        nearest_first = score.flip(0).argsort(descending=True, stable=True)
        best = blocks.flip(0)[nearest_first[: choice.most]]
        hidden[heads, t] = far & ~torch.isin(block, best)
    return hidden


def logs(q, k, law, given, b):
    """The log of every pair's weight in one sequence: q [h, t, d] and k [g, s, d], before RoPE."""
    query, key = given["query_positions"][b], given["key_positions"][b]
    angles = law.relative_angles(query[:, None], key[None])
    hidden = (key[None] > query[:, None]) | angles[..., 0].isnan()
    hidden |= ~given["query_mask"][b][:, None] | ~given["key_mask"][b][None]
    heads, rotary = k.repeat_interleave(len(q) // len(k), 0), law.rotary
    scores = complex_scores(q, heads, angles.nan_to_num(), rotary.pairs, rotary.interleaved, law.attention_scaling)
    scores = scores * given["scale"]
    if given["softcap"]:
        scores = given["softcap"] * torch.tanh(scores / given["softcap"])
    hidden = hidden.expand_as(scores).clone()
    for region in law.regions:
        if region.choice is not None:
            hidden |= unchosen(q.detach(), k.detach(), query, key, given["key_mask"][b], region)
    scores = scores.masked_fill(hidden, -torch.inf)
    for region in law.regions:
        if region.fade is not None:
            far = region.contains(*torch.broadcast_tensors(query[:, None], key[None])) & ~hidden
            span = query.double().clamp(min=region.fade.span)
            tau = ((span.log() / math.log(region.fade.span)) ** region.fade.focus)[:, None]
            sharp = scores.masked_fill(~far, -torch.inf) * tau
            total = sharp.logsumexp(-1, keepdim=True)
            loss = region.fade.rate * (span / region.fade.span).log()[:, None]
            scores = torch.where(far, sharp - total + total / tau - loss, scores)
    return scores


def oracle(x, law, given):
    """The output and the log-sum-exp of every row, one sequence at a time."""
    q, k, v = (y.double() for y in x)
    outs, lses = [], []
    for b in range(len(q)):
        parts = [logs(q[b], k[b], law, given, b)]
        if law.both is not None:  # all far keys once more, at 1/e of their weight
            parts.append(logs(q[b], k[b], law.both[1], given, b) - 1)
        values = v[b].repeat_interleave(q.shape[1] // k.shape[1], 0).repeat(1, len(parts), 1)
        if given["sinks"] is not None:
            parts.append(given["sinks"].double()[:, None, None].expand(-1, q.shape[2], 1))
        scores = torch.cat(parts, -1)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])[..., : values.shape[1]]
        outs.append(weights @ values)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def turned(y, positions, law):
    """By the model's own RoPE, in complex128."""
    pairs, interleaved = law.rotary.pairs, law.rotary.interleaved
    z = y[..., : 2 * pairs].double()
    z = torch.complex(z[..., 0::2], z[..., 1::2]) if interleaved else torch.complex(z[..., :pairs], z[..., pairs:])
    z = z * torch.exp(1j * positions[:, None, :, None].double() * law.frequencies()) * law.attention_scaling
    parts = torch.stack([z.real, z.imag], -1).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)
    return torch.cat([parts, y[..., 2 * pairs :].double()], -1)


def vectors(draw, shape, dtype):
    """Random numbers in one of the orders that models leave them in memory."""
    b, h, n, d = shape
    x = torch.randn(b, h, n, d, dtype=torch.float64)
    kind = draw.randrange(4)
    if kind == 1:
        x = torch.randn(b, n, h, d, dtype=torch.float64).transpose(1, 2)
    elif kind == 2:
        x = torch.randn(b, h, d, n, dtype=torch.float64).transpose(2, 3)
    elif kind == 3:
        x = torch.randn(b, h, n + 5, d + 3, dtype=torch.float64)[:, :, 2 : n + 2, :d]
    return x.to(dtype)


def places(draw, b, t, s):
    """Positions of queries and keys, which rise: consecutive, from an offset, or with gaps; queries are the last."""
    keys = torch.arange(s).repeat(b, 1) + torch.tensor([[draw.choice([0, 0, 13, 40])] for _ in range(b)])
    if draw.random() < 0.3:
        keys = keys + torch.randint(0, 2, (b, s)).cumsum(1) * draw.choice([1, 7])
    shift = draw.choice([0, 0, 0, 3])
    queries = keys[:, s - t :] + shift if t <= s else torch.arange(t).repeat(b, 1)
    return queries, keys


def given_as(draw, positions, mask):
    """As a range, one row or a tensor: what says the same. Padding stands anywhere."""
    row = positions[0]
    if (positions == row).all():
        if (row.diff() == 1).all() and draw.random() < 0.6:
            return range(int(row[0]), int(row[-1]) + 1)
        if draw.random() < 0.5:
            return row
    return torch.where(mask, positions, 0) if draw.random() < 0.3 else positions


def one_case(draw, name):
    own = draw.choice(OWN.get(name, [{}]))
    d = draw.choice([16, 16, 32, 24])
    rotary = {"rotary_dim": d // 2} if name != "dpe" and draw.random() < 0.2 else {}
    if name == "dpe":
        d = 16
    lengths = (
        {"pretrained": 64, "context": 64, "shift": 20, "local": 5}
        if name == "string"
        else {"pretrained": 32, "context": 512}
    )
    law = make_law(name, head_dim=d, interleaved=draw.random() < 0.3, **lengths, **own, **rotary)
    b, g = draw.randrange(1, 4), draw.choice([1, 2])
    h, s = g * draw.choice([1, 3]), draw.choice([1, 5, 30, 64, 75, 130])
    t = min(s, draw.choice([1, 1, 3, 16, 17, 40, s]))
    dtype = draw.choice([torch.float64] * 4 + [torch.float32] * 2 + [torch.bfloat16, torch.float16])
    e = draw.choice([d] * 4 + [8])
    q, k, v = (vectors(draw, shape, dtype) for shape in ((b, h, t, d), (b, g, s, d), (b, g, s, e)))
    queries, keys = places(draw, b, t, s)
    masks = [torch.ones(b, n, dtype=torch.bool) for n in (t, s)]
    kind = draw.randrange(5)
    if kind == 1:  # padding on one side
        for n, mask in enumerate(masks):
            for row in mask:
                cut = draw.randrange(len(row) + 1)
                row[:cut] = n != draw.randrange(2)
    elif kind == 2:
        masks = [torch.rand(mask.shape) < 0.7 for mask in masks]
    elif kind == 3:
        masks[0][draw.randrange(b)] = False
    given = {
        "query_positions": queries,
        "key_positions": keys,
        "query_mask": masks[0],
        "key_mask": masks[1],
        "scale": draw.choice([1 / math.sqrt(d), 0.1]),
        "softcap": draw.choice([None, None, None, 5.0]),
        "sinks": draw.choice([None, torch.randn(h, dtype=dtype)]),
    }
    stock = draw.random() < 0.7
    exact = (turned(q, queries, law).to(dtype), turned(k, keys, law).to(dtype)) if stock else (q, k)

    def expected(q, k, v):
        return oracle((*(oracle_inputs((q, k), (queries, keys), law) if stock else (q, k)), v), law, given)

    arguments = {**given, "rotated": stock}
    for positions, mask in (("query_positions", "query_mask"), ("key_positions", "key_mask")):
        arguments[positions] = given_as(draw, given[positions], given[mask])
        if given[mask].all() and draw.random() < 0.8:
            arguments[mask] = None
    return law, (*exact, v), arguments, expected, dtype


def oracle_inputs(vectors, positions, law):
    """Back from where the model's RoPE put them, after their rounding: the problem that attention is really given."""
    backwards = []
    for y, p in zip(vectors, positions, strict=True):
        pairs, interleaved = law.rotary.pairs, law.rotary.interleaved
        z = y[..., : 2 * pairs].double()
        z = torch.complex(z[..., 0::2], z[..., 1::2]) if interleaved else torch.complex(z[..., :pairs], z[..., pairs:])
        z = z * torch.exp(-1j * p[:, None, :, None].double() * law.frequencies()) / law.attention_scaling
        parts = torch.stack([z.real, z.imag], -1).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)
        backwards.append(torch.cat([parts, y[..., 2 * pairs :].double()], -1))
    return backwards


def by_kernel(x):
    from rpe3d.attention.decode import kernel as decode_kernel

    return decode_kernel.Step(x)(x.q, x.k, x.v, x.sinks)


@pytest.mark.parametrize("name", [name for name in laws() if not LAWS[name].grows])  # where angles depend on the length
def test_any_problem_is_solved_or_refused(name, fuzz, device):
    solved, cases = 0, CASES * fuzz // (3 if device.type == "cuda" else 1)  # a GPU compiles kernels for most cases
    for seed in range(cases):
        draw = random.Random(f"{name} {seed}")
        torch.manual_seed(seed)
        law, x, given, expected, dtype = one_case(draw, name)
        out, lse = expected(*x)
        there = [y.to(device) for y in x]
        given = {name: y.to(device) if isinstance(y, torch.Tensor) else y for name, y in given.items()}
        impls = ("auto", "blocked", "decode") if law.both is None else ("auto", "reference")
        runs = {impl: partial(attention, *there, law, impl=impl, **given) for impl in impls}
        if draw.random() < 0.2 and find_spec("triton") is not None:
            problem = check(*there, law, **given)
            few = problem.q.shape[2] <= decode.MOST_QUERIES and law.both is None
            if few and problem.rotated and decode.kernel_refusal(problem) is None:
                runs["kernel"] = partial(by_kernel, problem)
        for impl, run in runs.items():
            try:
                found = run()
            except ConfigError:
                assert impl == "decode", "only a decoding step is made for some problems alone"
                continue
            solved += 1
            close = max(CLOSE[dtype], 1e-4 if impl == "kernel" else 0) * max(1.0, float(out.abs().max()))
            where = f"{impl}, seed {seed}: {law.json}, {[tuple(y.shape) for y in x]}, {dtype}"
            torch.testing.assert_close(
                found[0].double().cpu(), out, rtol=0, atol=close, msg=lambda m, w=where: f"{w}\n{m}"
            )
            torch.testing.assert_close(
                found[1].double().cpu(), lse, rtol=0, atol=3 * close, msg=lambda m, w=where: f"{w}\n{m}"
            )
        if dtype == torch.float64 and draw.random() < 0.5:
            pairs = zip(gradients(partial(attention, law=law, **given), there), gradients(expected, x), strict=True)
            for ours, truth in pairs:
                torch.testing.assert_close(ours.cpu(), truth, rtol=0, atol=1e-8 * max(1.0, float(truth.abs().max())))
    assert solved > cases


def gradients(solve, x):
    """Of some number that depends on the output and the log-sum-exp of every row that sees something."""
    leaves = [y.detach().clone().requires_grad_() for y in x]
    out, lse = solve(*leaves)
    weights = torch.arange(out.numel(), dtype=torch.float64).sin().view(out.shape).to(out.device)
    seen = torch.where(lse > -torch.inf, lse, 0.0)
    total = (out * weights).sum() + (seen * weights[..., 0]).sum()
    return torch.autograd.grad(total, leaves)
