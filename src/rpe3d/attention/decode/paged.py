# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""The decoding step over a paged cache: `loop` with a block table between a key's position and its place.

A server keeps the keys and values of all its sequences in pages of a few tokens, and for each sequence a row of page
numbers. Everything else is as in `kernel`; keys are turned by stock RoPE, as there.

One launch takes sequences of any lengths. How many programs read a long one is found on the device, from the lengths of
all: the grid is that of the batch and of the block table, so a launch that was captured in a CUDA graph serves any
lengths, and programs for which a short sequence has no keys end at once.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rpe3d.attention.decode.launch import Launch, scales
from rpe3d.attention.decode.loop import LEAST_KEYS, NEVER, _attend, _cdiv, _power, _processors, tile
from rpe3d.attention.lowering import Plan, plan, table
from rpe3d.config import ConfigError
from rpe3d.geometry import Law
from rpe3d.rotation.launch import Bound, Launcher

COUNTED = tl.constexpr(1024)  # lengths that a program loads at once


@triton.jit(
    do_not_specialize=["splits", "at_once", "least_tiles", "pages_b", "lengths_b"],
    do_not_specialize_on_alignment=["pages", "lengths", "lse", "sinks"],
)
@no_type_check
def _paged_kernel(
    q,
    k,
    v,
    pages,
    lengths,
    out,
    lse,
    parts,
    logs,
    arrivals,
    sinks,
    table,
    splits,
    at_once,
    least_tiles,
    scale,
    softcap,
    q_b,
    q_h,
    q_t,
    k_p,
    k_s,
    k_h,
    v_p,
    v_s,
    v_h,
    out_b,
    out_h,
    out_t,
    pages_b,
    lengths_b,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BANDS: tl.constexpr,
    TURNING: tl.constexpr,
    FADES: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute BLOCK_M rows (queries x heads of a group) against one split of a sequence's keys; see `_decode_kernel`.

    The queries of sequence b are its last tokens, at lengths[b] - QUERIES and on; its key at position p lies in slot
    p mod PAGE of page pages[b, p div PAGE]. A sequence of length 0 sees nothing. A split has at least `least_tiles`,
    and its share of the keys of all sequences where `at_once` programs run for a tile of rows at the same time.
    """
    BLOCKS: tl.constexpr = (QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M
    group = tl.program_id(1) // BLOCKS
    b = tl.program_id(2).to(tl.int64)
    stop = tl.load(lengths + b * lengths_b).to(tl.int64)
    start = tl.zeros([], tl.int64)
    if SPLIT:
        keys = 0
        for first in range(0, tl.num_programs(2), COUNTED):
            some = first + tl.arange(0, COUNTED)
            some_keys = tl.load(lengths + some * lengths_b, mask=some < tl.num_programs(2), other=0)
            keys += tl.sum(some_keys.to(tl.int32), 0)
        least_tiles = tl.maximum(least_tiles, tl.cdiv(tl.cdiv(keys, at_once), BLOCK_N))

    m = (tl.program_id(1) % BLOCKS) * BLOCK_M + tl.arange(0, BLOCK_M)
    head, t = group * GROUP + m // QUERIES, m % QUERIES
    live = m < QUERIES * GROUP
    if QUERIES == 1:
        p = stop - 1 + tl.arange(0, 1)
        highest = stop - 1
        lowest = highest
    else:
        p = tl.where(live, stop - QUERIES + t, -1)
        highest = tl.max(p, 0)
        lowest = tl.min(tl.where(p >= 0, p, NEVER), 0)
    _attend(
        q + b * q_b, k + group.to(tl.int64) * k_h, v + group.to(tl.int64) * v_h, pages + b * pages_b,
        out + b * out_b, lse, parts, logs, arrivals, sinks, table, None, 0,
        p, lowest, highest, start, stop, start, group, m, head, t, live,
        splits, least_tiles, scale, softcap, q_h, q_t, k_p, k_s, v_p, v_s, out_h, out_t,
        QUERIES, GROUP, DIM, WIDTH, PAIRS, INTERLEAVED, BANDS, TURNING, FADES, CHUNK, PAGE, SPLIT, ROWS, BLOCK_M,
        BLOCK_N, WIDEN,
    )  # fmt: skip


_paged = Launcher(_paged_kernel)
STAGES = 5
"""Two more than without pages: their numbers are loaded ahead, and as many keys shall be on the way."""
EVER = 2**20  # programs at once, where none shall be spared
WAVES = 8
"""Programs in all, per multiprocessor: more let one long sequence among many use more of a GPU, most end at once."""


def warps(ways: int) -> int:
    """Return the warps for a law with so many turns: four, and where their registers would spill (`dca`) eight."""
    return 8 if ways > 2 else 4


def split(tiles: int, sequences: int, keys: int, processors: int, waves: int = WAVES) -> int:
    """Into how many parts the keys of a sequence may go, of which each has so many tiles of rows.

    As many as fill a GPU with one sequence, while all are at most `waves` programs per multiprocessor.
    """
    most = min(processors // tiles, waves * processors // (tiles * sequences), _cdiv(keys, LEAST_KEYS))
    return max(1, most)


class Steps:
    """Decoding steps over one paged cache, for the vectors of any layer and for batches of any size.

    What a launch needs besides vectors is made once and kept: the law's table, scratch that all launches share since
    they run one after the other, and for every shape of batch the bound launch. A CUDA graph that captured a launch
    therefore stays valid. `options` are those of `Launch`.
    """

    def __init__(
        self,
        law: Law,
        device: torch.device,
        *,
        sequences: int,
        heads: int,
        groups: int,
        waves: int = WAVES,
        splits: int | None = None,
        **options: int,
    ) -> None:
        self.law, self.device, self.waves, self.splits = law, device, waves, splits
        made = _made(law)
        self.options = {"num_stages": STAGES, "num_warps": warps(made.ways)} | options
        self.table = table(law, device)
        # With more than one split, all rows of all splits are at most these (`split`), and one slot more fades.
        rows = waves * _processors(device) * min(64, heads // groups)
        slots = 1 + made.fades / 2
        floats = int(rows * (slots * law.rotary.head_dim + 1 + 3 * made.fades / 2)) + sequences * heads
        self.room = torch.empty(floats, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(sequences * heads, dtype=torch.int32, device=device)
        self._bound: dict[tuple[object, ...], tuple[Bound, tuple[Tensor | None, ...]]] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *,
        pages: Tensor,
        lengths: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the output of `attend` to `out` [b, h, t, d]; return the log-sum-exp, valid until the next call."""
        strides = (q.stride(), k.stride(), v.stride(), out.stride(), pages.stride(), lengths.stride())
        key = (q.shape, k.shape[1], pages.shape, *strides, q.dtype, scale, softcap)
        found = self._bound.get(key)
        if found is None:
            found = self._bound[key] = self._bind(q, k, v, out, pages, lengths, scale, softcap)
        bound, results = found
        bound(q, k, v, pages, lengths, out, *results, None if sinks is None else sinks.contiguous())
        lse = results[0]
        assert lse is not None
        return lse

    def _bind(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        pages: Tensor,
        lengths: Tensor,
        scale: float,
        softcap: float | None,
    ) -> tuple[Bound, tuple[Tensor | None, ...]]:
        made, bound = _bind(
            self.law, self.table, q, k, v, out, pages, lengths, scale, softcap, self.splits, self.waves, self.options
        )
        room, arrivals = self.room, self.arrivals
        if made.room() > room.numel() or made.counters > arrivals.numel():  # splits that were asked for
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise ConfigError("a captured step is larger than announced", "raise `sequences`, or run it once first")
            room = torch.empty(made.room(), dtype=torch.float32, device=self.device)
            arrivals = torch.zeros(made.counters, dtype=torch.int32, device=self.device)
        return bound, made.results_in(room, arrivals)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    law: Law,
    *,
    pages: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
    waves: int = WAVES,
    **options: int,
) -> tuple[Tensor, Tensor]:
    """Attend from the last t tokens of every sequence to all of it; return the output [b, h, t, d] and the log-sum-exp.

    q is [b, h, t, d]; k and v are the cache [pages, tokens per page, g, d], turned by stock RoPE; `pages` [b, n] holds
    the page numbers of every sequence and `lengths` [b] its tokens, those of the queries included (at least t, or 0
    for a row that is not in use). Nothing is read from the device, so that a step can be captured in a CUDA graph.
    """
    b, h, t, d = q.shape
    given = {"num_stages": STAGES, "num_warps": warps(_made(law).ways)} | options
    out = torch.empty((b, t, h, d), dtype=q.dtype, device=q.device).transpose(1, 2)
    made, bound = _bind(law, table(law, q.device), q, k, v, out, pages, lengths, scale, softcap, splits, waves, given)
    lse, *scratch = made.results()
    bound(q, k, v, pages, lengths, out, lse, *scratch, None if sinks is None else sinks.contiguous())
    return out, lse


def _made(law: Law) -> Plan:
    made = plan(law)
    if made.refusal is not None:
        raise ConfigError(
            f"the paged kernel cannot run {law.name}: {made.refusal}", "gather the keys and call `attention`"
        )
    return made


def _bind(
    law: Law,
    numbers: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    pages: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None,
    splits: int | None,
    waves: int,
    options: dict[str, int],
) -> tuple[Launch, Bound]:
    """Return the launch for a batch like this. Splits that are asked for are not made fewer on the device."""
    (b, h, t, _), (_, page, g, _) = q.shape, k.shape
    if any(x.stride(-1) != 1 for x in (q, k, v, out)):
        raise ConfigError("the paged kernel reads contiguous vectors", "call .contiguous()")
    keys, processors, rows = pages.shape[1] * page, _processors(q.device), h // g * t
    tiles = g * _cdiv(rows, tile(rows, _power(q.shape[3]), q.element_size(), None)["block_m"])
    at_once = max(1, processors // tiles) if splits is None else EVER
    made = Launch(law, q, g, keys, splits=splits or split(tiles, b, keys, processors, waves), **options)
    constants = dict(made.constants)
    least_tiles = constants.pop("LEAST_TILES")  # an argument, so that batches of all sizes share a kernel
    arguments = (
        numbers,
        made.splits,
        at_once,
        least_tiles,
        *scales(scale, softcap),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        pages.stride(0),
        lengths.stride(0),
    )
    constants |= {"PAGE": page, "WIDEN": _paged.interpreted}
    return made, _paged.bind(q.device, made.grid, arguments, constants, made.options)
