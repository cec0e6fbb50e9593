"""Computes attention under a law that has another beside it: each by its own implementation, then one merge.

Chosen for laws with `Law.both`. Equals `reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rpe3d.attention.chosen.memory import Memory, remembers
from rpe3d.attention.merge import Part, merge_checked
from rpe3d.attention.problem import Prepared, Problem
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
            return _mixed((out, far), (lse, log))
        fused = out.is_cuda and out.dtype != torch.float64
        merge_checked([Part(out, lse), Part(far, log)], out, lse, fused=fused)
        return out, lse


def _mixed(outs: tuple[Tensor, Tensor], logs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return `merge` in plain operations, with gradients."""
    log = torch.stack(logs)
    nothing = (log == -torch.inf).all(0)
    lse = log.masked_fill(nothing, 0.0).logsumexp(0).masked_fill(nothing, -torch.inf)
    weights = torch.exp(log - lse.masked_fill(nothing, 0.0))[..., None]
    return (weights * torch.stack(outs).to(log.dtype)).sum(0).to(outs[0].dtype), lse
