"""Find which far blocks of keys a query sees under a law with a `Choice`: the specification, for any positions.

A `Chooser` has read the keys of a problem; asked about queries, it says which blocks each of them chooses. All of it is
without gradients: attention is exact for the choice that was made, and the choice itself is not differentiated. Sums
are in float32, or in float64 for float64 vectors. Summaries and aims are then rounded to bfloat16 and scores to levels,
which hides most differences between two summation orders, and enlarges one that crosses a boundary: in 7 of 74,880
choices a change of 1e-6 of all vectors chose another block, and without any rounding in none (docs/log.md). The same
arithmetic gives the same choice; in float32 and below, another summation order sometimes does not.
"""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rpe3d.attention.problem import Problem
from rpe3d.config import ConfigError
from rpe3d.geometry import Region
from rpe3d.geometry.region import STOCK, Choice
from rpe3d.rotation import cos_sin, rotate

ALIKE = 1e-5
"""A difference of two vectors that is shorter than this fraction of the first is rounding, and has no direction."""


class Chooser:
    """The keys of a problem as a region's choice sees them: without positions, and with the summary of every block."""

    @torch.no_grad()
    def __init__(self, x: Problem, region: Region) -> None:
        assert region.choice is not None
        assert region.last is None  # what can be chosen is chosen from the first block on
        self.choice: Choice = region.choice
        self.region = region
        _, positions = x.positions()
        self.there = torch.ones_like(positions, dtype=torch.bool) if x.key_mask is None else x.key_mask
        least, most = torch.stack(torch.where(self.there, positions, 0).aminmax()).tolist()
        if least < 0:
            raise ConfigError(f"a key is at position {least}, before the first block", "pass positions from 0 on")
        # Sorted also where slots of padding say otherwise; a token comes first of those that claim its position.
        self.positions = torch.where(self.there, positions, -1).cummax(1).values.contiguous()
        self.keys = bare(x, x.k, positions).masked_fill(~self.there[:, None, :, None], 0.0)
        self.block = positions // self.choice.size
        self.centre = self._centre(positions)
        means, self.filled = self._means(most // self.choice.size + 1)
        self.summaries = rounded(direction(means - self.centre, means))

    def _centre(self, positions: Int[Tensor, "b s"]) -> Float[Tensor, "b g 1 d"]:
        """Return the mean of the first keys."""
        first = self.there & (positions < min(self.choice.centre, self.region.unit))
        total = self.keys.masked_fill(~first[:, None, :, None], 0.0).sum(2, keepdim=True)
        return total / first.sum(1).clamp(min=1)[:, None, None, None]

    def _means(self, blocks: int) -> tuple[Float[Tensor, "b g m d"], Bool[Tensor, "b m"]]:
        """Return the mean of every block of tokens and of some before it, and whether a block has tokens of its own."""
        sums, counts = self._summed(self.there, self.block, blocks)
        within = self.block * self.choice.size + self.choice.size - self.choice.lead
        late = self.there & (torch.where(self.there, self.positions, -1) >= within)  # part of the next block's, too
        more, others = self._summed(late & (self.block + 1 < blocks), self.block + 1, blocks)
        return (sums + more) / (counts + others).clamp(min=1)[:, None, :, None], counts > 0

    def _summed(
        self, some: Bool[Tensor, "b s"], block: Int[Tensor, "b s"], blocks: int
    ) -> tuple[Float[Tensor, "b g m d"], Float[Tensor, "b m"]]:
        """Return the sum of some keys by block, and their number."""
        b, g, _, d = self.keys.shape
        index = torch.where(some, block, 0)
        counts = self.keys.new_zeros(b, blocks).scatter_add_(1, index, some.to(self.keys.dtype))
        keys = self.keys.masked_fill(~some[:, None, :, None], 0.0)
        sums = self.keys.new_zeros(b, g, blocks, d)
        return sums.scatter_add_(2, index[:, None, :, None].expand_as(keys), keys), counts

    @torch.no_grad()
    def __call__(self, x: Problem) -> Bool[Tensor, "b h t s"]:
        """Return which keys lie in blocks that queries choose, for a problem with the first of these keys."""
        picked, s = self.blocks(x), x.k.shape[2]
        index = torch.where(self.there, self.block, 0)[:, None, None, :s].expand(-1, *picked.shape[1:3], -1)
        groups = x.q.shape[1] // x.k.shape[1]
        return (picked.gather(3, index) & self.there[:, None, None, :s]).repeat_interleave(groups, 1)

    @torch.no_grad()
    def blocks(self, x: Problem) -> Bool[Tensor, "b g t m"]:
        """Return which of all blocks the queries choose."""
        (b, _, t, _), g, m = x.q.shape, x.k.shape[1], self.summaries.shape[2]
        can = self._can(x.positions()[0])
        if m <= self.choice.most:
            return can.expand(b, g, t, m)
        level = (self.aims(x) @ self.summaries.transpose(2, 3) / self.choice.STEP + 0.5).floor()
        level = (
            level.clamp(-2 / self.choice.STEP, 2 / self.choice.STEP - 2)
            .nan_to_num(nan=torch.inf)
            .masked_fill(~can, -torch.inf)
        )  # what is not a number is seen
        first = can & (can.cumsum(-1) <= self.choice.always)
        level = level.masked_fill(first, torch.inf).flip(3)  # sorted so that the nearer of two alike comes first
        best = level.argsort(stable=True, dim=-1, descending=True)[..., : self.choice.most]
        return torch.zeros_like(level, dtype=torch.bool).scatter_(3, best, True).flip(3) & can

    def _can(self, query: Int[Tensor, "b t"]) -> Bool[Tensor, "b 1 t m"]:
        """Return which blocks queries may choose: those of the region, complete before the query, with tokens."""
        last = torch.arange(1, self.summaries.shape[2] + 1, device=query.device) * self.choice.size - 1
        can = self.region.contains(*torch.broadcast_tensors(query[:, :, None], last)) & (last <= query[:, :, None])
        return (can & self.filled[:, None])[:, None]

    def aims(self, x: Problem) -> Float[Tensor, "b g t d"]:
        """Return the aims of the queries: the directions that they look for."""
        (b, h, t, d), g, (query, _) = x.q.shape, x.k.shape[1], x.positions()
        recent, weight = self._recent(query)
        asked = bare(x, x.q, query).view(b, g, h // g, t, d).mean(2)
        return rounded(direction(recent - weight * self.centre, recent) + self.choice.query * direction(asked, asked))

    def _recent(self, query: Int[Tensor, "b t"]) -> tuple[Float[Tensor, "b g t d"], Float[Tensor, "b 1 t 1"]]:
        """Return the weighted sum of the last keys of every query, older keys weighing less, and the total weight."""
        slot = self._slots(query)
        if bool((self.positions.gather(1, slot) == query).all()):  # every query is among the keys
            sums, weights = self.recent
            index = slot[:, None, :, None]
            return sums.gather(2, index.expand(-1, *sums.shape[1:2], -1, sums.shape[3])), weights.gather(2, index)
        return self._sums(query)

    @cached_property
    def recent(self) -> tuple[Float[Tensor, "b g s d"], Float[Tensor, "b 1 s 1"]]:
        """`_sums` of a query at every key."""
        return self._sums(self.positions)

    def _sums(self, query: Int[Tensor, "b t"]) -> tuple[Float[Tensor, "b g t d"], Float[Tensor, "b 1 t 1"]]:
        b, g, _, d = self.keys.shape
        total = self.keys.new_zeros(b, g, query.shape[1], d)
        weight = self.keys.new_zeros(b, 1, query.shape[1], 1)
        for i, share in enumerate(self.choice.weights):
            wanted = query - i
            slot = self._slots(wanted)
            found = (self.positions.gather(1, slot) == wanted) & self.there.gather(1, slot) & (wanted >= 0)
            keys = self.keys.gather(2, slot[:, None, :, None].expand_as(total))
            total += share * keys.masked_fill(~found[:, None, :, None], 0.0)
            weight += (found.to(weight.dtype) * share)[:, None, :, None]
        return total, weight

    def _slots(self, query: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
        """Return the first slots that hold these positions, or others if none does."""
        return torch.searchsorted(self.positions, query.contiguous()).clamp(max=self.positions.shape[1] - 1)


def bare(x: Problem, vectors: Float[Tensor, "b n l d"], positions: Int[Tensor, "b l"]) -> Float[Tensor, "b n l d"]:
    """Return vectors without their positions: as they are, or rotated back."""
    precise = torch.promote_types(vectors.dtype, torch.float32)
    if not x.rotated:
        return vectors.to(precise)
    cos, sin = cos_sin(-STOCK.angle(positions, x.frequencies), scaling=1 / x.law.attention_scaling, dtype=precise)
    return rotate(vectors.to(precise), None, cos, sin, interleaved=x.law.rotary.interleaved, impl="reference")[0]


def direction(x: Float[Tensor, "... d"], of: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
    """Return x / |x|, or zeros if x is only the rounding error of a difference `of` two vectors."""
    length = x.norm(dim=-1, keepdim=True)
    least = ALIKE * of.norm(dim=-1, keepdim=True)
    return torch.where(length <= least, 0.0, x / length.clamp(min=torch.finfo(x.dtype).tiny))


def rounded(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return x rounded to bfloat16."""
    return x.to(torch.bfloat16).to(x.dtype)
