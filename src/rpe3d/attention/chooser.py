"""Which far blocks of keys a query sees, where a law gives it a `Choice`.

A `Chooser` has looked at the keys of a problem; asked about queries, it says which blocks each of them chooses. All of
it is in float64, so that the choice does not depend on the order of sums, and without gradients: attention is exact for
the choice that was made, and the choice itself is not differentiated.
"""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.nn.functional import normalize

from rpe3d.attention.problem import Problem
from rpe3d.config import ConfigError
from rpe3d.geometry import Region
from rpe3d.geometry.region import STOCK, Choice
from rpe3d.rotation import cos_sin, rotate

ALIKE = 1e-6
"""Scores this close are the same, and a block this much like the mean of all, of its own length, is it."""


class Chooser:
    """The keys of a problem as a region's choice sees them: bare of positions, and the mean of every block."""

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
            raise ConfigError(f"a key stands at {least}, before the first block", "give positions from 0 on")
        # Sorted also where slots of padding say otherwise; a token comes first of those that claim its position.
        self.positions = torch.where(self.there, positions, -1).cummax(1).values.contiguous()
        self.keys = bare(x, x.k, positions).masked_fill(~self.there[:, None, :, None], 0.0)
        self.block = positions // self.choice.size
        self.means, self.filled = self._summed(most // self.choice.size + 1)

    def _summed(self, blocks: int) -> tuple[Float64[Tensor, "b g m d"], Bool[Tensor, "b m"]]:
        """Return the mean of every block of tokens, and whether it has any."""
        b, g, _, d = self.keys.shape
        index = torch.where(self.there, self.block, 0)
        count = torch.zeros(b, blocks, dtype=torch.float64, device=index.device).scatter_add_(
            1, index, self.there.double()
        )
        every = index[:, None, :, None].expand_as(self.keys)
        sums = self.keys.new_zeros(b, g, blocks, d).scatter_add_(2, every, self.keys)
        return sums / count.clamp(min=1)[:, None, :, None], count > 0

    @torch.no_grad()
    def __call__(self, x: Problem) -> Bool[Tensor, "b h t s"]:
        """Return which keys lie in blocks that queries choose, of a problem with the first of these keys."""
        picked, s = self.blocks(x), x.k.shape[2]
        index = torch.where(self.there, self.block, 0)[:, None, None, :s].expand(-1, *picked.shape[1:3], -1)
        groups = x.q.shape[1] // x.k.shape[1]
        return (picked.gather(3, index) & self.there[:, None, None, :s]).repeat_interleave(groups, 1)

    @torch.no_grad()
    def blocks(self, x: Problem) -> Bool[Tensor, "b g t m"]:
        """Return which blocks queries choose, of all that the keys make."""
        choice, (query, _) = self.choice, x.positions()
        (b, h, t, d), g, m = x.q.shape, x.k.shape[1], self.means.shape[2]
        last = torch.arange(1, m + 1, device=query.device) * choice.size - 1
        can = self.region.contains(*torch.broadcast_tensors(query[:, :, None], last)) & (last <= query[:, :, None])
        can = (can & self.filled[:, None])[:, None]
        if m <= choice.most:
            return can.expand(b, g, t, m)
        centre = self._centre(can)
        recent, weight = self._recent(query)
        wanted = bare(x, x.q, query).view(b, g, h // g, t, d).mean(2)
        wanted = normalize(recent - weight * centre, dim=-1) + choice.query * normalize(wanted, dim=-1)
        # cos(m - centre, wanted), without an array of m - centre for every query
        along = wanted @ self.means.transpose(2, 3) - (wanted * centre).sum(-1, keepdim=True)
        square = (self.means**2).sum(-1)[:, :, None] - 2 * centre @ self.means.transpose(2, 3)
        length = (square + (centre**2).sum(-1, keepdim=True)).clamp(min=0).sqrt()
        least = (ALIKE * self.means.norm(dim=-1)).clamp(min=torch.finfo(torch.float64).tiny)[:, :, None]
        score = (along / length.maximum(least) / ALIKE).round().masked_fill(~can, -torch.inf)
        first = can.int().argmax(-1, keepdim=True).expand(b, g, t, 1)
        score = score.scatter(3, first, torch.inf).flip(3)  # sorted so that the nearer of two alike comes first
        best = score.argsort(stable=True, dim=-1, descending=True)[..., : choice.most]
        return torch.zeros_like(score, dtype=torch.bool).scatter_(3, best, True).flip(3) & can

    def _centre(self, can: Bool[Tensor, "b 1 t m"]) -> Float64[Tensor, "b g t d"]:
        """Return the mean of the blocks that can be chosen: all of the region's up to the last of them.

        From sums that no later block is part of, also not as 0 times what may not be a number.
        """
        m = can.shape[3]
        ever = self.filled & (torch.arange(1, m + 1, device=can.device) * self.choice.size > self.region.start)
        sums = self.means.masked_fill(~ever[:, None, :, None], 0.0).cumsum(2)
        last = (can * torch.arange(m, device=can.device)).amax(-1)[..., None]
        total = sums.gather(2, last.expand(-1, sums.shape[1], -1, sums.shape[3]))
        return total / can.sum(-1, keepdim=True).clamp(min=1)

    def _recent(self, query: Int[Tensor, "b t"]) -> tuple[Float64[Tensor, "b g t d"], Float64[Tensor, "b 1 t 1"]]:
        """Return the sum of the last keys of every query, the older the lighter, and the weight of all of them."""
        sums, weights = self.recent
        slot = self._slots(query)
        if bool((self.positions.gather(1, slot) == query).all()):  # every query is among the keys
            index = slot[:, None, :, None]
            return sums.gather(2, index.expand(-1, *sums.shape[1:2], -1, sums.shape[3])), weights.gather(2, index)
        return self._sums(query)

    @cached_property
    def recent(self) -> tuple[Float64[Tensor, "b g s d"], Float64[Tensor, "b 1 s 1"]]:
        """`_sums` of a query at every key."""
        return self._sums(self.positions)

    def _sums(self, query: Int[Tensor, "b t"]) -> tuple[Float64[Tensor, "b g t d"], Float64[Tensor, "b 1 t 1"]]:
        b, g, _, d = self.keys.shape
        total = self.keys.new_zeros(b, g, query.shape[1], d)
        weight = self.keys.new_zeros(b, 1, query.shape[1], 1)
        for i in range(self.choice.recent):
            wanted = query - i
            slot = self._slots(wanted)
            found = (self.positions.gather(1, slot) == wanted) & self.there.gather(1, slot) & (wanted >= 0)
            keys = self.keys.gather(2, slot[:, None, :, None].expand_as(total))
            total += self.choice.decay**i * keys.masked_fill(~found[:, None, :, None], 0.0)
            weight += (found.double() * self.choice.decay**i)[:, None, :, None]
        return total, weight

    def _slots(self, query: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
        """Return the first slots that claim positions, or others where none does."""
        return torch.searchsorted(self.positions, query.contiguous()).clamp(max=self.positions.shape[1] - 1)


def bare(x: Problem, vectors: Float[Tensor, "b n l d"], positions: Int[Tensor, "b l"]) -> Float64[Tensor, "b n l d"]:
    """Return vectors without their positions: as they are, or rotated back."""
    if not x.rotated:
        return vectors.double()
    cos, sin = cos_sin(-STOCK.angle(positions, x.frequencies), scaling=1 / x.law.attention_scaling, dtype=torch.float64)
    return rotate(vectors.double(), None, cos, sin, interleaved=x.law.rotary.interleaved, impl="reference")[0]
