"""Compute attention of a few queries against a long cache, the decoding step; forward only.

It is chosen for at most MOST_QUERIES queries and more keys, and equals `reference`.

The cache holds keys rotated by stock RoPE. If a law rotates all keys of a chunk by one angle, the query is rotated back
by it instead, once per chunk, and the cache is read once, as it is. `kernel` does this on a GPU, in one launch, over a
cache or its pages; `plain` does it in plain PyTorch wherever the kernel cannot. Triton is imported with the kernel.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rpe3d.attention.lowering import plan
from rpe3d.attention.problem import Problem

MOST_QUERIES = 16
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HAS_TRITON = find_spec("triton") is not None
_BEYOND = "a query stands after all keys"


@runtime_checkable
class Step(Protocol):
    """A prepared step, with the reason for how it runs."""

    reason: str

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]: ...


def refusal(problem: Problem) -> str | None:
    """Return why no decoding step can run a problem; None if one can."""
    if problem.q.shape[2] > MOST_QUERIES:
        return f"{problem.q.shape[2]} queries are more than {MOST_QUERIES}"
    if not problem.rotated:
        return "its keys must have been rotated by stock RoPE"
    if problem.needs_gradient:
        return "it has no gradient"
    if (machine_refusal(problem.q.device) or kernel_refusal(problem)) is None:
        return None
    return "its key positions are not consecutive" if None in problem.key_runs else None


def machine_refusal(device: torch.device) -> str | None:
    """Return why the kernel runs no problem on a device; None if it runs some."""
    if not _HAS_TRITON:
        return "Triton is not installed"
    return None if device.type == "cuda" else f"it runs on a GPU, not on {device}"


def kernel_refusal(problem: Problem) -> str | None:
    """Return why the kernel runs a problem on no machine; None if it does on some."""
    d, e = problem.q.shape[3], problem.v.shape[3]
    if problem.q.dtype not in _DTYPES:
        return f"it computes in float32, not in {str(problem.q.dtype).removeprefix('torch.')}"
    if d % 16 or d > 256 or e != d:
        return f"head dimensions are {d} and {e}, not one multiple of 16 up to 256"
    if any(y.stride(3) != 1 for y in (problem.q, problem.k, problem.v)):
        return "q, k and v must be contiguous in their last dimension"
    if reason := plan(problem.law).refusal:
        return reason
    if isinstance(problem.keys, Tensor) and problem.key_starts is None:
        return "its key positions are not consecutive"
    return None


def step_refusal(problem: Problem) -> str | None:
    """Return why the kernels of a choice do not run a step; None if they do."""
    from rpe3d.attention.chosen import vectors_refusal

    if reason := vectors_refusal(problem):
        return reason
    if any(y.stride(3) != 1 for y in (problem.q, problem.k, problem.v)):
        return "q, k and v must be contiguous in their last dimension"
    if isinstance(problem.keys, range):
        if problem.key_mask is not None or problem.keys.start:
            return "its keys do not begin at position 0"
        beyond = isinstance(problem.queries, range) and problem.queries.stop > problem.keys.stop
        return _BEYOND if beyond else None
    placed = problem.key_placed
    if placed is not None and placed.runs is None and isinstance(placed.starts, Tensor):
        return None  # in a graph, where nobody can look: who captures it must promise as much
    begins = [None if run is None else run[1].start for run in problem.key_runs]
    if not set(begins) <= {0}:
        return "its key positions are not consecutive from 0 on"
    pairs = zip(problem.query_runs, problem.key_runs, strict=True)
    return _BEYOND if any(q and k and len(q[1]) and q[1].stop > k[1].stop for q, k in pairs) else None


def prepare(problem: Problem) -> Step:
    """Return the step for a problem that is not refused, for the vectors of any layer of the same shape.

    The kernel waits for nothing and reads nothing back from the device, so that a step can be captured in a CUDA graph:
    it finds out itself how much of a preallocated cache is in use. Capture after one call, which makes the law's table.
    """
    if problem.law.chooses and problem.q.is_cuda and step_refusal(problem) is None:
        from rpe3d.attention.chosen import step

        return step.Step(problem)
    if reason := machine_refusal(problem.q.device) or kernel_refusal(problem):
        from rpe3d.attention.decode import plain

        return plain.Step(problem, f"few queries: plain PyTorch (the kernel: {reason})")
    from rpe3d.attention.decode import kernel

    return kernel.Step(problem)
