"""The inputs of attention, validated once for every implementation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from rpe3d.config import ConfigError, flag, real
from rpe3d.geometry import Law, Turn
from rpe3d.geometry.region import STOCK
from rpe3d.rotation import cos_sin, rotate
from rpe3d.rotation.table import Places

Prepared = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""A prepared problem, without its vectors: a function from q, k, v and sinks to the output and the log-sum-exp."""
Run = tuple[slice, range]
"""Slots of a sequence's tokens, and the range of their positions."""


@dataclass(frozen=True)
class Placed:
    """Positions in a tensor, with what the host knows of them: made once, it spares every layer a device sync."""

    positions: Int[Tensor, "b n"]
    runs: tuple[Run | None, ...] | None = None
    """One run per sequence, without padding; None for a sequence whose tokens are not consecutive, or if unknown."""
    starts: tuple[int | None, ...] | Int[Tensor, " b"] | None = None
    """One start per sequence: the token in slot n is at start + n; None for a sequence where no start fits.

    A tensor is trusted: it is never read from the device to check it.
    """
    places: tuple[Places, ...] = ()
    """One entry per sequence if some positions skip ahead and there is no padding."""


Positions = Tensor | range | Placed | None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A complete, validated attention problem: b batch, h query heads, g key heads, t queries, s keys, d head dim.

    Positions given as a `range` stay a `range`, so that they never have to be read from the device.
    """

    q: Float[Tensor, "b h t d"]
    k: Float[Tensor, "b g s d"]
    v: Float[Tensor, "b g s e"]
    law: Law
    queries: range | Int[Tensor, "b t"]
    keys: range | Int[Tensor, "b s"]
    query_mask: Bool[Tensor, "b t"] | None
    key_mask: Bool[Tensor, "b s"] | None
    scale: float
    softcap: float | None
    sinks: Float[Tensor, " h"] | None
    rotated: bool
    query_placed: Placed | None = None
    key_placed: Placed | None = None
    """What the caller knows about positions that are tensors."""

    @cached_property
    def frequencies(self) -> Float64[Tensor, " l"]:
        """The law's frequencies θ_l on the device of q, kept there since a copy would wait for all queued work."""
        device = self.q.device
        if self.law.grows:
            length = self.keys[-1] + 1 if isinstance(self.keys, range) else int(self.keys.max()) + 1
            return self.law.frequencies(length).to(device)
        made: Tensor = self.law.kept(("frequencies", device), lambda: self.law.frequencies().to(device))
        return made

    @property
    def needs_gradient(self) -> bool:
        """Whether a gradient with respect to q, k, v or the sinks is needed."""
        vectors = (self.q, self.k, self.v, self.sinks)
        return torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in vectors)

    def hollow(self) -> Problem:
        """Return the problem without its vectors: shapes, dtypes and devices stay, the memory is released."""
        q, k, v = (y.detach().new_empty(1).expand(y.shape) for y in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, sinks=None)

    @property
    def scaling(self) -> float:
        """Factor that multiplies cos and sin: 1 if q and k are already rotated."""
        return 1.0 if self.rotated else self.law.attention_scaling

    def angles(self, turn: Turn, positions: Int[Tensor, "*p"], theta: Float64[Tensor, " l"]) -> Float64[Tensor, "*p l"]:
        """Return the angles by which vectors at these positions have yet to be rotated."""
        return turn.angle(positions, theta, stock=self.rotated)

    def positions(self) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b s"]]:
        """Return the query and key positions as tensors, one row per sequence."""
        return self._tensor(self.queries), self._tensor(self.keys)

    @cached_property
    def query_runs(self) -> tuple[Run | None, ...]:
        """Runs of the queries, one per sequence; None if they are not consecutive."""
        return self._runs(self.query_placed, self.queries, self.query_mask)

    @cached_property
    def key_runs(self) -> tuple[Run | None, ...]:
        """Runs of the keys, one per sequence; None if they are not consecutive."""
        return self._runs(self.key_placed, self.keys, self.key_mask)

    @cached_property
    def places(self) -> tuple[Places, ...]:
        """Shared places of queries and keys that skip ahead, read from the device if they are not known yet."""
        if self.query_mask is not None or self.key_mask is not None:
            return ()
        if self.query_placed is not None and self.query_placed is self.key_placed:
            return self.query_placed.places
        if isinstance(self.queries, range) or isinstance(self.keys, range) or self.query_placed or self.key_placed:
            return ()
        if self.queries.shape != self.keys.shape or not torch.equal(self.queries, self.keys):
            return ()
        return placed(self.queries, None).places

    @cached_property
    def key_starts(self) -> Int[Tensor, " b"] | None:
        """Position that slot 0 of every sequence would have if the keys counted up from it; None if they do not.

        If only the device knows, it is read back, which is impossible while a CUDA graph is captured.
        """
        known = None if self.key_placed is None else self.key_placed.starts
        if isinstance(known, Tensor):
            return known
        keys = self._tensor(self.keys)
        if known is None:
            known = placed(keys, self.key_mask).starts
        assert isinstance(known, tuple)
        if None in known:
            return None
        return torch.tensor(known, dtype=torch.int64).to(self.q.device, non_blocking=True)

    def _runs(self, known: Placed | None, positions: range | Tensor, mask: Tensor | None) -> tuple[Run | None, ...]:
        if isinstance(positions, range) and mask is None:
            return ((slice(0, len(positions)), positions),) * self.q.shape[0]
        if known is not None and known.runs is not None:
            return known.runs
        found = placed(self._tensor(positions), mask).runs
        assert found is not None
        return found

    def _tensor(self, positions: range | Tensor) -> Int[Tensor, "b n"]:
        if isinstance(positions, Tensor):
            return positions
        row = torch.arange(positions.start, positions.stop, device=self.q.device)
        return row.expand(self.q.shape[0], -1)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    law: Law,
    *,
    query_positions: Positions = None,
    key_positions: Positions = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rotated: bool = False,
) -> Problem:
    """Return the arguments of `attention` as a `Problem`, or one sentence about what is wrong with them."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or not x.dtype.is_floating_point:
            raise ConfigError(
                f"{name} is {tuple(x.shape)} {x.dtype}", "pass floating point [batch, heads, tokens, dim]"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ConfigError(
                f"q is {q.dtype} on {q.device}, {name} is {x.dtype} on {x.device}", "move them to one dtype and device"
            )
    (b, h, t, d), (g, s) = q.shape, k.shape[1:3]
    if k.shape[0] != b or v.shape[:3] != k.shape[:3] or k.shape[3] != d:
        raise ConfigError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together",
            "pass q [b, h, t, d], k [b, g, s, d], v [b, g, s, e]",
        )
    if t == 0 or s == 0 or b == 0:
        raise ConfigError(f"there are {b} sequences of {t} queries and {s} keys", "pass at least one of each")
    if g == 0 or h % g:
        raise ConfigError(f"{h} query heads are not a multiple of {g} key heads", "repeat or drop heads")
    if law.rotary.head_dim != d:
        raise ConfigError(
            f"the law is built for head dimension {law.rotary.head_dim}, the vectors have {d}",
            f"make the law with head_dim={d}",
        )
    if key_positions is None:
        key_positions = range(s)
        if query_positions is None and t > s:
            raise ConfigError(f"{t} queries are more than {s} keys", "pass query_positions")
        query_positions = range(s - t, s) if query_positions is None else query_positions
    if query_positions is None:
        raise ConfigError("key_positions are given without query_positions", "pass both")
    for name, mask, shape in (("query_mask", query_mask, (b, t)), ("key_mask", key_mask, (b, s))):
        if mask is not None and (mask.shape != shape or mask.dtype != torch.bool):
            raise ConfigError(f"{name} is {tuple(mask.shape)} {mask.dtype}", f"pass bool {shape}, False at padding")
    if sinks is not None and sinks.shape != (h,):
        raise ConfigError(f"sinks is {tuple(sinks.shape)}", f"pass one number per query head, {(h,)}")
    return Problem(
        q=q,
        k=k,
        v=v,
        law=law,
        queries=_positions("query_positions", query_positions, b, t),
        keys=_positions("key_positions", key_positions, b, s),
        query_mask=query_mask,
        key_mask=key_mask,
        scale=1 / math.sqrt(d) if scale is None else real("scale", scale, above=True),
        softcap=None if softcap is None else real("softcap", softcap, above=True),
        sinks=sinks,
        rotated=flag("rotated", rotated),
        query_placed=query_positions if isinstance(query_positions, Placed) else None,
        key_placed=key_positions if isinstance(key_positions, Placed) else None,
    )


def refuse_second_derivative(what: str) -> None:
    """Refuse to differentiate a backward a second time: the result would silently be zero."""
    if torch.is_grad_enabled():
        raise ConfigError(
            f"{what} have no second derivative (create_graph=True)", 'use impl="reference" if you need one'
        )


def sharpened(q: Float[Tensor, "b h t d"], law: Law, positions: Positions, keys: int) -> Float[Tensor, "b h t d"]:
    """Return queries times the law's temperature at their positions: by default those of the last keys."""
    if law.temperature is None:
        return q
    if isinstance(positions, Placed):
        positions = positions.positions
    if not isinstance(positions, Tensor):
        places = range(keys - q.shape[2], keys) if positions is None else positions
        positions = torch.arange(places.start, places.stop, device=q.device)
    factor = law.temperature(positions).to(q.device, torch.promote_types(q.dtype, torch.float32))[..., None]
    return (q * (factor if factor.ndim == 2 else factor[:, None])).to(q.dtype)


def placed(positions: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None) -> Placed:
    """Return positions with their runs and starts, which are read from the device."""
    if positions.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "positions are a tensor, which attention without the decoding kernel cannot read while a CUDA graph is "
            "being captured",
            "pass a range or rpe3d.attention.problem.placed(...), or compile without CUDA graphs",
        )
    there = positions.cpu()
    slots = torch.arange(there.shape[1])
    tokens = torch.ones_like(there, dtype=torch.bool) if mask is None else mask.cpu()
    first, count = tokens.int().argmax(1, keepdim=True), tokens.sum(1, keepdim=True)
    start = there.gather(1, first)
    gapless = (tokens == ((slots >= first) & (slots < first + count))).all(1).tolist()
    counted = ((there - start == slots - first) | ~tokens).all(1).tolist()
    rows = list(zip(*(x[:, 0].tolist() for x in (first, count, start)), counted, strict=True))
    starts = tuple(p - f if even else None for f, _, p, even in rows)
    runs = tuple(
        (slice(f, f + c), range(p, p + c)) if even and whole else None
        for (f, c, p, even), whole in zip(rows, gapless, strict=True)
    )
    skips = None in runs and mask is None and bool((there.diff() > 0).all())
    return Placed(positions, runs, starts, tuple(_places(row) for row in there.tolist()) if skips else ())


def _places(row: list[int]) -> Places:
    """Return the consecutive runs of increasing positions."""
    starts = [0, *(i for i in range(1, len(row)) if row[i] != row[i - 1] + 1)]
    return tuple(range(row[i], row[i] + j - i) for i, j in zip(starts, [*starts[1:], len(row)], strict=True))


def _positions(name: str, given: Tensor | range | Placed, b: int, n: int) -> range | Tensor:
    """Return a range of n positions, or int64 [b, n]."""
    if isinstance(given, Placed):
        given = given.positions
    if isinstance(given, range):
        if len(given) != n or given.step != 1 or given.start < 0:
            raise ConfigError(f"{name} is {given} for {n} tokens", f"pass range(start, start + {n})")
        return given
    if given.dtype.is_floating_point or given.dtype == torch.bool or given.shape not in ((n,), (b, n)):
        raise ConfigError(f"{name} is {tuple(given.shape)} {given.dtype}", f"pass integers {(n,)} or {(b, n)}")
    return given.to(torch.int64).expand(b, n)


def rotated(problem: Problem, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k of a problem rotated by the law's own frequencies, as a cache holds them."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    vectors = []
    for y, p in zip((q, k), problem.positions(), strict=True):
        table = cos_sin(problem.angles(STOCK, p, problem.frequencies), scaling=problem.scaling, dtype=dtype)
        vectors.append(rotate(y, None, *table, interleaved=problem.law.rotary.interleaved)[0])
    return vectors[0], vectors[1]
