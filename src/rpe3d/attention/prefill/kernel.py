# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""Flash attention under a law: one Triton kernel for a whole prompt. `prefill` says what it computes, and for which.

Every region of the law comes with its own turned queries and keys. For the rows of a tile of queries a region is an
interval of keys, whose ends rise with the row. Keys that all rows see are walked without a mask; the edges, where the
ends lie, in a second loop with one. A pair in no region costs nothing. A region that fades comes first: what its keys
weigh together is known when they have been seen, and all that it takes then is a shift of the running maximum.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from rpe3d.attention.lowering import band
from rpe3d.geometry import Region
from rpe3d.rotation.launch import Bound, Launcher

LOWEST = tl.constexpr(-3.0e38)  # below every score, and finite: what is less than it by infinity weighs 0, not NaN
SPAN = tl.constexpr(6)  # numbers per sequence in `spans`
LOG2_E = math.log2(math.e)


@triton.jit
@no_type_check
def _interval(band, p, start, stop):
    """Return the keys [low, high) of [start, stop) that queries at p see in a region: Region.contains, causally."""
    chunk = (tl.maximum(p, 0) // band[0]).to(tl.int64)
    start = tl.maximum(start, band[4])
    low = tl.maximum((chunk - band[2]) * band[0], start)
    high = tl.minimum(tl.minimum((chunk - band[1] + 1) * band[0], p + 1), tl.minimum(stop, band[3]))
    return low.to(tl.int32), tl.maximum(high, start).to(tl.int32)


@triton.jit
@no_type_check
def _dot(a, b, acc, WIDEN: tl.constexpr, PRECISION: tl.constexpr):
    """Return a b + acc. WIDEN: for Triton's interpreter, which multiplies bf16 as integers; the product is the same."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
@no_type_check
def _fade(fade, p):
    """Return Fade.shift of queries at p, the loss in base 2. A fade is rate, focus, span."""
    beyond = tl.log2(tl.maximum(p.to(tl.float32) / fade[2], 1.0))
    eased = 1.0 - tl.exp2(-fade[1] * tl.log2(1.0 + beyond / tl.log2(fade[2])))
    return eased, fade[0] * beyond


@triton.jit
@no_type_check
def _tile(
    q, k, v, n, k_s, v_s, low, high, least, most, largest, total, acc, bend, scale,
    EDGE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return one step of online softmax: keys n .. n + BLOCK_N. At an EDGE row r sees [low_r, high_r) of [least, most).

    `scale` is one number, or with ROWS one for every row.
    """
    WIDTH: tl.constexpr = q.shape[1]
    column = tl.arange(0, BLOCK_N)
    d = tl.arange(0, WIDTH)
    keys = k + n.to(tl.int64) * k_s + column[:, None] * k_s + d[None, :]
    values = v + n.to(tl.int64) * v_s + column[:, None] * v_s + d[None, :]
    if EDGE:
        there = (n + column >= least) & (n + column < most)
        key = tl.load(keys, mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    elif DIM < WIDTH:
        key = tl.load(keys, mask=(d < DIM)[None, :], other=0.0)
    else:
        key = tl.load(keys)
    score = _dot(q, tl.trans(key), tl.zeros([q.shape[0], BLOCK_N], tl.float32), WIDEN, PRECISION)
    if bend is not None:
        score *= bend
        fall = tl.exp2(-2.8853900817779268 * tl.abs(score))
        score = tl.where(score < 0, -1.0, 1.0) * (1.0 - fall) / (1.0 + fall)  # tanh
    if EDGE:
        seen = (n + column[None, :] >= low[:, None]) & (n + column[None, :] < high[:, None])
        score = tl.where(seen, score, float("-inf"))
    larger = tl.maximum(largest, tl.max(score, 1) * scale)
    if ROWS:  # noqa: SIM108 (the compiler decides)
        weight = tl.exp2(score * scale[:, None] - larger[:, None])
    else:
        weight = tl.exp2(score * scale - larger[:, None])
    kept = tl.exp2(largest - larger)
    total = total * kept + tl.sum(weight, 1)
    if EDGE:
        value = tl.load(values, mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    elif DIM < WIDTH:
        value = tl.load(values, mask=(d < DIM)[None, :], other=0.0)
    else:
        value = tl.load(values)
    acc = _dot(weight.to(value.dtype), value, acc * kept[:, None], WIDEN, PRECISION)
    return larger, total, acc


# Lengths must not compile a kernel each.
@triton.jit(
    do_not_specialize=["queries", "keys", "query_start", "key_start", "tiles", "bunch"],
    do_not_specialize_on_alignment=["sinks", "spans"],
)
@no_type_check
def _prefill_kernel(
    qs,
    ks,
    v,
    out,
    lse,
    sinks,
    spans,
    bands,
    fade,
    q_strides,
    k_strides,
    queries,
    keys,
    query_start,
    key_start,
    heads,
    tiles,
    bunch,
    bend,
    scale,
    v_b,
    v_h,
    v_s,
    out_b,
    out_h,
    out_t,
    REGIONS: tl.constexpr,
    FADES: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute BLOCK_M queries of one head per program.

    `spans` holds six numbers per sequence: where its queries begin, their number, the position of the first; the same
    of its keys. Without it everything is a token, and positions start at query_start and key_start.
    """
    # Heads go in bunches whose keys fit into the cache; in a bunch the tiles with the most keys come first.
    program = tl.program_id(0)
    first_head = program // (bunch * tiles) * bunch
    here = tl.minimum(bunch, heads - first_head)
    rest = program - first_head * tiles
    head = first_head + rest % here
    tile = tiles - 1 - rest // here
    b = tl.program_id(1).to(tl.int64)

    if spans is None:
        query_slot, query_count, query_first = 0, queries, query_start
        key_slot, key_count, key_first = 0, keys, key_start
    else:
        spans += b * SPAN
        query_slot, query_count, query_first = tl.load(spans), tl.load(spans + 1), tl.load(spans + 2)
        key_slot, key_count, key_first = tl.load(spans + 3), tl.load(spans + 4), tl.load(spans + 5)

    # Rows. Tiles begin at multiples of BLOCK_M in position, not in memory, so that few of them straddle two chunks.
    origin = query_first - query_slot
    first_row = tile * BLOCK_M - (origin % BLOCK_M + BLOCK_M) % BLOCK_M
    t = first_row + tl.arange(0, BLOCK_M)
    p = t + origin
    live = (t >= query_slot) & (t < query_slot + query_count)
    lowest = tl.maximum(first_row, query_slot) + origin
    highest = tl.minimum(first_row + BLOCK_M, query_slot + query_count) - 1 + origin
    start = key_first
    stop = tl.where(highest >= lowest, key_first + key_count, start)  # a tile of padding sees no keys

    group = (head // GROUP).to(tl.int64)
    head = head.to(tl.int64)
    skipped = (key_slot - key_first).to(tl.int64)
    v += b * v_b + group * v_h + skipped * v_s
    d = tl.arange(0, WIDTH)[None, :]
    begun = tl.full([BLOCK_M], LOWEST, tl.float32)
    begun_total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        begun = tl.maximum(begun, sink)
        begun_total = tl.exp2(sink - begun)
    largest, total = begun, begun_total
    if FADES:  # sinks come after what fades
        largest = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)

    for r in tl.static_range(REGIONS):
        low, high = _interval(bands[r], p, start, stop)
        least, shared_stop = _interval(bands[r], lowest, start, stop)
        shared_start, most = _interval(bands[r], highest, start, stop)
        whole = tl.maximum(shared_stop - shared_start, 0) // BLOCK_N
        shared_start = tl.where(whole > 0, shared_start, least)
        before = tl.cdiv(shared_start - least, BLOCK_N)
        after = tl.cdiv(tl.maximum(most - shared_start - whole * BLOCK_N, 0), BLOCK_N)

        q = qs[r] + b * q_strides[r][0] + head * q_strides[r][1]
        k = ks[r] + b * k_strides[r][0] + group * k_strides[r][1] + skipped * k_strides[r][2]
        rows = q + t.to(tl.int64)[:, None] * q_strides[r][2] + d
        query = tl.load(rows, mask=live[:, None] & (d < DIM), other=0.0)
        if FADES and r == 0:
            eased, loss = _fade(fade, p)
            sharp = scale / (1.0 - eased)
        else:
            sharp = scale
        for i in range(before + after):
            n = shared_start + (i - before + tl.where(i < before, 0, whole)) * BLOCK_N
            largest, total, acc = _tile(
                query, k, v, n, k_strides[r][2], v_s, low, high, least, most, largest, total, acc, bend, sharp,
                True, FADES and r == 0, DIM, BLOCK_N, WIDEN, PRECISION,
            )  # fmt: skip
        for i in range(whole):
            n = shared_start + i * BLOCK_N
            largest, total, acc = _tile(
                query, k, v, n, k_strides[r][2], v_s, low, high, least, most, largest, total, acc, bend, sharp,
                False, FADES and r == 0, DIM, BLOCK_N, WIDEN, PRECISION,
            )  # fmt: skip
        if FADES and r == 0:
            together = largest + tl.log2(tl.where(total == 0.0, 1.0, total))
            largest -= tl.where(total == 0.0, 0.0, eased * together + loss)
            if sinks is not None:
                larger = tl.maximum(largest, begun)
                kept = tl.exp2(largest - larger)
                total = total * kept + tl.exp2(sink - larger)
                acc *= kept[:, None]
                largest = larger

    if spans is not None:  # rows of padding
        largest, total = tl.where(live, largest, begun), tl.where(live, total, begun_total)
        acc = tl.where(live[:, None], acc, 0.0)
    divisor = tl.where(total == 0.0, 1.0, total)
    log = tl.where(total == 0.0, float("-inf"), (largest + tl.log2(divisor)) * 0.6931471805599453)
    exist = (t >= 0) & (t < queries)
    tl.store(lse + (b * heads + head) * queries + t, log, mask=exist)
    out += b * out_b + head * out_h
    result = (acc / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(out + t.to(tl.int64)[:, None] * out_t + d, result, mask=exist[:, None] & (d < DIM))


_prefill = Launcher(_prefill_kernel)
INTERPRETED = _prefill.interpreted
"""The kernel runs in Triton's interpreter, and so takes CPU tensors."""
CACHED = 2**25
"""Bytes of keys and values that a bunch of heads may have: they are read by every tile of queries, from the L2."""


def _cdiv(n: int, step: int) -> int:
    return -(-n // step)


@cache
def _machine(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 4, 2**17
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


def tile(rows: int, width: int, itemsize: int, device: torch.device) -> dict[str, int]:
    """Blocks and launch options for `rows` queries in all heads and sequences.

    128 queries a program, 64 where there would be fewer than two programs for each multiprocessor; as many warps as
    leave a thread at most 64 registers of sums. Stages as shared memory allows.
    """
    processors, shared = _machine(device)
    block_m = 128 if itemsize == 2 and width <= 128 and rows >= 256 * processors else 64
    block_n = 64 if itemsize == 2 else 32
    # Queries once more in float32, whose products are made of three.
    queries, stage = block_m * width * itemsize * (itemsize // 2), 2 * block_n * width * itemsize
    return {
        "block_m": block_m,
        "block_n": block_n,
        "num_warps": 8 if block_m * width > 8192 else 4,
        "num_stages": max(1, min(3, (shared - queries) // stage)),
    }


def bind(
    qs: tuple[Tensor, ...],
    ks: tuple[Tensor, ...],
    v: Tensor,
    out: Tensor,
    *,
    regions: tuple[Region, ...],
    spans: Tensor | None,
    starts: tuple[int, int],
    scale: float,
    softcap: float | None,
    **options: Any,
) -> Bound:
    """Return the launch for vectors like these, one q and k per region. It takes (qs, ks, v, out, lse, sinks).

    Of the regions only the first may fade. `starts` are the positions of the first query and key where there are no
    `spans`.
    """
    assert all(region.fade is None for region in regions[1:]), "what fades comes first"
    fade = regions[0].fade
    (b, h, t, d), (g, s) = qs[0].shape, v.shape[1:3]
    width = max(16, 1 << (d - 1).bit_length())
    options = tile(b * h * t, width, v.element_size(), v.device) | options
    block_m, block_n = options.pop("block_m"), options.pop("block_n")
    precision = options.pop("precision", "tf32x3")
    tiles = _cdiv(t + (block_m - 1 if spans is not None else starts[0] % block_m), block_m)
    copies = 1 + len({k.data_ptr() for k in ks})
    bunch = h // g * max(1, CACHED // (copies * s * d * v.element_size()))
    return _prefill.bind(
        v.device,
        (tiles * h, b, 1),
        (
            spans,
            tuple(map(band, regions)),
            (0.0, 0.0, 2.0) if fade is None else (fade.rate, fade.focus, fade.span),
            tuple(q.stride()[:3] for q in qs),
            tuple(k.stride()[:3] for k in ks),
            t,
            s,
            *starts,
            h,
            tiles,
            min(bunch, h),
            scale / softcap if softcap else None,
            (softcap or scale) * LOG2_E,
            *v.stride()[:3],
            *out.stride()[:3],
        ),
        {
            "REGIONS": len(regions),
            "FADES": fade is not None,
            "GROUP": h // g,
            "DIM": d,
            "WIDTH": width,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "WIDEN": INTERPRETED,
            "PRECISION": precision,
        },
        options,
    )
