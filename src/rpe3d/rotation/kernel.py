"""Rotation, fused: q and k in one launch of one Triton kernel. The specification is `rpe3d.rotation.reference`.

The work is bound by memory: every element is read once and written once, and the table is read once per group of
heads (from the cache, since the programs of one token tile follow each other). A program holds the cosines and
sines of BLOCK_T tokens in registers and walks over BLOCK_H heads; the next head is on its way while this one
turns. All tiles have two dimensions [tokens, pairs] and one layout: no exchange between threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from rpe3d.rotation.launch import Bound, Launcher


@triton.jit
@no_type_check
def _load(row, live, PAIRS: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the two members of every pair of one head, [BLOCK_T, WIDTH] each."""
    if INTERLEAVED:
        j = tl.arange(0, 2 * WIDTH)[None, :]
        pairs = tl.load(row + j, mask=live & (j < 2 * PAIRS), other=0.0)
        first, second = tl.split(tl.reshape(pairs, (pairs.shape[0], WIDTH, 2)))
    else:
        j = tl.arange(0, WIDTH)[None, :]
        first = tl.load(row + j, mask=live & (j < PAIRS), other=0.0)
        second = tl.load(row + PAIRS + j, mask=live & (j < PAIRS), other=0.0)
    return first, second


@triton.jit
@no_type_check
def _store(row, first, second, live, PAIRS: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Write what `_load` reads."""
    if INTERLEAVED:
        j = tl.arange(0, 2 * WIDTH)[None, :]
        pairs = tl.reshape(tl.join(first, second), (first.shape[0], 2 * WIDTH))
        tl.store(row + j, pairs, mask=live & (j < 2 * PAIRS))
    else:
        j = tl.arange(0, WIDTH)[None, :]
        tl.store(row + j, first, mask=live & (j < PAIRS))
        tl.store(row + PAIRS + j, second, mask=live & (j < PAIRS))


@triton.jit
@no_type_check
def _turn(
    x, y, x_h, y_h, head, heads, t, tokens, cos, sin,
    DIM: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Turn heads head .. head + BLOCK_H of the token rows x into y. Beyond the last head no token is live."""
    REST: tl.constexpr = DIM - 2 * PAIRS
    x += head * x_h
    y += head * y_h
    ahead_live = t < tl.where(head < heads, tokens, 0)
    ahead = _load(x, ahead_live, PAIRS, WIDTH, INTERLEAVED)
    for i in tl.static_range(BLOCK_H):
        live = ahead_live
        first, second = ahead
        if i + 1 < BLOCK_H:  # before the stores, which no later load overtakes
            ahead_live = t < tl.where(head + i + 1 < heads, tokens, 0)
            ahead = _load(x + x_h, ahead_live, PAIRS, WIDTH, INTERLEAVED)
        first, second = first.to(tl.float32), second.to(tl.float32)
        turned = (first * cos - second * sin).to(y.dtype.element_ty)
        partner = (second * cos + first * sin).to(y.dtype.element_ty)
        _store(y, turned, partner, live, PAIRS, WIDTH, INTERLEAVED)
        if REST > 0:
            j = tl.arange(0, triton.next_power_of_2(REST))[None, :]
            rest = tl.load(x + 2 * PAIRS + j, mask=live & (j < REST))
            tl.store(y + 2 * PAIRS + j, rest, mask=live & (j < REST))
        x += x_h
        y += y_h


@triton.jit
@no_type_check
def _rotate_kernel(
    q, k, q_out, k_out, cos, sin, k_cos, k_sin, tokens, q_heads, k_heads,
    q_b, q_h, q_t, k_b, k_h, k_t,  # strides of a batch row, a head, a token
    q_out_b, q_out_h, q_out_t, k_out_b, k_out_h, k_out_t, table_b, table_t,
    DIM: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK_T tokens of BLOCK_H heads per program. Equals reference.rotate; CONJUGATE is its backward."""
    program = tl.program_id(0)
    q_groups = tl.cdiv(q_heads, BLOCK_H)
    groups = q_groups + tl.cdiv(k_heads, BLOCK_H)
    tiles = tl.cdiv(tokens, BLOCK_T)
    group = program % groups
    tile = (program // groups) % tiles
    b = (program // groups // tiles).to(tl.int64)  # offsets pass 2^31 elements at a million tokens

    t = (tile.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    mask = (t < tokens) & (j < PAIRS)
    table = b * table_b + t * table_t + j
    of_q = group < q_groups
    c = tl.load(tl.where(of_q, cos, k_cos) + table, mask=mask, other=0.0)
    s = tl.load(tl.where(of_q, sin, k_sin) + table, mask=mask, other=0.0)
    if CONJUGATE:
        s = -s

    if of_q:
        x, y = q + b * q_b + t * q_t, q_out + b * q_out_b + t * q_out_t
        h = group.to(tl.int64) * BLOCK_H
        _turn(x, y, q_h, q_out_h, h, q_heads, t, tokens, c, s, DIM, PAIRS, WIDTH, INTERLEAVED, BLOCK_H)
    else:
        x, y = k + b * k_b + t * k_t, k_out + b * k_out_b + t * k_out_t
        h = (group - q_groups).to(tl.int64) * BLOCK_H
        _turn(x, y, k_h, k_out_h, h, k_heads, t, tokens, c, s, DIM, PAIRS, WIDTH, INTERLEAVED, BLOCK_H)


_rotate = Launcher(_rotate_kernel)
INTERPRETED = _rotate.interpreted
"""The kernel runs in Triton's interpreter, and so takes CPU tensors."""


def tile(pairs: int, rest: int, itemsize: int, *, num_warps: int = 4) -> tuple[int, int]:
    """Return (BLOCK_T, BLOCK_H) for heads of `pairs` pairs and `rest` dimensions that pass through.

    BLOCK_T: each thread holds one vector of 16 bytes of each half row, the widest access there is (and at most
    four of the rest). A half row of 128 bytes (bf16, head dim 128) is a whole cache line however tokens and heads
    are laid out, so that strides do not enter. BLOCK_H: with 4 heads the float32 table is a third of the bytes
    that a program reads (d = 128, bf16; mostly from the cache), and programs are short enough for an even end.
    """
    width = max(triton.next_power_of_2(pairs), triton.next_power_of_2(rest) // 4)
    return max(1, 16 * 32 * num_warps // (width * itemsize)), 4


def launch(
    xs: Sequence[Float[Tensor, "b _ t d"]],
    cos: Float32[Tensor, "... t l"],
    sin: Float32[Tensor, "... t l"],
    **options: Any,
) -> list[Tensor]:
    """Rotate one tensor or two (q and k) without a gradient, with the options of `bind`."""
    xs = [_unit_stride(x) for x in xs]
    outs = [_empty_like(x) for x in xs]
    cos, sin = _unit_stride(cos), _unit_stride(sin)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    if any(x.numel() for x in xs):
        bind(xs, outs, cos, **options)(xs[0], xs[-1], outs[0], outs[-1], cos, sin, cos, sin)
    return outs


def bind(
    xs: Sequence[Float[Tensor, "b _ t d"]],
    outs: Sequence[Float[Tensor, "b _ t d"]],
    table: Float32[Tensor, "... t l"],
    *,
    interleaved: bool = False,
    conjugate: bool = False,
    block_t: int | None = None,
    block_h: int | None = None,
    num_warps: int = 4,
) -> Bound:
    """Return the launch for one tensor or two (q and k) like these, not both empty.

    It takes (q, k, q_out, k_out, cos, sin, k_cos, k_sin), and where there is no k, what is q's again in its place.
    `table` is like each of the tables. Last dimensions are contiguous. `tile` chooses the blocks that are not given.
    """
    q, k, q_out, k_out = xs[0], xs[-1], outs[0], outs[-1]
    b, q_heads, tokens, dim = q.shape
    k_heads = k.shape[1] if len(xs) == 2 else 0
    pairs = table.shape[-1]
    chosen = tile(pairs, dim - 2 * pairs, q.element_size(), num_warps=num_warps)
    block_t, block_h = block_t or chosen[0], block_h or chosen[1]
    groups = -(-q_heads // block_h) - (-k_heads // block_h)
    return _rotate.bind(
        q.device,
        (b * -(-tokens // block_t) * groups, 1, 1),
        (
            tokens, q_heads, k_heads,
            *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
            table.stride(0) if table.dim() == 3 and table.shape[0] > 1 else 0, table.stride(-2),
        ),
        {
            "DIM": dim, "PAIRS": pairs, "WIDTH": 1 << (pairs - 1).bit_length(), "INTERLEAVED": interleaved,
            "CONJUGATE": conjugate, "BLOCK_T": block_t, "BLOCK_H": block_h,
        },
        {"num_warps": num_warps},
    )  # fmt: skip


class Turning:
    """`launch` of one tensor or two, each by its own table; settled once for all of the same shapes and strides."""

    def __init__(self, *tables: tuple[Tensor, Tensor], interleaved: bool) -> None:
        self.tables = tuple(x.contiguous() for table in (tables[0], tables[-1]) for x in table)
        self.interleaved = interleaved
        self.bound: Bound | None = None

    def __call__(self, *xs: Float[Tensor, "b _ t d"]) -> list[Tensor]:
        """Rotate as many tensors as there are tables. Their last dimensions are contiguous."""
        outs = [_empty_like(x) for x in xs]
        if self.bound is None:
            self.bound = bind(xs, outs, self.tables[0], interleaved=self.interleaved)
        self.bound(xs[0], xs[-1], outs[0], outs[-1], *self.tables)
        return outs


@torch.library.custom_op(
    "rpe3d::rotate",
    mutates_args=(),
    schema="(Tensor[] xs, Tensor cos, Tensor sin, bool interleaved, bool conjugate) -> Tensor[]",
)
def _operator(xs: list[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, conjugate: bool) -> list[Tensor]:
    """Run `launch` as one node of a compiled graph.

    A compiler that traces into the launch does not know the strides of gradients, and so copies them first.
    """
    return launch(xs, cos, sin, interleaved=interleaved, conjugate=conjugate)


@_operator.register_fake
def _shapes(xs: list[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, conjugate: bool) -> list[Tensor]:
    return [_empty_like(_unit_stride(x)) for x in xs]


class _Rotate(torch.autograd.Function):
    """The transpose of a rotation turns by the negative angle: so its backward, and every derivative after."""

    @staticmethod
    def forward(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, conjugate: bool) -> Any:
        xs = [q] if k is None else [q, k]
        if torch.compiler.is_compiling():
            outs = _operator(xs, cos, sin, interleaved, conjugate)
        else:
            outs = launch(xs, cos, sin, interleaved=interleaved, conjugate=conjugate)
        return outs[0], None if k is None else outs[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, _, cos, sin, ctx.interleaved, ctx.conjugate = inputs
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, q_grad: Tensor | None, k_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        angle = *ctx.saved_tensors, ctx.interleaved, not ctx.conjugate
        k_grad = k_grad if ctx.needs_input_grad[1] else None
        if q_grad is not None and ctx.needs_input_grad[0]:
            q_grad, k_grad = _Rotate.apply(q_grad, k_grad, *angle)
        else:  # k alone, in the place of q
            q_grad, k_grad = None, None if k_grad is None else _Rotate.apply(k_grad, None, *angle)[0]
        return q_grad, k_grad, None, None, None, None


def rotate(
    q: Float[Tensor, "b hq t d"],
    k: Float[Tensor, "b hk t d"] | None,
    cos: Float32[Tensor, "... t l"],
    sin: Float32[Tensor, "... t l"],
    *,
    interleaved: bool,
) -> tuple[Float[Tensor, "b hq t d"], Float[Tensor, "b hk t d"] | None]:
    """Rotate as `reference.rotate` does, fused, with its gradient."""
    wanted = torch.is_grad_enabled() and (q.requires_grad or (k is not None and k.requires_grad))
    if not wanted and not torch.compiler.is_compiling():  # autograd's bookkeeping takes longer than the launch
        outs = launch([q] if k is None else [q, k], cos, sin, interleaved=interleaved)
        return outs[0], None if k is None else outs[1]
    turned: tuple[Tensor, Tensor | None] = _Rotate.apply(q, k, cos, sin, interleaved, False)
    return turned


def _unit_stride(x: Tensor) -> Tensor:
    """Return `x`, copied only where its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_like(x: Tensor) -> Tensor:
    """Make an output in the memory order of `x`, or contiguous where that order would scatter the last dimension."""
    out = torch.empty_like(x)
    return out if out.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)
