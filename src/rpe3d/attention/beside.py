"""Computes attention under a law that has another beside it: each by its own implementation, then one merge.

Chosen for laws with `Law.both`. Equals `reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rpe3d.attention.chosen.memory import Memory, remembers
from rpe3d.attention.merge import Part, merge_checked, products
from rpe3d.attention.problem import Prepared, Problem, refuse_second_derivative
from rpe3d.attention.reference import HELD
from rpe3d.geometry import Law


class Beside:
    """A problem prepared under both of its laws."""

    def __init__(self, x: Problem, other: Law, first: Prepared, second: Prepared) -> None:
        self.first, self.second = first, second
        self.remembers = remembers(first)
        # A short prompt sees nothing beside the law: it is answered by that alone, bit for bit.
        nearest = min((region.first or 0) * region.unit for region in other.regions)
        self.alone = isinstance(x.queries, range) and x.queries[-1] < nearest

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp."""
        first = self.first
        out, lse = first(q, k, v, sinks, memory) if remembers(first) else first(q, k, v, sinks)
        if self.alone:
            return out, lse
        far, log = self.second(q, k, v, None)
        log = log - HELD
        if any(y.requires_grad for y in (out, lse, far, log)):
            out, lse = Mix.apply(out, lse, far, log)  # type: ignore[no-untyped-call]
            return out, lse
        _merge((out, lse), (far, log), out, lse)
        return out, lse


class Mix(torch.autograd.Function):
    """`merge` of two parts, with gradients."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, far: Tensor, log: Tensor) -> tuple[Tensor, Tensor]:
        mixed, total = torch.empty_like(out), torch.empty_like(lse)
        _merge((out, lse), (far, log), mixed, total)
        ctx.save_for_backward(out, lse, far, log, total)
        ctx.set_materialize_grads(False)
        return mixed, total

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return p dO and p (dO · (o - O) + dlse) for each part, o, with the share p of the weights."""
        refuse_second_derivative("a merge of two laws")
        out, lse, far, log, total = ctx.saved_tensors
        whole = total.masked_fill(total == -torch.inf, 0.0)
        shares = torch.exp(lse - whole), torch.exp(log - whole)
        slope = torch.zeros_like(total) if dlse is None else dlse
        if do is None:
            return None, shares[0] * slope, None, shares[1] * slope
        along = [products(do, one).masked_fill(share == 0, 0.0) for one, share in zip((out, far), shares, strict=True)]
        slope = slope - shares[0] * along[0] - shares[1] * along[1]
        first, second = ((do * share[..., None]).to(do.dtype) for share in shares)
        return first, shares[0] * (along[0] + slope), second, shares[1] * (along[1] + slope)


def _merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
    fused = out.is_cuda and out.dtype != torch.float64
    merge_checked([Part(*first), Part(*second)], out, lse, fused=fused)
