# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
"""`merge` in one pass over memory: every part is read once, the result written once. Equals merge._plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from rpe3d.attention.merge import Part
from rpe3d.config import ConfigError
from rpe3d.rotation.kernel import _load, _store
from rpe3d.rotation.launch import Launcher


@triton.jit
@no_type_check
def _row(first, tokens, place, ALIGNED: tl.constexpr, BLOCK_T: tl.constexpr):
    """Say where a part has rows first .. first + BLOCK_T of the result: repetition, row, and whether it has them.

    A place is start, rows, step, repetitions, and 1 where rows stand backwards. ALIGNED: all of them fall on tiles,
    which divide once.
    """
    i = tl.arange(0, BLOCK_T)
    if ALIGNED:
        n = (first - place[0]) // place[2] + tl.zeros([BLOCK_T], tl.int32)
    else:
        n = (first + i - place[0]) // place[2]
    row = first + i - place[0] - n * place[2]
    held = (first + i >= place[0]) & (n < place[3]) & (row < place[1]) & (first + i < tokens)
    row += place[4] * (place[1] - 1 - 2 * row)
    return n.to(tl.int64), row.to(tl.int64), held


@triton.jit
@no_type_check
def _log(lse, strides, first, tokens, b, h, place, ALIGNED: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return a part's log-sum-exp of rows first .. first + BLOCK_T; -inf in those that it does not hold."""
    n, row, held = _row(first, tokens, place, ALIGNED, BLOCK_T)
    at = (n + b) * strides[0] + h * strides[1] + row * strides[2]
    return tl.load(lse + at, mask=held, other=float("-inf")).to(tl.float32)


# Lengths must not compile a kernel each. (Triton heeds this for plain arguments, not inside tuples.)
@triton.jit(do_not_specialize=["tokens", "lse_b", "lse_h", "lse_t", "fade_row"])
@no_type_check
def _merge_kernel(
    parts,
    lses,
    part_strides,
    lse_strides,
    places,
    out,
    lse,
    sinks,
    fade,
    heads,
    tokens,
    out_b,
    out_h,
    out_t,
    lse_b,
    lse_h,
    lse_t,
    fade_row,
    SINKS: tl.constexpr,
    FADED: tl.constexpr,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Return BLOCK_T rows of one head per program. Loads do not wait for each other; all of them precede the stores."""
    program = tl.program_id(0)
    tiles = tl.cdiv(tokens, BLOCK_T)
    h = ((program // tiles) % heads).to(tl.int64)  # offsets pass 2^31 elements at a million tokens
    b = (program // tiles // heads).to(tl.int64)
    first = (program % tiles) * BLOCK_T
    t = first + tl.arange(0, BLOCK_T)
    live = t < tokens
    j = tl.arange(0, WIDTH)[None, :]

    largest = tl.full([BLOCK_T], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    result = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    if FADED:  # what faded parts lose depends on all of them together
        for i in tl.static_range(PARTS):
            if (FADED >> i) & 1:
                log = _log(lses[i], lse_strides[i], first, tokens, b, h, places[i], ALIGNED, BLOCK_T)
                larger = tl.maximum(largest, log)
                safe = tl.where(larger == float("-inf"), 0.0, larger)
                total = total * tl.exp(largest - safe) + tl.exp(log - safe)
                largest = larger
        together = tl.where(total == 0.0, 0.0, largest + tl.log(tl.where(total == 0.0, 1.0, total)))
        less = tl.load(fade + t, mask=live, other=0.0) * together + tl.load(fade + fade_row + t, mask=live, other=0.0)
        largest = tl.full([BLOCK_T], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_T], tl.float32)
    for i in tl.static_range(PARTS):
        log = _log(lses[i], lse_strides[i], first, tokens, b, h, places[i], ALIGNED, BLOCK_T)
        if (FADED >> i) & 1:
            log -= less
        n, row, held = _row(first, tokens, places[i], ALIGNED, BLOCK_T)
        n += b
        at = n * part_strides[i][0] + h * part_strides[i][1] + row * part_strides[i][2]
        o = tl.load(parts[i] + at[:, None] + j, mask=held[:, None] & (j < DIM), other=0.0).to(tl.float32)
        o = tl.where(log[:, None] == float("-inf"), 0.0, o)
        larger = tl.maximum(largest, log)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        kept = tl.exp(largest - safe)
        weight = tl.exp(log - safe)
        result = result * kept[:, None] + o * weight[:, None]
        total = total * kept + weight
        largest = larger
    if SINKS:
        log = tl.load(sinks + h).to(tl.float32)
        larger = tl.maximum(largest, log)
        safe = tl.where(larger == float("-inf"), 0.0, larger)
        kept = tl.exp(largest - safe)
        result = result * kept[:, None]
        total = total * kept + tl.exp(log - safe)
        largest = larger
    divisor = tl.where(total == 0.0, 1.0, total)
    result = result / divisor[:, None]
    merged = tl.where(total == 0.0, float("-inf"), largest + tl.log(divisor))

    tl.debug_barrier()  # in place, a thread may not write a log-sum-exp that another has yet to read
    rows = b * out_b + h * out_h + t.to(tl.int64) * out_t
    tl.store(out + rows[:, None] + j, result.to(out.dtype.element_ty), mask=live[:, None] & (j < DIM))
    tl.store(lse + b * lse_b + h * lse_h + t * lse_t, merged, mask=live)


@triton.jit
@no_type_check
def _add_kernel(
    parts,
    part_strides,
    places,
    out,
    cos,
    sin,
    heads,
    tokens,
    out_b,
    out_h,
    out_t,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Return BLOCK_T rows of one head per program, of which the next reads the same table. Equals merge.add_up.

    The first TURNED parts are turned back together. All tiles are those of the rotation: one member of every pair.
    """
    program = tl.program_id(0)
    tiles = tl.cdiv(tokens, BLOCK_T)
    h = (program % heads).to(tl.int64)  # offsets pass 2^31 elements at a million tokens
    b = (program // heads // tiles).to(tl.int64)
    first = ((program // heads) % tiles) * BLOCK_T
    t = (first + tl.arange(0, BLOCK_T))[:, None]
    PAIRS: tl.constexpr = DIM // 2
    HALF: tl.constexpr = WIDTH // 2
    x = tl.zeros([BLOCK_T, HALF], tl.float32)
    y = tl.zeros([BLOCK_T, HALF], tl.float32)
    for i in tl.static_range(PARTS):
        n, row, held = _row(first, tokens, places[i], ALIGNED, BLOCK_T)
        at = (n + b) * part_strides[i][0] + h * part_strides[i][1] + row * part_strides[i][2]
        more_x, more_y = _load(parts[i] + at[:, None], held[:, None], PAIRS, HALF, INTERLEAVED)
        x += more_x.to(tl.float32)
        y += more_y.to(tl.float32)
        if i + 1 == TURNED:
            j = tl.arange(0, HALF)[None, :]
            mask = (t < tokens) & (j < PAIRS)
            c = tl.load(cos + t * PAIRS + j, mask=mask, other=0.0)
            s = tl.load(sin + t * PAIRS + j, mask=mask, other=0.0)
            x, y = x * c + y * s, y * c - x * s
    x, y = x.to(out.dtype.element_ty), y.to(out.dtype.element_ty)
    _store(out + b * out_b + h * out_h + t.to(tl.int64) * out_t, x, y, t < tokens, PAIRS, HALF, INTERLEAVED)


_merge, _add = Launcher(_merge_kernel), Launcher(_add_kernel)
_WARPS = 4
_OPTIONS = {"num_warps": _WARPS}
INTERPRETED = _merge.interpreted
"""The kernel runs in Triton's interpreter, and so takes CPU tensors."""


def merge(parts: Sequence[Part], out: Tensor, lse: Tensor, sinks: Tensor | None, fade: Tensor | None) -> None:
    """Launch the merge for validated arguments."""
    if not out.is_cuda and not INTERPRETED:
        raise ConfigError(f'impl is "triton" but out is on {out.device}', 'move it to a GPU, or pass impl="auto"')
    places = [_place(part, out.shape[2]) for part in parts]
    grid, constants = _launch(out, places)
    _merge(
        out.device,
        grid,
        (
            tuple(part.out for part in parts),
            tuple(part.lse for part in parts),
            tuple(part.out.stride()[:3] for part in parts),
            tuple(part.lse.stride() for part in parts),
            tuple(places),
            out,
            lse,
            out if sinks is None else sinks,
            lse if fade is None else fade,
            *out.shape[1:3],
            *out.stride()[:3],
            *lse.stride(),
            0 if fade is None else fade.stride(0),
        ),
        {"SINKS": sinks is not None, "FADED": sum(part.faded << i for i, part in enumerate(parts)), **constants},
        _OPTIONS,
    )


def add_up(
    parts: Sequence[Part],
    out: Tensor,
    turned: Sequence[Part] = (),
    table: tuple[Tensor, Tensor] | None = None,
    *,
    interleaved: bool = False,
) -> None:
    """Launch the sum of parts for validated arguments."""
    every = [*turned, *parts]
    places = [_place(part, out.shape[2]) for part in every]
    grid, constants = _launch(out, places)
    cos, sin = (out, out) if table is None else (x.contiguous() for x in table)
    _add(
        out.device,
        grid,
        (
            tuple(part.out for part in every),
            tuple(part.out.stride()[:3] for part in every),
            tuple(places),
            out,
            cos,
            sin,
            *out.shape[1:3],
            *out.stride()[:3],
        ),
        {"TURNED": len(turned), "INTERLEAVED": interleaved, **constants},
        _OPTIONS,
    )


Place = tuple[int, int, int, int, int]


def _launch(out: Tensor, places: list[Place]) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid and blocks: a thread holds two vectors of 16 bytes of each part."""
    b, heads, tokens, dim = out.shape
    width = 1 << (dim - 1).bit_length()
    block_t = max(1, min(2 * 16 * 32 * _WARPS // (width * out.element_size()), 1 << (tokens - 1).bit_length()))
    aligned = all(place[0] % block_t == place[1] % block_t == place[2] % block_t == 0 for place in places)
    constants = {"PARTS": len(places), "DIM": dim, "WIDTH": width, "ALIGNED": aligned, "BLOCK_T": block_t}
    return (b * heads * -(-tokens // block_t), 1, 1), constants


def _place(part: Part, tokens: int) -> Place:
    rows = part.out.shape[2]
    step, times = (part.step, part.out.shape[0]) if part.step else (tokens, 1)
    return part.start, rows, step, times, int(part.flipped)
