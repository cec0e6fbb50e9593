"""Computes attention of a prompt's piece under a law with vLLM's FlashAttention: one call per region, merged.

Chosen on Hopper GPUs (FlashAttention 3) for more than `MOST_QUERIES` new tokens. Equals `rpe3d.attention`.

Under a chunk law, the queries of one chunk see one run of keys in each region. FlashAttention therefore gets every
chunk of queries as a sequence with its own length and its own row of the block table, and runs a region in one call.
Keys that keep their stock rotation are read in vLLM's pages. Other keys are gathered and rotated once, into a single
page that every sequence starts at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rpe3d.attention import attention
from rpe3d.attention.blocked.task import PLAIN, query_kind
from rpe3d.attention.decode import MOST_QUERIES
from rpe3d.attention.merge import MOST, Part, merge
from rpe3d.attention.problem import sharpened
from rpe3d.config import ConfigError
from rpe3d.geometry import Law, Region, Turn
from rpe3d.geometry.region import STOCK
from rpe3d.rotation import rotate
from rpe3d.rotation.table import Tables, positions_of

TILES = {64: (192, 192), 96: (192, 144), 128: (128, 160), 192: (128, 96), 256: (128, 80)}
"""Rows and keys per tile of vLLM's FlashAttention 3 without a mask, by head dimension (from its tile_size.h)."""
ROWS = 208
"""Queries on each side of a chunk border in a trial: more rows than a tile has."""
FEW = 16
"""Queries that the specification computes at a time in a trial, for one head: a server has little memory to spare."""
LONGEST = 2**17
"""Keys of the longest trial, for the same reason."""
ENOUGH = 0.8
"""Tiles per multiprocessor from which FlashAttention does not split keys among programs (from its heuristics.h)."""
Flash = Callable[..., Any]
"""vLLM's `flash_attn_varlen_func`, which returns the output and the log-sum-exp."""


def refusal(law: Law, page: int, rows: int = 0, keys: int = 0) -> str | None:
    """Return why a law cannot run in these calls over pages of `page` tokens; None if it can.

    `rows` are the queries of a piece, and `keys` the keys of its sequence.
    """
    if law.chooses:
        return "it chooses its far keys"
    chunk = law.chunk_in_use
    if chunk is None or any(region.unit != chunk for region in law.regions):
        return "it has no chunks, or regions of other units"
    if chunk % page:
        return f"its chunks of {chunk} tokens are not whole pages of {page}"
    if (rows // chunk + 2) * (keys + math.lcm(page, *(high for _, high in TILES.values()))) >= 2**31:
        return "FlashAttention counts the keys of all chunks of a piece in 32 bits"
    if law.rotary.head_dim > max(TILES):
        return f"heads of {law.rotary.head_dim} dimensions are too large"
    if len(law.regions) > MOST or any(region.start or region.keys is not None for region in law.regions):
        return "a region has first or last keys of its own"
    if any(_own_chunk(region) or region.last is not None for region in law.regions if not region.key.is_stock):
        return "it rotates the keys of near chunks"
    if any(region.fade is not None for region in law.regions) and 2 * law.rotary.pairs < law.rotary.head_dim:
        return "it does not rotate all dimensions, and the others would not be sharpened"
    return None


def tile(dim: int) -> tuple[int, int]:
    """Return the rows and keys of FlashAttention's tile for a head dimension, which FlashAttention rounds up."""
    return TILES[min(known for known in TILES if known >= dim)]


def _own_chunk(region: Region) -> bool:
    """Say whether a query sees keys of its own chunk in a region."""
    return region.first is None or region.first <= 0


@dataclass(frozen=True, kw_only=True)
class Call:
    """One FlashAttention call: the rows of a piece that see keys of a region, a sequence per chunk, and those keys."""

    region: Region
    rows: slice
    starts: Int[Tensor, " n+1"]
    lengths: Int[Tensor, " n"]
    table: Int[Tensor, "n m"]
    counts: list[int]
    """Rows of each sequence."""
    most_keys: int
    gathered: Int[Tensor, " m"] | None
    """Pages whose keys are gathered and rotated; None if they are read in place."""


class Prompt:
    """A piece of one sequence's prompt, prepared once per forward for all layers.

    The piece holds the tokens at positions `queries`, the last of the sequence so far; `pages` are the pages of that
    sequence, of `page` tokens each. FlashAttention splits keys among programs only if the rows alone do not fill the
    GPU's `processors`, because every split needs memory for its own result; `splits` overrides that.
    """

    def __init__(
        self,
        law: Law,
        queries: range,
        pages: Int[Tensor, " m"],
        page: int,
        flash: Flash,
        *,
        processors: int,
        splits: int | None = None,
    ) -> None:
        if (why := refusal(law, page, len(queries), queries.stop)) is not None:
            raise ConfigError(f"{law.name} does not run in calls of FlashAttention: {why}", "use rpe3d.attention")
        self.law, self.queries, self.flash = law, queries, flash
        self.processors, self.splits = processors, splits
        self.tables = Tables()
        self.frequencies: Tensor = law.kept(("frequencies", pages.device), lambda: law.frequencies().to(pages.device))
        found = (self._call(region, pages, page) for region in law.regions)
        self.calls = [call for call in found if call is not None]
        fades = [region.fade for region in law.regions if region.fade is not None]
        self.shift: Tensor | None = None
        if fades:
            self.shift = fades[0].shift(positions_of((queries,))).to(pages.device, torch.float32, non_blocking=True)

    def _call(self, region: Region, pages: Tensor, page: int) -> Call | None:
        chunk, first, stop = region.unit, self.queries.start, self.queries.stop
        runs = []
        for i in range(first // chunk, -(-stop // chunk)):
            rows = range(max(first, i * chunk), min(stop, (i + 1) * chunk))
            end = rows.stop if _own_chunk(region) else (i - (region.first or 0) + 1) * chunk
            begin = 0 if region.last is None else max(0, i - region.last) * chunk
            if begin < end:
                runs.append((rows, begin, end))
        if not runs:
            return None
        counts, lengths = [len(rows) for rows, _, _ in runs], [end - begin for _, begin, end in runs]
        most = max(lengths)
        gathered = None
        if region.key.is_stock:
            width = torch.arange(-(-most // page))
            index = torch.tensor([begin // page for _, begin, _ in runs])[:, None] + width
            table = pages[index.clamp(max=len(pages) - 1).to(pages.device)].to(torch.int32)
        else:
            whole = math.lcm(tile(self.law.rotary.head_dim)[1], page)  # tiles that fit are read by the copy engine
            count = -(-most // whole) * whole
            gathered = pages[torch.arange(count // page).clamp(max=len(pages) - 1).to(pages.device)]
            table = torch.zeros(len(runs), 1, dtype=torch.int32, device=pages.device)
        numbers = torch.tensor([0, *counts, *lengths], dtype=torch.int32)
        starts = numbers[: len(runs) + 1].cumsum(0, dtype=torch.int32)
        return Call(
            region=region,
            rows=slice(runs[0][0].start - first, runs[-1][0].stop - first),
            starts=starts.to(pages.device),
            lengths=numbers[len(runs) + 1 :].to(pages.device),
            table=table,
            counts=counts,
            most_keys=most,
            gathered=gathered,
        )

    def __call__(
        self,
        query: Float[Tensor, "t h d"],
        keys: Float[Tensor, "pages page g d"],
        values: Float[Tensor, "pages page g d"],
        out: Float[Tensor, "t h d"],
        scale: float,
    ) -> None:
        """Attend from the piece's queries, whose vectors stock RoPE has rotated, and write to `out`."""
        q = sharpened(query.transpose(0, 1)[None], self.law, self.queries, self.queries.stop)
        parts, turned = [], {}
        for call in self.calls:
            region = call.region
            rows, k, v = q[:, :, call.rows], keys, values
            kind = query_kind(region)
            if kind != PLAIN:
                rows = self._turned(rows, *kind, self.queries[call.rows])
            if call.gathered is not None:
                if region.key not in turned:
                    turned[region.key] = self._gathered(keys, values, call)
                k, v = turned[region.key]
            made, lse = self.flash(
                rows[0].transpose(0, 1),
                k,
                v,
                max_seqlen_q=max(call.counts),
                cu_seqlens_q=call.starts,
                max_seqlen_k=call.most_keys,
                seqused_k=call.lengths,
                softmax_scale=scale,
                causal=_own_chunk(region),
                block_table=call.table,
                num_splits=self._splits(call, rows.shape[1], k.shape[2]),
                return_softmax_lse=True,
            )
            parts.append(Part(made.transpose(0, 1)[None], lse[None], call.rows.start, faded=region.fade is not None))
        logs = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        fade = self.shift if any(part.faded for part in parts) else None
        merge(parts, out.transpose(0, 1)[None], logs, fade=fade)

    def _splits(self, call: Call, heads: int, groups: int) -> int:
        """Return 1 if the rows fill the GPU, else 0, which lets FlashAttention choose the number of splits."""
        if self.splits is not None:
            return self.splits
        high, _ = tile(self.law.rotary.head_dim)
        tiles = groups * sum(-(-count * heads // groups // high) for count in call.counts)
        return 1 if tiles >= ENOUGH * self.processors else 0

    def _gathered(self, keys: Tensor, values: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values of a call as one page, with values of 0 beyond its keys.

        FlashAttention multiplies whole tiles, and NaN times a weight of 0 is NaN.
        """
        assert call.gathered is not None
        k, v = (cache.index_select(0, call.gathered).flatten(0, 1) for cache in (keys, values))
        v[call.most_keys :] = 0
        made = self._turned(k.transpose(0, 1)[None], call.region.key, None, range(len(k)))
        return made[0].transpose(0, 1)[None], v[None]

    def _turned(self, x: Tensor, turn: Turn, sharp: Any, positions: range) -> Tensor:
        assert turn != STOCK or sharp is not None
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = self.tables(turn, sharp, (positions,), self.frequencies, dtype)
        return rotate(x, None, cos, sin, interleaved=self.law.rotary.interleaved)[0]


def fault(
    law: Law, page: int, *, heads: int, groups: int, dtype: torch.dtype, device: torch.device, flash: Flash
) -> str | None:
    """Try these calls on two short pieces with far keys; return what is wrong with the results, None if nothing is.

    vLLM itself calls FlashAttention in other ways, and builds differ. One piece crosses a chunk border, so that every
    region has several sequences with more rows than a tile; the other has as few rows as a piece may have. Pages are
    shuffled, vectors are random, and keys are split among programs or not. A result may differ from the specification
    in float64 by twice the error of `rpe3d.attention` in the same dtype, plus one rounding.
    """
    chunk = law.regions[0].unit
    border = int(law.exact_up_to) + (1 + -(-ROWS // chunk)) * chunk
    if border + ROWS > LONGEST:
        return f"a trial would have {border + ROWS} keys, more than {LONGEST}"
    try:
        return _fault(law, page, border, heads // groups, min(groups, 2), dtype, device, flash)
    except Exception as error:  # however a library refuses a call, or memory runs out: prompts have another way to run
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _fault(
    law: Law, page: int, border: int, each: int, groups: int, dtype: torch.dtype, device: torch.device, flash: Flash
) -> str | None:
    keys, dim = range(border + ROWS), law.rotary.head_dim
    count, random = -(-len(keys) // page), torch.Generator().manual_seed(0)
    pages = torch.randperm(count, generator=random).to(device)
    cache = torch.randn(count, groups, page, 2 * dim, generator=random).to(device, dtype).transpose(1, 2)
    vectors = torch.randn(2 * ROWS, each * groups, dim, generator=random).to(device, dtype)
    stored_keys, stored_values = cache.split(dim, dim=-1)
    k, v = (one[pages].flatten(0, 1)[: len(keys)].transpose(0, 1)[None] for one in (stored_keys, stored_values))
    true = _specified(vectors.transpose(0, 1)[None], k, v, law, keys[-2 * ROWS :], keys)
    for rows in (2 * ROWS, MOST_QUERIES + 1):
        query, queries, truth = vectors[-rows:], keys[-rows:], true[:, :, -rows:]
        q = query.transpose(0, 1)[None]
        peer, _ = attention(q, k, v, law, rotated=True, query_positions=queries, key_positions=keys)
        usual = float((peer.double() - truth).abs().max())
        most = 2 * usual + torch.finfo(dtype).eps * float(truth.abs().max())
        for splits in (1, 0, 2):  # none, as many as FlashAttention takes, and two
            out = torch.full_like(query, torch.nan)
            made = Prompt(law, queries, pages, page, flash, processors=0, splits=splits)
            made(query, stored_keys, stored_values, out, dim**-0.5)
            off = float((out.transpose(0, 1)[None].double() - truth).abs().max())
            if not off <= most:
                return f"a trial of {rows} queries is off by {off:.2g}, where rpe3d.attention is by {usual:.2g}"
    return None


def _specified(q: Tensor, k: Tensor, v: Tensor, law: Law, queries: range, keys: range) -> Tensor:
    """Return the output of the specification in float64, computed a few queries of one head at a time."""
    each, out = q.shape[1] // k.shape[1], torch.empty_like(q, dtype=torch.float64)
    given: dict[str, Any] = {"rotated": True, "key_positions": keys, "impl": "reference"}
    for head in range(q.shape[1]):
        one, group = slice(head, head + 1), slice(head // each, head // each + 1)
        held = [x[:, group].double() for x in (k, v)]
        for some in (slice(at, at + FEW) for at in range(0, len(queries), FEW)):
            rows = q[:, one, some].double()
            out[:, one, some] = attention(rows, held[0], held[1], law, query_positions=queries[some], **given)[0]
    return out
