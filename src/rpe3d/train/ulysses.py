"""Sequence parallelism as in DeepSpeed Ulysses (Jacobs et al. 2023, arXiv 2309.14509), for any law.

Every process of a group holds a slice of the tokens. For attention they exchange: each gets all tokens for its share of
the heads, so that positions are complete and a law is exact, and then returns the outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rpe3d.config import ConfigError
from rpe3d.train.shifted import Attend


class Exchange(torch.autograd.Function):
    """Splits one dimension over the processes and gathers another from them; its backward is the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: Any) -> Tensor:
        ctx.way_back = (join, split, group)
        parts = torch.stack(x.chunk(dist.get_world_size(group), dim=split)).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(0), dim=join)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return Exchange.apply(gradient, *ctx.way_back), None, None, None  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class SequenceParallel:
    """The processes that share a sequence, this one among them."""

    size: int
    rank: int
    group: Any

    def slice(self, x: Tensor) -> Tensor:
        """Return this process's tokens of a whole sequence."""
        return x.chunk(self.size, dim=1)[self.rank].contiguous()

    def whole(self, x: Tensor) -> Tensor:
        """Return the whole sequence, of which every process has a slice."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        positions: Tensor | None,
        attend: Attend,
        *,
        together: bool = False,
    ) -> Tensor:
        """Attend from this slice's queries to the whole sequence; without `positions` they are 0, 1, 2 ...

        With `together`, heads that share keys are kept on one process.
        """
        h, g = q.shape[1], k.shape[1]
        if h % self.size:
            raise ConfigError(
                f"{h} heads cannot be divided among {self.size} processes",
                f"set sequence_parallel to a divisor of {h}",
            )
        if g % self.size:  # too few to divide: every query head gets its own copy
            if together and g < h:
                raise ConfigError(
                    f"heads that share keys choose far keys together, but {g} key heads cannot be divided among "
                    f"{self.size} processes",
                    f"set sequence_parallel to a divisor of {g}, or train with far=0",
                )
            k, v = (x.repeat_interleave(h // g, dim=1) for x in (k, v))
        q, k, v = (Exchange.apply(x, 1, 2, self.group) for x in (q, k, v))  # type: ignore[no-untyped-call]
        own = None if sinks is None else sinks.chunk(self.size)[self.rank]
        there = range(q.shape[2]) if positions is None else self.whole(positions).expand(q.shape[0], -1)
        out = attend(q, k, v, there, own)
        back: Tensor = Exchange.apply(out, 2, 1, self.group)  # type: ignore[no-untyped-call]
        return back


def sequence_parallel(size: int) -> SequenceParallel | None:
    """Return this process's group if `size` neighbours share a sequence; None for a single process.

    All processes call it, in the same order.
    """
    if size == 1:
        return None
    count = dist.get_world_size() if dist.is_initialized() else 1
    if count % size:
        raise ConfigError(
            f"{count} processes cannot be divided into groups of {size}",
            f"start a multiple of {size} with `accelerate launch --num_processes`, or change sequence_parallel",
        )
    rank = dist.get_rank()
    groups = [dist.new_group(list(range(start, start + size))) for start in range(0, count, size)]
    return SequenceParallel(size=size, rank=rank % size, group=groups[rank // size])
