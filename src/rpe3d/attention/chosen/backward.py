# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""The gradient of attention over near keys and far blocks that queries chose, in Triton kernels.

With the log-sum-exp of the whole row, p = exp(s - lse) is a pair's weight whichever part its key belongs to, and
ds = p (dO · v - Δ) with Δ = dO · O - dlse (Dao, arXiv 2307.08691, section 3.1.2; dlse: the gradient of the
log-sum-exp). So near and far keys are apart: the library's backward has the former, two kernels the latter. One walks
the blocks that a tile of queries chose, for dq. The other walks the tiles that chose a block, for dk and dv; each
program owns its block, so nothing is added in an order that differs from run to run. What was chosen is found again, as
the forward found it, rather than kept: it would take more memory than the vectors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from rpe3d.attention.blocked.run import logs_as_values
from rpe3d.attention.chosen.far import INTERPRETED, LOG2_E, most_rows
from rpe3d.attention.chosen.select import Selection, Unions
from rpe3d.attention.chosen.vectors import _in_bfloat16
from rpe3d.attention.decode.loop import _cdiv, _power
from rpe3d.attention.merge import products
from rpe3d.attention.prefill.kernel import _dot
from rpe3d.attention.problem import refuse_second_derivative
from rpe3d.attention.spans import Span
from rpe3d.rotation import rotate
from rpe3d.rotation.launch import Launcher

if TYPE_CHECKING:
    from rpe3d.attention.chosen import Kernels

ROOM = 2**28
"""Bytes of lists, of turned queries and of their gradients at a time."""
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
@no_type_check
def _like(x, other, WIDEN: tl.constexpr):
    """Round to the type of another tensor. WIDEN: for Triton's interpreter, which cuts off in bfloat16."""
    if WIDEN and other.dtype == tl.bfloat16:
        return _in_bfloat16(x, True)
    return x.to(other.dtype)


@triton.jit(do_not_specialize=["first", "queries", "room"])
@no_type_check
def _queries_kernel(
    q, k, v, do, lse, delta, dq, picked, bits, ends, first, queries, room, scale,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_t, lse_b, lse_h, delta_b, delta_h, dq_b, dq_h, dq_t,
    TILE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of a tile of queries in HEADS of the GROUP heads of a key head; q and k are turned, and dq will be.

    The first query of tile 0 has index `first`, which is negative where none stands there.
    """
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    tile, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    group, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    r = tl.arange(0, BLOCK_M)
    t, head = r % TILE, part * HEADS + r // TILE
    index = first + tile * TILE + t
    live = (r < TILE * HEADS) & (head < GROUP) & (index >= 0) & (index < queries)
    head = (group * GROUP + head).to(tl.int64)
    groups = tl.num_programs(1) // PARTS
    list = (b * groups + group) * tl.num_programs(0) + tile
    count = tl.load(ends + 3 * list + 2)
    picked += list * room
    bits += list * room

    d = tl.arange(0, WIDTH)[None, :]
    row, there = index.to(tl.int64)[:, None], live[:, None] & (d < DIM)
    query = tl.load(q + b * q_b + head[:, None] * q_h + row * q_t + d, mask=there, other=0.0)
    change = tl.load(do + b * do_b + head[:, None] * do_h + row * do_t + d, mask=there, other=0.0)
    log = tl.load(lse + b * lse_b + head * lse_h + index, mask=live, other=0.0) * 1.4426950408889634
    less = tl.load(delta + b * delta_b + head * delta_h + index, mask=live, other=0.0)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    k += b * k_b + group.to(tl.int64) * k_h
    v += b * v_b + group.to(tl.int64) * v_h
    column = tl.arange(0, BLOCK_N)
    mine = (1 << t.to(tl.int64)).to(tl.int32)
    for n in range(0, count * SIZE, BLOCK_N):
        entry = (n + column) // SIZE
        block = tl.load(picked + entry, mask=entry < count, other=0).to(tl.int32)
        bit = tl.load(bits + entry, mask=entry < count, other=0)
        place = (block * SIZE + (n + column) % SIZE).to(tl.int64)[:, None]
        if DIM < WIDTH:
            key = tl.load(k + place * k_s + d, mask=d < DIM, other=0.0)
            value = tl.load(v + place * v_s + d, mask=d < DIM, other=0.0)
        else:
            key = tl.load(k + place * k_s + d)
            value = tl.load(v + place * v_s + d)
        zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        score = _dot(query, tl.trans(key), zero, WIDEN, PRECISION) * scale - log[:, None]
        chosen = (bit[None, :] & mine[:, None]) != 0
        weight = tl.exp2(tl.where(chosen, score, float("-inf")))
        slope = weight * (_dot(change, tl.trans(value), zero, WIDEN, PRECISION) - less[:, None])
        acc = _dot(_like(slope, key, WIDEN), key, acc, WIDEN, PRECISION)
    tl.store(dq + b * dq_b + head[:, None] * dq_h + row * dq_t + d, acc * (scale * LN_2), mask=there)


@triton.jit(do_not_specialize=["room", "blocks"])
@no_type_check
def _words_kernel(picked, bits, ends, words, room, blocks, ACROSS: tl.constexpr):
    """Write what one tile of queries chose into a column of `words` [b, g, blocks, tiles]."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    head = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    list = head * tiles + tile
    count = tl.load(ends + 3 * list + 2)
    for start in range(0, count, ACROSS):
        entry = start + tl.arange(0, ACROSS)
        block = tl.load(picked + list * room + entry, mask=entry < count, other=0).to(tl.int32)
        word = tl.load(bits + list * room + entry, mask=entry < count, other=0)
        tl.store(words + (head * blocks + block) * tiles + tile, word, mask=entry < count)


@triton.jit(do_not_specialize=["tiles"])
@no_type_check
def _lists_kernel(words, picked, bits, counts, tiles, ACROSS: tl.constexpr):
    """List the tiles of queries that chose one block, in order, with their words."""
    head = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    list = head * tl.num_programs(0) + tl.program_id(0)
    count = tl.zeros([], tl.int32)
    for start in range(0, tiles, ACROSS):
        n = start + tl.arange(0, ACROSS)
        word = tl.load(words + list * tiles + n, mask=n < tiles, other=0)
        some = (word != 0).to(tl.int32)
        entry = list * tiles + count + tl.cumsum(some, 0) - some
        tl.store(picked + entry, n, mask=some != 0)
        tl.store(bits + entry, word, mask=some != 0)
        count += tl.sum(some, 0)
    tl.store(counts + list, count)


@triton.jit(do_not_specialize=["first", "queries", "room"])
@no_type_check
def _keys_kernel(
    q, k, v, do, lse, delta, dk, dv, picked, bits, counts, first, queries, room, scale,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_t, lse_b, lse_h, delta_b, delta_h, dk_b, dk_h, dk_s,
    TILE: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the share of some tiles of queries to dk and dv of KEYS keys of a block; q, k and dk are turned."""
    PIECES: tl.constexpr = (SIZE + KEYS - 1) // KEYS
    PARTS: tl.constexpr = (TILE * GROUP + BLOCK_M - 1) // BLOCK_M
    block, group, b = tl.program_id(0) // PIECES, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    list = (b * tl.num_programs(1) + group) * (tl.num_programs(0) // PIECES) + block
    count = tl.load(counts + list)
    if count > 0:
        picked += list * room
        bits += list * room
        column = tl.program_id(0) % PIECES * KEYS + tl.arange(0, KEYS)
        d = tl.arange(0, WIDTH)[None, :]
        place, there = (block * SIZE + column).to(tl.int64)[:, None], (column < SIZE)[:, None] & (d < DIM)
        key = tl.load(k + b * k_b + group * k_h + place * k_s + d, mask=there, other=0.0)
        value = tl.load(v + b * v_b + group * v_h + place * v_s + d, mask=there, other=0.0)
        key_change = tl.zeros([KEYS, WIDTH], tl.float32)
        value_change = tl.zeros([KEYS, WIDTH], tl.float32)
        q += b * q_b + group * GROUP * q_h
        do += b * do_b + group * GROUP * do_h
        lse += b * lse_b + group * GROUP * lse_h
        delta += b * delta_b + group * GROUP * delta_h
        r = tl.arange(0, BLOCK_M)
        for i in range(count * PARTS):
            tile = tl.load(picked + i // PARTS)
            word = tl.load(bits + i // PARTS)
            t, head = (i % PARTS * BLOCK_M + r) % TILE, (i % PARTS * BLOCK_M + r) // TILE
            index = first + tile * TILE + t
            live = (((word >> t) & 1) != 0) & (head < GROUP) & (index >= 0) & (index < queries)
            row, head = index.to(tl.int64)[:, None], head.to(tl.int64)
            here = live[:, None] & (d < DIM)
            query = tl.load(q + head[:, None] * q_h + row * q_t + d, mask=here, other=0.0)
            change = tl.load(do + head[:, None] * do_h + row * do_t + d, mask=here, other=0.0)
            log = tl.load(lse + head * lse_h + index, mask=live, other=0.0) * 1.4426950408889634
            less = tl.load(delta + head * delta_h + index, mask=live, other=0.0)
            zero = tl.zeros([KEYS, BLOCK_M], tl.float32)
            score = _dot(key, tl.trans(query), zero, WIDEN, PRECISION) * scale - log[None, :]
            weight = tl.exp2(tl.where(live[None, :], score, float("-inf")))
            value_change = _dot(_like(weight, change, WIDEN), change, value_change, WIDEN, PRECISION)
            slope = weight * (_dot(value, tl.trans(change), zero, WIDEN, PRECISION) - less[None, :])
            key_change = _dot(_like(slope, query, WIDEN), query, key_change, WIDEN, PRECISION)
        at = b * dk_b + group * dk_h + place * dk_s + d
        before = tl.load(dk + at, mask=there, other=0.0)
        tl.store(dk + at, before + key_change * (scale * LN_2), mask=there)
        before = tl.load(dv + at, mask=there, other=0.0)
        tl.store(dv + at, before + value_change, mask=there)


_queries, _keys = Launcher(_queries_kernel), Launcher(_keys_kernel)
_words, _lists = Launcher(_words_kernel), Launcher(_lists_kernel)


class Attend(torch.autograd.Function):
    """`Kernels` with its gradient, exact for the choice that was made; the choice itself is not differentiated.

    q and k are rotated by stock RoPE. Of the forward only vectors, output and log-sum-exp are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, made: Kernels
    ) -> tuple[Float[Tensor, "b h t d"], Float32[Tensor, "b h t"]]:
        out, lse = made.attend(q, k, v, sinks)
        ctx.made = made
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("the kernels of a chosen far field")
        q, k, v, sinks, out, lse = ctx.saved_tensors
        made: Kernels = ctx.made
        if do is None:
            do = torch.zeros_like(out)
        do = do if do.stride(3) == 1 else do.contiguous()
        delta = products(do, out)
        dq, dk, dv = made.calls.gradients(q, k, v, out, lse, do)
        if dlse is not None:
            delta -= dlse
            ones, change, size = logs_as_values(v, out, lse, dlse)
            of_logs = made.calls.gradients(q, k, ones, torch.zeros_like(out), lse, change)
            dq += of_logs[0] * size
            dk += of_logs[1] * size
        for span in made.spans:
            queries, keys = (span.batch, slice(None), span.query), (span.batch, slice(None), span.key)
            vectors = q[queries], k[keys], v[keys], do[queries], lse[queries], delta[queries]
            add_far(made, span, *vectors, dq[queries], dk[keys], dv[keys])
        dsinks = None
        if sinks is not None:
            dsinks = -(torch.exp(sinks[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, dsinks, None


def add_far(
    made: Kernels, span: Span, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Add what the far keys of a span give to dq, dk and dv, a few key heads and a stretch of queries at a time."""
    selection, tables, theta = made.selection, made.tables, made.problem.frequencies
    region, interleaved = selection.region, made.problem.law.rotary.interleaved

    def turned(x: Tensor, turn: Any, positions: range, back: bool) -> Tensor:
        cos, sin = tables(turn, None, (positions,), theta, torch.float32)
        return rotate(x, None, cos, -sin if back else sin, interleaved=interleaved)[0]

    # Of a tile and a key head: lists of tiles, as if all tiles chose all blocks, and turned queries, whose gradients in
    # float32 are turned back.
    more = 12 * selection.choosable(span.queries[-1])
    more += selection.tile * q.shape[1] // k.shape[1] * q.shape[3] * (q.element_size() + 8)
    for few in made.few_heads(span, q, k):
        keys, heads, n = few.keys, few.heads, few.turned.shape[2]
        far_dk, far_dv = (torch.zeros(few.turned.shape, dtype=torch.float32, device=q.device) for _ in range(2))
        blocks = n // selection.choice.size
        for stretch in made._stretches(span.queries, q.shape[0] * few.k.shape[1], ROOM, more):
            positions = range(max(stretch.start, span.queries.start), min(stretch.stop, span.queries.stop))
            rows = slice(positions.start - span.queries.start, positions.stop - span.queries.start)
            unions = made.unions(span, few, q, stretch)
            query = turned(q[:, heads, rows], region.query, positions, False)
            some = query, few.turned, v[:, keys], do[:, heads, rows], lse[:, heads, rows], delta[:, heads, rows]
            given: dict[str, Any] = {"first": stretch.start - positions.start, "scale": made.problem.scale}
            gradient = for_queries(selection, unions, *some, **given)
            dq[:, heads, rows].add_(turned(gradient, region.query, positions, True))
            for_keys(selection, inverse(unions, blocks), *some, far_dk, far_dv, **given)
        dk[:, keys, :n].add_(turned(far_dk, region.key, range(n), True))
        dv[:, keys, :n].add_(far_dv)


def _constants(selection: Selection, q: Tensor, k: Tensor) -> tuple[dict[str, Any], int]:
    """Return what both kernels are compiled for, and how many rows of q a program may have."""
    d = q.shape[3]
    width = max(16, _power(d))
    constants = {
        "TILE": selection.tile, "GROUP": q.shape[1] // k.shape[1], "SIZE": selection.choice.size, "DIM": d,
        "WIDTH": width, "WIDEN": INTERPRETED, "PRECISION": "tf32x3",
    }  # fmt: skip
    return constants, most_rows(d, q.element_size())


def for_queries(
    selection: Selection, unions: Unions, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor,
    *, first: int, scale: float, **options: Any,
) -> Float32[Tensor, "b h t d"]:  # fmt: skip
    """Return dq of turned queries. Index `first` of q, which may be negative, is where tile 0 of the unions begins."""
    (b, _, t, _), g = q.shape, k.shape[1]
    constants, rows = _constants(selection, q, k)
    group, most = constants["GROUP"], max(1, rows // selection.tile)
    parts = _cdiv(group, most)
    heads = _cdiv(group, parts)
    block_m = max(16, _power(selection.tile * heads))
    chosen = {"num_warps": 8 if block_m >= 128 else 4, "num_stages": 2} | options
    block_n = chosen.pop("block_n", max(16, min(64, rows // 2)))
    dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    tiles, room = unions.picked.shape[2:]
    _queries(
        q.device,
        (tiles, g * parts, b),
        (
            q, k, v, do, lse, delta, dq, *unions, first, t, room, scale * LOG2_E,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *lse.stride()[:2],
            *delta.stride()[:2], *dq.stride()[:3],
        ),
        constants | {"HEADS": heads, "BLOCK_M": block_m, "BLOCK_N": block_n},
        chosen,
    )  # fmt: skip
    return dq


def inverse(unions: Unions, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tiles of queries chose each of so many blocks, in order, with which of their rows, and how many."""
    b, g, tiles, room = unions.picked.shape
    device = unions.picked.device
    words = torch.zeros(b, g, blocks, tiles, dtype=torch.int32, device=device)
    _words(device, (tiles, g, b), (*unions, words, room, blocks), {"ACROSS": 256}, {"num_warps": 4})
    picked, bits = torch.empty_like(words), torch.empty_like(words)
    counts = torch.empty(b, g, blocks, dtype=torch.int32, device=device)
    across = {"ACROSS": max(16, min(1024, _power(tiles)))}
    _lists(device, (blocks, g, b), (words, picked, bits, counts, tiles), across, {"num_warps": 4})
    return picked, bits, counts


def for_keys(
    selection: Selection, lists: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor,
    lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor, *, first: int, scale: float, **options: Any,
) -> None:  # fmt: skip
    """Add to dk, of turned keys, and dv, which lie in memory alike, what queries give that chose them."""
    (b, _, t, _), g = q.shape, k.shape[1]
    blocks, room = lists[0].shape[2:]
    constants, rows = _constants(selection, q, k)
    size, each = constants["SIZE"], selection.tile * constants["GROUP"]
    keys = max(16, min(size, 64, 8192 // constants["WIDTH"]))  # whose gradients stay in registers
    block_m = max(16, min(rows // 2, _power(each)))
    _keys(
        q.device,
        (blocks * _cdiv(size, keys), g, b),
        (
            q, k, v, do, lse, delta, dk, dv, *lists, first, t, room, scale * LOG2_E,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *lse.stride()[:2],
            *delta.stride()[:2], *dk.stride()[:3],
        ),
        constants | {"KEYS": keys, "BLOCK_M": block_m},
        {"num_warps": 4, "num_stages": 3 if q.element_size() == 2 else 2} | options,
    )  # fmt: skip
