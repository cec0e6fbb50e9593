"""Lay out vectors in memory: library calls need them dense, and a copy should run at the memory's speed."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

WIDE = 8
"""Bytes per copied element: PyTorch moves strided elements of two bytes at half the memory's speed."""


def by_token(x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
    """Return x with the heads of a token together, so that consecutive tokens of a sequence are dense."""
    return _dense(x.transpose(1, 2)).transpose(1, 2)


def flipped(x: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
    """Return x with its tokens reversed."""
    return _wide(x).flip(2).view(x.dtype)


def room(x: Tensor) -> Tensor:
    """Return an empty tensor in the layout of x, or contiguous if that layout would scatter the last dimension."""
    made = torch.empty_like(x)
    return made if made.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def laid_out(x: Float[Tensor, "b h t e"], q: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t e"]:
    """Return x, dense, with its dimensions in the order of q's: as the forward would have returned an output for q.

    PyTorch caches the plans of cuDNN's backward by the shapes and strides of q, k and v alone, and expects the rest to
    match. With an output in another layout it takes the plan of an earlier call, and the gradients are garbage.
    """
    order = sorted(range(4), key=q.stride, reverse=True)
    inverse = sorted(range(4), key=order.__getitem__)
    dense = x.permute(order)
    return x if dense.is_contiguous() else _dense(dense).permute(inverse)


def _dense(x: Tensor) -> Tensor:
    """Return x, copied if it is not contiguous."""
    return x if x.is_contiguous() else _wide(x).contiguous().view(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """Return x in elements of WIDE bytes, or x itself if its rows are not made of whole ones."""
    n = WIDE // x.element_size()
    whole = x.stride(-1) == 1 and not any(y % n for y in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    return x.view(torch.int64) if whole else x
