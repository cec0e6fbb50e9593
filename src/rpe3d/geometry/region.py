"""The description of a law that attention executes: which (query, key) pairs are rotated by which angles.

Every law is a short tuple of `Region`s. A region is a band of (query, key) pairs with one `Turn` of the queries and one
of the keys; regions do not overlap, and a pair in no region is not attended to. All of it is data, five numbers per
turn and five per band, so that a reference, a loop of library calls and a kernel can execute the same description.
`PairTurns` replaces a `Turn` whose planes rotate differently, `Steps` one whose step is not a whole number of tokens.
In a region with a `Fade` the keys weigh less the more of them there are; with a `Choice` a query sees only some.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import ClassVar

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from rpe3d.config import freeze


@dataclass(frozen=True, kw_only=True)
class Phase:
    """An angle common to all planes that depends on the chunk alone: y(j) = constant + sign · base^(-j)."""

    base: float
    sign: int
    constant: float = 0.0

    def __call__(self, chunk: Int[Tensor, "*p"]) -> Float64[Tensor, "*p"]:
        return self.constant + self.sign * self.base ** -chunk.to(torch.float64)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Map position p to the position x that a vector is rotated to; the angle of plane l is θ_l x + y.

    x(p) = min( offset · (p mod chunk), ceiling ) + stride · (p div chunk) + start.  `Turn()` is plain RoPE, x = p.
    """

    chunk: int = 1
    offset: float = 0.0
    stride: float = 1.0
    start: float = 0.0
    ceiling: float = inf
    phase: Phase | None = None

    def position(self, p: Int[Tensor, "*p"]) -> Float64[Tensor, "*p"]:
        """Return x(p), in float64."""
        within = (self.offset * (p % self.chunk).to(torch.float64)).clamp(max=self.ceiling)
        return within + self.stride * (p // self.chunk).to(torch.float64) + self.start

    def positions(self, p: Int[Tensor, "*p"]) -> Float64[Tensor, "*p l"]:
        """Return x(p) of every plane, in a single column if all planes share it."""
        return self.position(p)[..., None]

    def angle(
        self, p: Int[Tensor, "*p"], frequencies: Float64[Tensor, " l"], *, stock: bool = False
    ) -> Float64[Tensor, "*p l"]:
        """Return the angle θ_l x(p) + y(p) of a vector at p in each plane; with `stock`, what remains after RoPE."""
        x = self.positions(p) - p[..., None] if stock else self.positions(p)
        angle = x * frequencies
        return angle if self.phase is None else angle + self.phase(p // self.chunk)[..., None]

    @property
    def in_numbers(self) -> bool:
        """Whether the five numbers define this turn; if not, only `positions` and `angle` may be used."""
        return self.chunk > 0

    @property
    def is_stock(self) -> bool:
        """Whether this is plain RoPE, x = p without a phase, in chunks of any size; never with a finite ceiling."""
        same = self.stride == self.chunk and (self.chunk == 1 or self.offset == 1)
        return same and self.start == 0 and self.ceiling == inf and self.phase is None


STOCK = Turn()


@dataclass(frozen=True, kw_only=True)
class PairTurns(Turn):
    """A separate turn for each group of planes, as (number of planes, turn) from plane 0 on; none has a phase.

    Code that uses `positions` or `angle` needs no special case. The numbers of a single turn have no meaning here: with
    chunks of 0 tokens, code that reads them finds neither stock RoPE nor whole chunks, and `position` fails.
    """

    groups: tuple[tuple[int, Turn], ...]
    chunk: int = field(default=0, init=False)

    def positions(self, p: Int[Tensor, "*p"]) -> Float64[Tensor, "*p l"]:
        """Return x(p) of every plane."""
        columns = [turn.positions(p).expand(*p.shape, pairs) for pairs, turn in self.groups]
        return torch.cat(columns, dim=-1)

    @property
    def is_stock(self) -> bool:
        """Whether every group of planes is rotated as by plain RoPE."""
        return all(turn.is_stock for _, turn in self.groups)


def by_pair(groups: Iterable[tuple[int, Turn]]) -> Turn:
    """Join the turns of groups of planes: equal neighbours become one group, a single group becomes a plain turn."""
    joined = [(turn, sum(pairs for pairs, _ in same)) for turn, same in groupby(groups, key=itemgetter(1))]
    return joined[0][0] if len(joined) == 1 else PairTurns(groups=tuple((pairs, turn) for turn, pairs in joined))


@dataclass(frozen=True, kw_only=True)
class Steps(Turn):
    """Map p to x(p) = floor(p · up / over) + start: steps of over / up tokens, some of them one token longer."""

    up: int
    over: int
    chunk: int = field(default=0, init=False)

    def position(self, p: Int[Tensor, "*p"]) -> Float64[Tensor, "*p"]:
        """Return x(p) exactly: p · up is below 2^62 for any length and number of positions that a law allows."""
        return (p * self.up // self.over).to(torch.float64) + self.start

    @property
    def is_stock(self) -> bool:
        """Whether this is plain RoPE: steps of one token, starting at 0."""
        return self.up == self.over and self.start == 0


@dataclass(frozen=True, kw_only=True)
class Fade:
    """Reduce the weight of keys for a query at p > span, which has more of them than the model is used to.

    Their scores s are multiplied by a sharpness τ(p) = (log p / log span)^focus, and together they weigh
    exp( log Σ exp(τ s) / τ ), the τ-norm of their usual weights, times (span / p)^rate. At `focus=1`, p equal keys
    together weigh as much as span of them would. A key that stands out keeps its weight.
    """

    rate: float
    focus: float
    span: float

    def sharpness(self, p: Int[Tensor, "*p"]) -> Float64[Tensor, "*p"]:
        """Return τ(p), 1 up to p = span."""
        return (self._beyond(p).log() / math.log(self.span)) ** self.focus

    def loss(self, p: Int[Tensor, "*p"]) -> Float64[Tensor, "*p"]:
        """Return rate · log(p / span), which is subtracted from the log of the weight; 0 up to p = span."""
        return self.rate * (self._beyond(p) / self.span).log()

    def shift(self, p: Int[Tensor, "*p"]) -> Float64[Tensor, "2 ..."]:
        """Return (1 - 1/τ, loss): from every τ s, (1 - 1/τ) ℓ and the loss are subtracted, with ℓ = log Σ exp(τ s)."""
        return torch.stack([1 - 1 / self.sharpness(p), self.loss(p)])

    def _beyond(self, p: Int[Tensor, "*p"]) -> Float64[Tensor, "*p"]:
        return p.to(torch.float64).clamp(min=self.span)


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Multiply all scores of a query at p >= span by (1 + rate · log((p + 1) / span))², and by 1 before."""

    rate: float
    span: float

    def __call__(self, p: Int[Tensor, "*p"]) -> Float64[Tensor, "*p"]:
        """Return the factors for the scores of queries at these positions."""
        return (1 + self.rate * ((p + 1).to(torch.float64).clamp(min=self.span) / self.span).log()) ** 2


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Let a query see only the `most` blocks of keys that are most similar to it and to the tokens before it.

    Block b holds the keys at positions b · size .. (b + 1) · size - 1; a region with a choice holds whole blocks.
    Without their rotation, let z be the mean of the very first keys (`centre` of them, at most a chunk), m_b the mean
    key of block b and of the `lead` keys before it, w the weighted mean of the last keys k_p, k_{p-1}, ... (`decay`,
    over `recent` of them), and q the mean query of the heads that share keys. With u(x) = x / |x|,

        summary(b) = u(m_b - z),   aim = u(w - z) + query · u(q),   score(b) = summary(b) · aim,

    with summaries and aims rounded to bfloat16, and scores rounded to multiples of `STEP` and clamped to ±2. The blocks
    of the `first` keys (at most an eighth of `most`, at least one) are always chosen; of two blocks with equal scores,
    the nearer is chosen. So a choice depends on the query and on keys that do not come after it, and a summary on keys
    alone: once a block is complete, its summary never changes.

    The continuation of a passage comes after what it shares with the last tokens: hence the keys before a block. Models
    put much of their attention on some early token, not always the first, that resembles nothing: hence the first keys.
    """

    most: int
    size: int
    recent: int = 16
    decay: float = 0.9
    query: float = 1.0
    centre: int = 512
    first: int = 0

    STEP: ClassVar[float] = 2.0**-14
    """Resolution of scores: coarser than what the summation order of 256 products changes in float32."""

    @property
    def lead(self) -> int:
        """Number of keys before a block that are part of its summary: half the size of a block."""
        return self.size // 2

    @property
    def always(self) -> int:
        """Number of first blocks that are always chosen."""
        return max(1, min(self.first // self.size, self.most // 8))

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the last keys, newest first."""
        return tuple(self.decay**i for i in range(self.recent))


@dataclass(frozen=True, kw_only=True)
class Region:
    """Pairs with first <= query div unit - key div unit <= last and start <= key < keys, and how q and k rotate there.

    `unit=1` makes bands of distances, `unit=c` bands of chunk distances. Causality cuts the band when attention
    executes it; `first=None` reaches down to and past the diagonal. A turn that `is_stock` is stored as `STOCK`, so
    that plain RoPE has one form wherever turns are compared or used as keys.
    """

    unit: int = 1
    first: int | None = None
    last: int | None = None
    start: int = 0
    keys: int | None = None
    query: Turn = STOCK
    key: Turn = STOCK
    fade: Fade | None = None
    choice: Choice | None = None

    def __post_init__(self) -> None:
        for side in ("query", "key"):
            turn: Turn = getattr(self, side)
            if turn is not STOCK and turn.is_stock:
                freeze(self, **{side: STOCK})

    def contains(self, query: Int[Tensor, "*p"], key: Int[Tensor, "*p"]) -> Bool[Tensor, "*p"]:
        """Return which of the pairs lie in this region, regardless of causality."""
        steps = query // self.unit - key // self.unit
        inside = key >= self.start
        if self.first is not None:
            inside &= steps >= self.first
        if self.last is not None:
            inside &= steps <= self.last
        if self.keys is not None:
            inside &= key < self.keys
        return inside
