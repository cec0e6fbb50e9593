"""Attention of a few queries against a long cache: the decoding step. Equals reference.attend, forward only.

The cache holds keys turned by stock RoPE. Where a law turns all keys of a chunk by one angle, the query is turned back
by it instead, once per chunk, and the cache is read once, as it is. `decode_kernel` does it on a GPU, in one launch;
`decode_plain` in plain PyTorch, wherever the kernel cannot. Each is imported on the first call, and Triton with the
kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rpe3d.attention.contract import Inputs
from rpe3d.geometry import Law, Phase, Region, Turn

Step = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""A problem without its vectors: from q, k, v and sinks to the output and the log-sum-exp."""

MOST_QUERIES = 16
LEAST_CHUNK = 16  # a tile ends where its chunk ends, and tensor cores want tiles of 16
_NEVER = 2**31 - 1  # no position and no chunk distance passes it (config.LONGEST)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HAS_TRITON = find_spec("triton") is not None


def supports(x: Inputs) -> str | None:
    """Why no decoding step can run this problem; None if one can."""
    if x.q.shape[2] > MOST_QUERIES:
        return f"{x.q.shape[2]} queries are more than {MOST_QUERIES}"
    if not x.turned:
        return "its keys must have been turned by stock RoPE"
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in (x.q, x.k, x.v, x.sinks)):
        return "it has no gradient"
    if kernel_lacks(x) is None:
        return None
    return "its key positions are not consecutive" if None in x.key_runs else None


def kernel_lacks(x: Inputs) -> str | None:
    """Why the kernel does not run a problem that is supported; None if it does."""
    if not _HAS_TRITON:
        return "Triton is not installed"
    return kernel_refusal(x) if x.q.is_cuda else f"it runs on a GPU, not on {x.q.device}"


def kernel_refusal(x: Inputs) -> str | None:
    """What about a problem is not made for the kernel, whatever the machine."""
    d, e = x.q.shape[3], x.v.shape[3]
    if x.q.dtype not in _DTYPES:
        return f"it computes in float32, not in {str(x.q.dtype).removeprefix('torch.')}"
    if d % 16 or d > 256 or e != d:
        return f"head dimensions are {d} and {e}, not one multiple of 16 up to 256"
    if any(y.stride(3) != 1 for y in (x.q, x.k, x.v)):
        return "q, k and v must be contiguous in their last dimension"
    if reason := plan(x.law).refusal:
        return reason
    if isinstance(x.keys, Tensor) and x.key_starts is None:
        return "its key positions are not consecutive"
    return None


def attend(x: Inputs) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b h t"]]:
    """The output and the log-sum-exp of every row, as the reference defines them, for a problem that is supported.

    The kernel waits for nothing and reads nothing from the device, so that a step can be captured in a CUDA graph: how
    much of a preallocated cache is in use, it finds out itself. Capture after one call, which makes the law's table.
    """
    return step(x)(x.q, x.k, x.v, x.sinks)


def step(x: Inputs) -> Step:
    """The problem without its vectors, for those of other layers."""
    if kernel_lacks(x) is None:
        from rpe3d.attention import decode_kernel

        return decode_kernel.Step(x, plan(x.law), table(x.law, x.q.device))
    from rpe3d.attention import decode_plain

    return decode_plain.Step(x)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A law as the kernel is compiled for it.

    The chunk that tiles keep to (None: no chunks); for each region its band, as (unit, first, last, keys, start), and
    whether it turns q at all; in how many ways they turn q and k; whether the first region fades, as none of the others
    does.
    """

    chunk: int | None = None
    bands: tuple[tuple[int, int, int, int, int], ...] = ()
    turning: tuple[bool, ...] = ()
    ways: int = 0
    fades: bool = False
    refusal: str | None = None


@lru_cache(maxsize=64)
def plan(law: Law) -> Plan:
    """How the kernel runs a law. The cache saves a decoding step the making of regions, and holds nothing else."""
    chunks, turning, regions = set(), [], _ordered(law)
    for region in regions:
        if region.unit > 1:
            chunks.add(region.unit)
        key_still = region.key.is_stock
        if not key_still:
            if not whole_chunks(region.key):
                return Plan(refusal="its far keys turn token by token")
            chunks.add(region.key.chunk)
        turning.append(not (key_still and region.query.is_stock))
    if len(chunks) > 1:
        return Plan(refusal=f"its regions have chunks of {sorted(chunks)} tokens")
    chunk = chunks.pop() if chunks else None
    if chunk is not None and chunk < LEAST_CHUNK:
        return Plan(refusal=f"its chunks of {chunk} tokens are shorter than {LEAST_CHUNK}")
    if any(region.fade is not None for region in regions[1:]):
        return Plan(refusal="more than one of its regions fades")
    ways = len({(region.query, region.key) for region in regions})
    fades = regions[0].fade is not None
    return Plan(chunk=chunk, bands=tuple(map(band, regions)), turning=tuple(turning), ways=ways, fades=fades)


def _ordered(law: Law) -> list[Region]:
    """The regions as the kernel walks them: one that fades first, since the others then need not know of it."""
    return sorted(law.regions, key=lambda region: region.fade is None)


def band(region: Region) -> tuple[int, int, int, int, int]:
    """Its chunk distances and keys, with numbers that nothing reaches in the place of none."""
    first = region.first or 0  # causality cuts below the diagonal anyway
    last = _NEVER if region.last is None else region.last
    keys = _NEVER + 1 if region.keys is None else region.keys
    return min(region.unit, _NEVER), first, last, keys, region.start


def whole_chunks(turn: Turn) -> bool:
    """x(p) - p is the same for all tokens of a chunk, and chunks are more than tokens."""
    return turn.chunk > 1 and turn.offset == 1 and turn.ceiling == math.inf


@lru_cache(maxsize=64)
def table(law: Law, device: torch.device) -> Float64[Tensor, " n"]:
    """All numbers of a law that the kernel reads, on the device: `region_row` of each region, then θ_l / 2π.

    A pure function of a frozen law. It is cached because a copy to the device has no place in a captured graph, and it
    is float64 because a kernel's own scalars are float32, whose steps at position 1,000,000 are 0.06.
    """
    rows = [number for region in _ordered(law) for number in region_row(region)]
    theta = law.frequencies() if any(plan(law).turning) else torch.zeros(0, dtype=torch.float64)
    return torch.cat([torch.tensor(rows, dtype=torch.float64), theta / (2 * math.pi)]).to(device)


def region_row(region: Region) -> list[float]:
    """A region's turns and fading in fifteen numbers; angles in whole turns, so that the kernel drops them by rounding.

    The query's turn, the key's as its shift x(p) - p = slope · j + start in chunk j, and rate, focus and span.
    """
    query, key = region.query, region.key
    chunkwise = not key.is_stock
    return [
        float(min(query.chunk, _NEVER)),
        query.offset,
        query.stride,
        query.start,
        query.ceiling,
        key.stride - key.chunk if chunkwise else 0.0,
        key.start if chunkwise else 0.0,
        *_phase(query.phase),
        *_phase(key.phase),
        (_constant(query.phase) - _constant(key.phase)) / (2 * math.pi),
        *((0.0, 0.0, 2.0) if region.fade is None else (region.fade.rate, region.fade.focus, region.fade.span)),
    ]


def _phase(phase: Phase | None) -> tuple[float, float]:
    """(s, e) with s · 2^(-e j) the part of a phase that depends on the chunk, in turns."""
    return (0.0, 0.0) if phase is None else (phase.sign / (2 * math.pi), math.log2(phase.base))


def _constant(phase: Phase | None) -> float:
    return 0.0 if phase is None else phase.constant
