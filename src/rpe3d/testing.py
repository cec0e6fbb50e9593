"""Helpers for tests of attention: small laws, random problems, and the rule that judges an implementation.

The rule: against the specification in float64, the error of every row is at most twice that of the eager path (plus
rounding); rows that see no key are exact. No tolerance is chosen by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rpe3d.attention import reference
from rpe3d.attention.problem import Problem, check
from rpe3d.geometry import Law, make_law
from rpe3d.rotation import cos_sin, rotate

SMALL: dict[str, dict[str, Any]] = {
    "3d-rpe": {"chunk": 16, "window": 32, "reach": 64, "focus": 1.5, "fade": 0.75, "sinks": 3},
    "3d-rpe-definition": {"chunk": 50},
    "3d-rpe-dual-chunk": {"chunk": 20, "window": 48, "phi_base": 1.5},
    "dca": {"chunk": 20, "window": 48},
    "self-extend": {"window": 40, "group": 16},
    "rerope": {"window": 33},
    "leaky-rerope": {"window": 9},
    "streaming-llm": {"window": 37, "sinks": 4},
    "string": {"shift": 50, "local": 5},
    "dpe": {"window": 12, "scales": (3, 16, 1, 40)},
    "lampe": {"head": 12, "mapped": 40, "length": 130, "tail": 9},
}
"""Parameters with which about 150 tokens cover every region of a law, with borders inside tiles."""


def small_law(name: str, **changes: Any) -> Law:
    """Return a law for a model of 64 positions, extended to 256."""
    given = {"pretrained": 64, "context": 256, "head_dim": 64} | SMALL.get(name, {}) | changes
    return make_law(name, **given)


def random_problem(
    law: Law,
    device: torch.device | str = "cpu",
    *,
    b: int = 1,
    h: int = 6,
    g: int = 2,
    t: int = 1,
    s: int = 151,
    e: int | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Problem:
    """Return random rotated q, k, v in Hugging Face's memory layout; queries come last unless positions are given."""
    d = law.rotary.head_dim
    q = torch.randn(b, t, h, d, device=device).to(dtype).transpose(1, 2)
    k, v = (torch.randn(b, g, s, width, device=device).to(dtype) for width in (d, e or d))
    given: dict[str, Any] = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    keys = given.setdefault("key_positions", range(s))
    if isinstance(keys, range):
        given.setdefault("query_positions", range(keys.stop - t, keys.stop))
    return check(q, k, v, law, rotated=True, **given)


def in_float64(x: Problem) -> Problem:
    """Return a problem in float64, with NaN (as in unfilled slots) replaced by 0."""
    return replace(x, q=x.q.double(), k=x.k.double().nan_to_num(), v=x.v.double().nan_to_num())


def eager(x: Problem, choosers: reference.Choosers | None = None) -> tuple[Tensor, Tensor]:
    """Return the eager solution, without a kernel and in the dtype of q: rotate, then attend as Hugging Face does.

    `choosers` replace the specification's choice of keys.
    """
    group = x.q.shape[1] // x.k.shape[1]
    scores, v = _eager_scores(x, choosers), x.v.nan_to_num().repeat_interleave(group, 1)
    if x.law.both is not None:
        other = _eager_scores(replace(x, law=x.law.both[1])) - reference.HELD
        scores, v = torch.cat([scores, other], -1), torch.cat([v, v], 2)
    if x.sinks is not None:
        sink = x.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
    return weights[..., : v.shape[2]] @ v, scores.float().logsumexp(-1)


def _eager_scores(x: Problem, choosers: reference.Choosers | None = None) -> Tensor:
    k = x.k.nan_to_num().repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
    query, key = x.positions()
    pairs = torch.broadcast_tensors(query[:, :, None], key[:, None, :])
    scores = torch.zeros(*x.q.shape[:3], k.shape[2], dtype=x.q.dtype, device=x.q.device)
    for region in x.law.regions:
        turned = []
        for y, turn, p in ((x.q, region.query, query), (k, region.key, key)):
            table = cos_sin(x.angles(turn, p, x.frequencies), scaling=x.scaling)
            turned.append(rotate(y, None, *table, interleaved=x.law.rotary.interleaved, impl="reference")[0])
        here = turned[0] @ turned[1].transpose(-1, -2) * x.scale
        scores = torch.where(region.contains(*pairs)[:, None], here, scores)
    if x.softcap is not None:
        scores = x.softcap * torch.tanh(scores / x.softcap)
    seen = reference.visible(x)[:, None] & reference.chosen(x, choosers)
    for region in x.law.regions:
        if region.fade is not None:
            far = region.contains(*pairs)[:, None] & seen
            sharpness, loss = (
                y.float()[:, None, :, None] for y in (region.fade.sharpness(query), region.fade.loss(query))
            )
            sharp = (scores * sharpness).masked_fill(~far, torch.finfo(scores.dtype).min)
            weight = sharp.logsumexp(-1, keepdim=True) / sharpness - loss
            scores = torch.where(far, sharp.log_softmax(-1) + weight, scores).to(x.q.dtype)
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)


def unit(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative unit in the last place of the arithmetic that attention is computed in.

    In float32 a GPU has 22 bits: its exponential (`ex2.approx`) is exact to 2^-22, and matrix products, in Triton as in
    libraries, are three TF32 products, in which two numbers of 11 bits stand for one of 24.
    """
    return 2.0**-22 if dtype == torch.float32 and device.type == "cuda" else torch.finfo(dtype).eps


def assert_as_good(
    x: Problem, out: Tensor, lse: Tensor, *, kernel: bool = True, choosers: reference.Choosers | None = None
) -> None:
    """Assert that an implementation is as good as the eager path.

    Rounding is two units in the last place of the largest result, one for each product, for heads of up to 64
    dimensions: the rounding of longer sums grows with their root. Triton's interpreter truncates to bf16 instead of
    rounding, which shifts all scores one way: there the log-sum-exp is held to the precision of q.
    `kernel=False` is for library calls and plain PyTorch, which are held to one unit and may not truncate. `choosers`
    replace the specification's choice of keys.
    """
    assert out.shape == (*x.q.shape[:3], x.v.shape[3])
    assert out.dtype == x.q.dtype
    assert lse.dtype == torch.promote_types(x.q.dtype, torch.float32)
    truths = reference.attend(in_float64(x), choosers)
    sees = truths[1] > -torch.inf
    assert (out[~sees] == 0).all()
    assert (lse[~sees] == -torch.inf).all()
    for ours, truth, plain in zip((out, lse), truths, eager(x, choosers), strict=True):
        truth = truth[sees]
        error, eager_error = ((y[sees].double() - truth).abs().max() for y in (ours, plain))
        cut = kernel and x.q.dtype == torch.bfloat16 and not x.q.is_cuda
        rounding = (2 if kernel else 1) * unit(x.q.dtype if cut else ours.dtype, x.q.device) * truth.abs().max()
        rounding *= max(1.0, (x.q.shape[3] / 64) ** 0.5)
        assert error <= 2 * (eager_error + rounding), f"{error:.3g} > 2 ({eager_error:.3g} + {rounding:.3g})"


def gradients(x: Problem, solve: Any, weight: Tensor, logs: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the gradients of Σ out · weight (+ Σ lse · logs) with respect to q, k and v, for a function of the three.

    If the problem has sinks, their gradient is returned as well, and the function takes `sinks`.
    """
    leaves = [y.detach().clone().requires_grad_() for y in (x.q, x.k, x.v, x.sinks) if y is not None]
    out, *lse = solve(*leaves[:3], **({} if x.sinks is None else {"sinks": leaves[3]}))
    total = (out * weight.to(out.dtype)).sum()
    if logs is not None:
        total = total + torch.where(logs != 0, lse[0] * logs, 0.0).sum()
    return torch.autograd.grad(total, leaves)


def assert_gradients_as_good(
    x: Problem, solve: Any, *, logs: bool = False, choosers: reference.Choosers | None = None, plain: Any = None
) -> None:
    """Assert that an implementation's gradients are as good as those of the eager path.

    `logs` includes the gradient of the log-sum-exp. `choosers` replace the specification's choice of keys. `plain` is
    the called library's attention without a law: its own error on these vectors is allowed as well.
    """
    sees = reference.visible(x).any(-1)[:, None].double()
    weight = torch.randn(*x.q.shape[:3], x.v.shape[3], dtype=torch.float64, device=x.q.device) * sees[..., None]
    other = torch.randn(x.q.shape[:3], dtype=torch.float64, device=x.q.device) * sees if logs else None
    exact = in_float64(x)

    def by(attend: Any, x: Problem) -> tuple[Tensor, ...]:
        return gradients(x, lambda q, k, v, **rest: attend(replace(x, q=q, k=k, v=v, **rest), choosers), weight, other)

    def off(some: Sequence[Tensor], others: Sequence[Tensor]) -> list[float]:
        return [float((a.double() - b).abs().max()) for a, b in zip(some, others, strict=True)]

    truths, found = by(reference.attend, exact), gradients(x, solve, weight, other)
    usual = off(by(eager, x), truths)
    if plain is not None:
        own = off(*(gradients(y, plain, weight) for y in (x, exact)))
        usual = [max(pair) for pair in zip(usual, own, strict=True)]
    for name, error, allowed, truth in zip("qkvs", off(found, truths), usual, truths, strict=False):
        rounding = 2 * unit(x.q.dtype, x.q.device) * float(truth.abs().max())
        assert error <= 2 * (allowed + rounding), f"d{name}: {error:.3g} > 2 ({allowed:.3g} + {rounding:.3g})"
