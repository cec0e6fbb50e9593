"""The decoding step in plain PyTorch: `decode` says what it computes. Any machine, any type, any law.

A law's regions are cut into pieces of keys. Where a law turns all keys of a chunk by one angle, a piece is several
chunks, each of which meets the queries turned back by its angle: the keys are multiplied as they lie in the cache.
Only keys that turn token by token are turned. Partial attentions are merged exactly. On a CPU a piece is one call of
its own flash attention, whose batch are the chunks and whose rows are the queries of all heads that share a key head.
Where queries have a choice of keys, the others are masked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from rpe3d.attention import reference
from rpe3d.attention.lowering import band, whole_chunks
from rpe3d.attention.problem import Problem
from rpe3d.geometry import Region
from rpe3d.rotation import cos_sin, rotate
from rpe3d.rotation.table import Table

Picks = dict[Region, Tensor]
"""By region with a choice: the blocks that queries choose, [b, g, t, m]."""


@dataclass(frozen=True)
class Weighing:
    """A `Fade` at the positions of all rows: its sharpness [r, 1] and its shift [2, r]."""

    sharpness: Tensor
    shift: Tensor


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Keys that are read in one call: `runs` stretches of equal length, each of which the queries meet turned anew."""

    keys: slice
    runs: int = 1
    turns: slice | None = None
    """Which of the turned queries, one per stretch; None: as they come."""
    table: Table | None = None
    """By how much the keys are turned."""
    mask: Float[Tensor, "n 1 r c"] | None = None
    """Added to the scores: -inf where a row does not see a key. None: all see all."""
    fade: Weighing | None = None
    """How these keys weigh, for every row."""
    region: Region
    blocks: Int[Tensor, " c"] | None = None
    """Where queries have a choice of these keys: which block each of them lies in."""


@dataclass(frozen=True)
class Part:
    """Sequences whose tokens stand at the same positions: their keys in pieces, and the table of all their turns."""

    batch: slice
    pieces: list[Piece]
    table: Table | None


class Step:
    """A decoding step: all that is the same for every layer of a model, settled once; then called with its vectors."""

    def __init__(self, x: Problem, reason: str = "asked for", flash: bool | None = None) -> None:
        self.reason = reason
        self.problem = x.hollow()
        self.interleaved = x.law.rotary.interleaved
        flash = has_flash(x) if flash is None else flash
        self.attend = partial(_flash, scale=x.scale) if flash else partial(_products, scale=x.scale, softcap=x.softcap)
        layouts = _layouts(x)
        if all(layout == layouts[0] for layout in layouts):
            self.parts = [_part(x, slice(None), *layouts[0])]
        else:
            self.parts = [_part(x, slice(b, b + 1), *layout) for b, layout in enumerate(layouts)]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, choosers: reference.Choosers | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp. choosers: of these keys and perhaps more."""
        picks: Picks = {}
        if self.problem.law.chooses:
            x = replace(self.problem, q=q, k=k, v=v)
            found = reference.choosers_of(x) if choosers is None else choosers
            picks = {region: chooser.blocks(x) for region, chooser in found.items()}
        if len(self.parts) == 1:
            return self._attend(self.parts[0], q, k, v, sinks, picks)
        results = [self._attend(part, q[part.batch], k[part.batch], v[part.batch], sinks, picks) for part in self.parts]
        outs, lses = zip(*results, strict=True)
        return torch.cat(outs), torch.cat(lses)

    def nbytes(self) -> int:
        """Return the size of all tables and masks."""
        tables = [
            table for part in self.parts for table in (part.table, *(piece.table for piece in part.pieces)) if table
        ]
        masks = [piece.mask for part in self.parts for piece in part.pieces if piece.mask is not None]
        return sum(y.nbytes for y in (*masks, *(y for table in tables for y in table)))

    def _attend(
        self, part: Part, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, picks: Picks
    ) -> tuple[Tensor, Tensor]:
        """Return one call per piece, merged. Batch and key heads are one dimension, a view of any cache."""
        (b, h, t, d), g = q.shape, k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        rows = q.reshape(1, b * g, -1, d)
        if part.table is not None:
            copies = q.reshape(1, b * h, t, d).expand(len(part.table[0]), -1, -1, -1)
            turned = rotate(copies, None, *part.table, interleaved=self.interleaved)[0].reshape(-1, *rows.shape[1:])
        results, faded = [], []
        for piece in part.pieces:
            keys, values = (y[:, piece.keys].unflatten(1, (piece.runs, -1)).transpose(0, 1) for y in (k, v))
            if piece.table is not None:
                keys = rotate(keys, None, *piece.table, interleaved=self.interleaved)[0]
            here = rows if piece.turns is None else turned[piece.turns]
            sharpness = None if piece.fade is None else piece.fade.sharpness
            mask = piece.mask if piece.blocks is None else _unchosen(piece, picks[piece.region][part.batch], q)
            results.append(self.attend(here, keys, values, mask, sharpness))
            if piece.fade is not None:
                faded.append((len(results) - 1, piece.fade.shift))
        _shift(results, faded)
        out, lse = _merged(results, rows, v, None if sinks is None else sinks.view(g, -1, 1).expand(b, g, -1, t))
        return out.view(b, h, t, -1), lse.reshape(b, h, t)


def _unchosen(piece: Piece, picked: Bool[Tensor, "b g t m"], q: Tensor) -> Float[Tensor, "n b*g r c"]:
    """Return the mask of a piece with -inf also where a query has not chosen a key."""
    assert piece.blocks is not None
    seen = picked[..., piece.blocks.clamp(max=picked.shape[3] - 1)] & (piece.blocks < picked.shape[3])
    blind = ~seen.repeat(1, 1, q.shape[1] // picked.shape[1], 1).flatten(0, 1).unflatten(-1, (piece.runs, -1)).movedim(
        -2, 0
    )
    mask = torch.zeros(blind.shape, dtype=q.dtype, device=q.device).masked_fill(blind, -torch.inf)
    return mask if piece.mask is None else mask + piece.mask


def _shift(results: list[tuple[Tensor, Tensor]], faded: list[tuple[int, Tensor]]) -> None:
    """Take from the pieces that fade what they lose together."""
    if not faded:
        return
    together = torch.cat([results[i][1] for i, _ in faded]).logsumexp(0)
    together = together.masked_fill(together == -torch.inf, 0.0)
    for i, (eased, loss) in faded:
        out, log = results[i]
        results[i] = (out, log - (eased * together + loss))


def _merged(
    results: list[tuple[Tensor, Tensor]], rows: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Float[Tensor, "g r e"], Float[Tensor, "g r"]]:
    """Return softmax over all keys from softmaxes over stretches of them."""
    if len(results) == 1 and sinks is None and results[0][0].shape[0] == 1:
        return results[0][0][0], results[0][1][0]
    precise = torch.promote_types(rows.dtype, torch.float32)
    logs = [lse for _, lse in results]
    if sinks is not None:
        logs.append(sinks.to(precise).reshape(1, *rows.shape[1:3]))
    if not results:
        lse = logs[0][0].clone() if logs else rows.new_full(rows.shape[1:3], -torch.inf, dtype=precise)
        return rows.new_zeros(*rows.shape[1:3], v.shape[2]), lse
    log, out = torch.cat(logs), torch.cat([out for out, _ in results])
    top = log.amax(0).clamp(min=torch.finfo(precise).min)
    weight = torch.exp(log - top)
    total = weight.sum(0)  # at least 1 in a row that sees something
    merged = (out * weight[: len(out), ..., None]).sum(0) / total.clamp(min=1)[..., None]
    return merged.to(rows.dtype), top + total.log()


def _layouts(x: Problem) -> list[tuple[list[int], slice, range]]:
    """Of every sequence: the positions of its queries (-1: padding), where its keys lie, and their positions."""
    queries, _ = x.positions()
    reference.check_order("query_positions", queries, x.query_mask)
    if x.query_mask is not None:
        queries = queries.masked_fill(~x.query_mask, -1)
    layouts = []
    for query, run in zip(queries.tolist(), x.key_runs, strict=True):
        assert run is not None
        layouts.append((query, *run))
    return layouts


def _part(x: Problem, batch: slice, queries: list[int], where: slice, positions: range) -> Part:
    pieces: list[Piece] = []
    angles: list[Float64[Tensor, "n t l"]] = []
    query = torch.tensor(queries, device=x.q.device)
    rows = x.q.shape[1] // x.k.shape[1] * len(queries)
    precise = torch.promote_types(x.q.dtype, torch.float32)
    for region in x.law.regions:
        seen = [_seen(region, p, positions) for p in queries]
        spans = [(low, high) for low, high in seen if low < high]
        if not spans:
            continue
        # Turning the rows once per chunk must be less work than turning the chunk.
        chunk = region.key.chunk if whole_chunks(region.key) and rows <= region.key.chunk else None
        for low, high in _cut(min(spans)[0], max(high for _, high in spans), chunk):
            n = 1 if chunk is None else max(1, (high - low) // chunk)
            starts = torch.arange(low, high, (high - low) // n, device=query.device)
            turns = table = None
            if not (region.query.is_stock and region.key.is_stock):
                turn = x.angles(region.query, query, x.frequencies).expand(n, -1, -1)
                if chunk is not None:
                    turn = turn - x.angles(region.key, starts, x.frequencies)[:, None]
                elif not region.key.is_stock:
                    key = torch.arange(low, high, device=query.device)
                    table = cos_sin(x.angles(region.key, key, x.frequencies), dtype=precise)
                done = sum(map(len, angles))
                turns = slice(done, done + n)
                angles.append(turn)
            offset = where.start - positions.start
            keys = slice(low + offset, high + offset)
            mask = _mask(x, seen, low, high, n)
            fade = None
            if region.fade is not None:
                sharpness, shift = region.fade.sharpness(query), region.fade.shift(query)
                copies = rows // len(queries)
                fade = Weighing(sharpness.to(precise).repeat(copies)[:, None], shift.to(precise).repeat(1, copies))
            blocks = None
            if region.choice is not None:
                blocks = torch.arange(low, high, device=query.device) // region.choice.size
            pieces.append(
                Piece(keys=keys, runs=n, turns=turns, table=table, mask=mask, fade=fade, region=region, blocks=blocks)
            )
    return Part(batch, pieces, cos_sin(torch.cat(angles), dtype=precise) if angles else None)


def _seen(region: Region, p: int, keys: range) -> tuple[int, int]:
    """Return the keys [low, high) that a query at p sees in a region: Region.contains, causally."""
    unit, first, last, most, least = band(region)
    chunk = p // unit
    return max((chunk - last) * unit, keys.start, least), min((chunk - first + 1) * unit, p + 1, keys.stop, most)


def _cut(low: int, high: int, chunk: int | None) -> list[tuple[int, int]]:
    """Return [low, high) as a part of a chunk, whole chunks, and a part of a chunk, each if there."""
    if chunk is None:
        return [(low, high)]
    first, last = -(-low // chunk) * chunk, high // chunk * chunk
    borders = sorted({low, min(first, high), max(last, low), high})
    return list(pairwise(borders))


def _mask(x: Problem, seen: list[tuple[int, int]], low: int, high: int, n: int) -> Tensor | None:
    """Return what the rows of every stretch of [low, high) do not see, given what each query sees of its region."""
    if all(a <= low and high <= b for a, b in seen):
        return None
    key = torch.arange(low, high, device=x.q.device)
    first, last = torch.tensor(seen, device=x.q.device).T[..., None]
    blind = ((key < first) | (key >= last)).unflatten(1, (n, -1)).transpose(0, 1)
    blind = blind.repeat(1, x.q.shape[1] // x.k.shape[1], 1)[:, None]
    return torch.zeros(blind.shape, dtype=x.q.dtype, device=x.q.device).masked_fill(blind, -torch.inf)


def has_flash(x: Problem) -> bool:
    """Say whether the library takes the problem. It would take vectors not contiguous in d, and read them wrongly."""
    contiguous = all(y.stride(3) == 1 for y in (x.q, x.k, x.v))
    return x.q.device.type == "cpu" and x.softcap is None and x.v.shape[3] == x.q.shape[3] and contiguous


def _flash(
    q: Float[Tensor, "n g r d"],
    k: Float[Tensor, "n g c d"],
    v: Float[Tensor, "n g c d"],
    mask: Float[Tensor, "n 1 r c"] | None,
    sharpness: Float[Tensor, "r 1"] | None,
    scale: float,
) -> tuple[Float[Tensor, "n g r d"], Float[Tensor, "n g r"]]:
    """Return the CPU's attention, which calls the log-sum-exp of a row that sees nothing 0."""
    if sharpness is not None:
        q = (q * sharpness).to(q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    return out, lse if mask is None else lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)


def _products(
    q: Float[Tensor, "n g r d"],
    k: Float[Tensor, "n g c d"],
    v: Float[Tensor, "n g c e"],
    mask: Float[Tensor, "n 1 r c"] | None,
    sharpness: Float[Tensor, "r 1"] | None,
    scale: float,
    softcap: float | None,
) -> tuple[Float[Tensor, "n g r e"], Float[Tensor, "n g r"]]:
    """Return the same, a key head at a time: a product over all of them would copy the keys."""
    products = [a @ b.mT for a, b in zip(q.expand(len(k), -1, -1, -1).unbind(1), k.unbind(1), strict=True)]
    scores = torch.stack(products, 1).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sharpness is not None:
        scores = scores * sharpness
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).to(q.dtype)
    return torch.stack([a @ b for a, b in zip(weights.unbind(1), v.unbind(1), strict=True)], 1), lse
