"""Choose the implementation that runs a problem, and say why."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from rpe3d.attention import beside, blocked, chosen, decode, prefill, reference
from rpe3d.attention.problem import Prepared, Problem
from rpe3d.config import ConfigError, choice
from rpe3d.geometry import Law

IMPLS = ("auto", "reference", "blocked", "decode", "prefill", "chosen")
NARROW = 64
FLOPS_PER_CALL = {True: 3e11, False: 5e10}
"""What the prefill kernel may compute for every library call that it saves, in heads of at most NARROW dimensions and
in wider ones: each call takes 60 µs of the host's time and, at a new length, the making of a plan; but the library
computes faster. On an H200 the kernel is as fast as all calls together up to 64k tokens of 9 heads of dimension 64; at
dimension 128 it has 440 of cuDNN's 600 TFLOP/s (docs/log.md)."""


class Decision(NamedTuple):
    """The chosen implementation, the reason for it, and the problem prepared by it."""

    impl: str
    reason: str
    prepared: Prepared


def choose(problem: Problem, impl: str = "auto", backend: str | None = None) -> Decision:
    """Return the requested implementation, or the best one for a problem, with the problem prepared by it."""
    if choice("impl", impl, IMPLS) != "reference" and problem.law.both is not None:
        return _both(problem, impl, backend, *problem.law.both)
    if impl == "auto":
        return _best(problem, backend)
    if impl == "blocked":
        return Decision(impl, "asked for", blocked.prepare(problem, backend))
    made = {"reference": reference, "decode": decode, "prefill": prefill, "chosen": chosen}[impl]
    what = {"decode": "a decoding step", "prefill": "the prefill kernel", "chosen": "a choice of keys"}.get(impl, impl)
    if reason := made.refusal(problem):
        raise ConfigError(f"{what} cannot run this: {reason}", 'use impl="auto"')
    return Decision(impl, "asked for", made.prepare(problem))


def _both(x: Problem, impl: str, backend: str | None, law: Law, other: Law) -> Decision:
    """Return how a law runs that has another beside it: each by itself."""
    if impl != "auto":
        raise ConfigError(f"{impl} runs one law, and here another stands beside it", 'use impl="auto" or "reference"')
    first = _best(replace(x, law=law), backend)
    second = _best(replace(x, law=other, sinks=None), backend)
    reason = f"{first.reason}; beside it, by {second.impl}: {second.reason}"
    return Decision(first.impl, reason, beside.Beside(x, other, first.prepared, second.prepared))


def _best(x: Problem, backend: str | None) -> Decision:
    if x.q.shape[2] <= decode.MOST_QUERIES and x.q.shape[2] < x.k.shape[2]:
        if reason := decode.refusal(x):
            return Decision("reference", f"few queries, but no decoding step: {reason}", reference.prepare(x))
        step = decode.prepare(x)
        return Decision("decode", step.reason, step)
    if x.q.dtype == torch.float64 and x.q.is_cuda:
        return Decision("reference", "no library attention takes float64 on CUDA", reference.prepare(x))
    if x.law.chooses and backend is None and chosen.refusal(x) is None:
        return Decision("chosen", "queries choose their far keys: one tile of queries at a time", chosen.prepare(x))
    calls = blocked.Calls(x, backend)
    if not x.q.is_cuda or backend is not None:
        return Decision("blocked", calls.reason, calls)
    return prompt(x, calls)


def prompt(x: Problem, calls: blocked.Calls) -> Decision:
    """Return how a GPU runs a prompt: with library calls or with the prefill kernel."""
    library = calls.reason
    if reason := prefill.refusal(x):
        return Decision("blocked", f"{library} (the prefill kernel: {reason})", calls)
    number, flops = calls.work()
    d = x.q.shape[3]
    if number == 0:
        return Decision("prefill", "one kernel: no library call fits", prefill.prepare(x))
    if number == 1 or x.q.dtype == torch.float32 or flops * d > FLOPS_PER_CALL[d <= NARROW] * number:
        return Decision("blocked", library, calls)
    return Decision("prefill", f"one kernel instead of {number} library calls", prefill.prepare(x))


def explain(problem: Problem) -> tuple[str, str]:
    """Return the implementation that impl="auto" picks, and why."""
    chosen: Decision = choose(problem)
    return chosen.impl, chosen.reason
