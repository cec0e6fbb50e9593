"""The machine's library attention calls: plain, full or causal, with log-sum-exp, and their backward.

Each backend's backward takes the output and log-sum-exp as arguments. Given those of the *whole* row instead of the
block's own, flash attention's backward is exact for a block of keys: p = exp(s - lse) is then the weight in the whole
softmax, and rowsum(dO · O) the whole row's correction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from rpe3d.attention.blocked.layout import laid_out
from rpe3d.config import choice

Forward = tuple[Float[Tensor, "b h t e"], Float[Tensor, "b h t"]]
Gradients = tuple[Float[Tensor, "b h t d"], Float[Tensor, "b g s d"], Float[Tensor, "b g s e"]]
aten = torch.ops.aten
ROUND, MOST_ROUNDED = 512, 4096
"""Short ends of texts are padded with rows: cuDNN prepares a plan for every new shape, in a tenth of a second."""


class Ends(NamedTuple):
    """Boundaries of several sequences in a row, of queries and of keys."""

    rows: Int32[Tensor, " ends"]
    columns: Int32[Tensor, " ends"]
    longest_row: int
    longest_column: int


@dataclass(frozen=True)
class Backend:
    """One library's attention: `forward(q, k, v, causal, scale)` and `backward(do, q, k, v, o, lse, causal, scale)`.

    The ragged versions take `Ends` as their last argument, for sequences in a row (b = 1).
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], Forward]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], Gradients]
    ragged_forward: Callable[[Tensor, Tensor, Tensor, bool, float, Ends], Forward] | None = None
    ragged_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float, Ends], Gradients] | None = (
        None
    )


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _cpu_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    k, v, group = _grouped(q, k, v)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, 0.0, causal, scale=scale
    )
    return dq, _summed(dk, group), _summed(dv, group)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
    rows = q.shape[2]
    if rows % ROUND and rows < MOST_ROUNDED and (not causal or k.shape[2] == rows):
        pad = (0, 0, 0, -rows % ROUND)
        q = torch.nn.functional.pad(q, pad)
        if causal:  # keys after the last row are not seen by it
            k, v = torch.nn.functional.pad(k, pad), torch.nn.functional.pad(v, pad)
        out, lse = _cudnn_forward(q, k, v, causal, scale)
        return out[:, :, :rows], lse[:, :, :rows]
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse[..., 0]


def _cudnn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    if q.shape[2] == k.shape[2] == 1:  # "s_q = s_kv = 1 is not supported"
        return _flash_backward(do, q, k, v, o, lse, causal, scale)
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state, read with dropout only
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        laid_out(do, q),
        q,
        k,
        v,
        laid_out(o, q),
        lse.contiguous()[..., None],
        unused,
        unused,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )
    return dq, dk, dv


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
    if causal and (square := k.shape[2]) < q.shape[2]:  # flash aligns its triangle with the last row, not the first
        upper = _flash_forward(q[:, :, :square], k, v, True, scale)
        lower = _flash_forward(q[:, :, square:], k, v, False, scale)
        return torch.cat([upper[0], lower[0]], 2), torch.cat([upper[1], lower[1]], 2)
    k, v, _ = _grouped(q, k, v)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    if causal and (square := k.shape[2]) < q.shape[2]:
        parts = [
            _flash_backward(do[:, :, rows], q[:, :, rows], k, v, o[:, :, rows], lse[:, :, rows], whole, scale)
            for rows, whole in ((slice(square), True), (slice(square, None), False))
        ]
        return torch.cat([parts[0][0], parts[1][0]], 2), parts[0][1] + parts[1][1], parts[0][2] + parts[1][2]
    k, v, group = _grouped(q, k, v)
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused, scale=scale
    )
    return dq, _summed(dk, group), _summed(dv, group)


def _ragged_flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, ends: Ends) -> Forward:
    k, v, _ = _grouped(q, k, v)
    flat = (x[0].transpose(0, 1) for x in (q, k, v))
    out, lse, *_ = aten._flash_attention_forward(*flat, *ends, 0.0, causal, False, scale=scale)
    return out.transpose(0, 1)[None], lse[None]


def _ragged_flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, ends: Ends
) -> Gradients:
    k, v, group = _grouped(q, k, v)
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    flat = (x[0].transpose(0, 1) for x in (do, q, k, v, o))
    found = aten._flash_attention_backward(*flat, lse[0].contiguous(), *ends, 0.0, causal, unused, unused, scale=scale)
    dq, dk, dv = (x.transpose(0, 1)[None] for x in found)
    return dq, _summed(dk, group), _summed(dv, group)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
    k, v, _ = _grouped(q, k, v)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]  # padded to whole tiles


def _efficient_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    if o.stride(2) != o.shape[1] * o.shape[3]:  # its kernel takes for granted that all heads of a token lie together
        o = o.transpose(1, 2).contiguous().transpose(1, 2)
    k, v, group = _grouped(q, k, v)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.inf).contiguous()
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    wanted = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        do, q, k, v, None, o, padded, unused, unused, 0.0, wanted, causal, scale=scale
    )
    return dq, _summed(dk, group), _summed(dv, group)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """Repeat keys and values to the query heads, for libraries without grouped heads."""
    group = q.shape[1] // k.shape[1]
    return (k, v, 1) if group == 1 else (k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), group)


def _summed(gradient: Tensor, group: int) -> Tensor:
    return gradient if group == 1 else gradient.unflatten(1, (-1, group)).sum(2)


BACKENDS = {
    "cpu": Backend("cpu", _cpu_forward, _cpu_backward),
    "cudnn": Backend("cudnn", _cudnn_forward, _cudnn_backward),
    "flash": Backend("flash", _flash_forward, _flash_backward, _ragged_flash_forward, _ragged_flash_backward),
    "efficient": Backend("efficient", _efficient_forward, _efficient_backward),
}


def backend_for(q: Tensor, v: Tensor, name: str | None = None) -> Backend:
    """Return the named backend, or the fastest that takes these tensors (H200: cuDNN is 1.7 times as fast as flash)."""
    if name is not None:
        return BACKENDS[choice("backend", name, BACKENDS)]
    if q.device.type != "cuda":
        return BACKENDS["cpu"]
    half = q.dtype in (torch.float16, torch.bfloat16)
    widest = max(q.shape[-1], v.shape[-1])
    if half and widest <= 128 and q.shape[-1] % 8 == 0 and torch.backends.cudnn.is_available():
        return BACKENDS["cudnn"]
    if half and widest <= 256 and q.shape[-1] % 8 == 0 and q.shape[-1] == v.shape[-1]:
        return BACKENDS["flash"]
    return BACKENDS["efficient"]


def without_plans(name: str) -> str:
    """Return the backend for calls whose shapes keep changing: cuDNN would prepare a plan for each."""
    return "flash" if name == "cudnn" else name
