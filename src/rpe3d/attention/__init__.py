"""Attention under a law: from q, k, v and a law to the output and the log-sum-exp of every row.

    out, lse = attention(q, k, v, law)                      # q [b, h, t, d], k and v [b, g, s, d]
    out, lse = attention(q, k, v, law, rotated=True)        # q and k already rotated by stock RoPE

A `Problem` holds the validated inputs, and `choose` finds the implementation that runs it. Each implementation is a
module with two functions, `refusal(problem)` and `prepare(problem)`; the latter returns a function that takes the
vectors of any layer of the same shape. `reference` is the specification. `blocked` combines library attention calls.
`prefill` is one kernel for a prompt on a GPU, where many calls would keep the host busy. `decode` is for a few queries
against a long cache: a kernel on a GPU, plain PyTorch elsewhere. `chosen` is for laws whose queries choose far keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rpe3d.attention import operator, reference
from rpe3d.attention.choose import IMPLS, Decision, choose, explain
from rpe3d.attention.chosen.memory import Memory, remembers
from rpe3d.attention.problem import Positions, Prepared, Problem, check, sharpened
from rpe3d.geometry import Law

__all__ = ["IMPLS", "Memory", "Problem", "Shared", "attention", "explain", "reference"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    law: Law,
    *,
    query_positions: Positions = None,
    key_positions: Positions = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rotated: bool = False,
    impl: str = "auto",
    backend: str | None = None,
    memory: Memory | None = None,
) -> tuple[Tensor, Tensor]:
    """Return causal attention under a law: the output [b, h, t, e] and the log-sum-exp [b, h, t] of every row.

    Positions are ranges, or increasing integers [t] or [b, t]; by default the keys are at 0 .. s - 1 and the queries
    are the last of them. A mask is False at padding, on either side. `scale` defaults to 1 / sqrt(d); `softcap` limits
    scores with tanh; `sinks` is one logit per head that joins the denominator. With `rotated`, q and k are already
    rotated by the model's own RoPE, as in a Hugging Face cache. `impl` is "auto", "reference", "blocked", "chosen"
    (gradients on a GPU only) or, forward only, "prefill" or "decode"; `explain` tells which one "auto" picks, and why.
    `backend` names the library behind "blocked". `memory`, for queries that choose their far keys, belongs to the cache
    of these keys and keeps what one decoding step learned about a block for the next.
    """
    given: dict[str, Any] = {
        "query_positions": query_positions,
        "key_positions": key_positions,
        "query_mask": query_mask,
        "key_mask": key_mask,
        "scale": scale,
        "softcap": softcap,
        "rotated": rotated,
    }
    if torch.compiler.is_compiling() and not (torch.is_grad_enabled() and _any_requires_grad(q, k, v, sinks)):
        return operator.call(q, k, v, sinks, law, impl, backend, **given)
    problem = check(q, k, v, law, sinks=sinks, **given)
    out, lse = run(replace(problem, q=sharpened(q, law, query_positions, k.shape[2])), impl, backend, memory)
    return out, lse


def run(
    problem: Problem, impl: str = "auto", backend: str | None = None, memory: Memory | None = None
) -> tuple[Tensor, Tensor]:
    """Return the solution of a problem, computed by the requested implementation."""
    if torch.compiler.is_compiling():  # a decorator would import torch's compiler, a second, in every process
        out, lse = torch.compiler.disable(_run)(problem, impl, backend, memory)
        return out, lse
    return _run(problem, impl, backend, memory)


def _run(problem: Problem, impl: str, backend: str | None, memory: Memory | None) -> tuple[Tensor, Tensor]:
    chosen: Decision = choose(problem, impl, backend)
    return solve(chosen.prepared, problem.q, problem.k, problem.v, problem.sinks, memory)


def solve(
    prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, memory: Memory | None
) -> tuple[Tensor, Tensor]:
    """Return the output of a prepared problem, with the cache's memory if it can use one."""
    if memory is not None and remembers(prepared):
        return prepared(q, k, v, sinks, memory)
    return prepared(q, k, v, sinks)


class Shared:
    """Run `attention` for all layers of a forward pass, preparing what layers of the same shape share only once.

    An instance holds schedules, bound kernels and cos/sin tables, so drop it after the forward pass. It is not for code
    that torch.compile traces; use `attention` there. Positions and masks may be passed once for all calls.
    """

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.made: dict[Any, tuple[Law, Prepared]] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        law: Law,
        *,
        sinks: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        memory: Memory | None = None,
        **given: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return `attention` of these vectors; positions and masks must be those of the first call."""
        q = self._sharpened(q, k, law, given)
        return solve(self._prepared(q, k, v, law, sinks, scale, softcap, given), q, k, v, sinks, memory)

    def output(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        law: Law,
        *,
        sinks: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        memory: Memory | None = None,
        **given: Any,
    ) -> Tensor:
        """Return only the output, for layers that run one after the other outside a CUDA graph.

        A decoding step then allocates nothing else.
        """
        q = self._sharpened(q, k, law, given)
        prepared = self._prepared(q, k, v, law, sinks, scale, softcap, given)
        output = getattr(prepared, "output", None)
        if output is None:
            return solve(prepared, q, k, v, sinks, memory)[0]
        found: Tensor = output(q, k, v, sinks, memory) if remembers(prepared) else output(q, k, v, sinks)
        return found

    def _sharpened(self, q: Tensor, k: Tensor, law: Law, given: dict[str, Any]) -> Tensor:
        return sharpened(q, law, (self.given | given).get("query_positions"), k.shape[2])

    def _prepared(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        law: Law,
        sinks: Tensor | None,
        scale: float | None,
        softcap: float | None,
        given: dict[str, Any],
    ) -> Prepared:
        learns = torch.is_grad_enabled() and _any_requires_grad(q, k, v, sinks)
        vectors = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, q.device)
        kind = (id(law), *vectors, scale, softcap, sinks is None, learns)
        found = self.made.get(kind)
        if found is None:  # with the law, which the key names by its address
            problem = check(q, k, v, law, sinks=sinks, scale=scale, softcap=softcap, **self.given, **given)
            found = self.made[kind] = law, choose(problem).prepared
        return found[1]


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)
