"""Attention that keeps a law: q, k, v and a law to the output and the log-sum-exp of every row.

    out, lse = attention(q, k, v, law)                      # q [b, h, t, d], k and v [b, g, s, d]
    out, lse = attention(q, k, v, law, turned=True)         # q and k turned by stock RoPE already

`reference` is the specification. `blocked` makes it of the machine's own attention calls. `prefill` is one kernel for a
prompt on a GPU, where that many calls would keep the host busy. `decode` is for a few queries against a long cache: a
kernel on a GPU, plain PyTorch elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rpe3d.attention import compiled, reference
from rpe3d.attention.contract import Inputs, Placed, Positions, check
from rpe3d.attention.decode import Step
from rpe3d.attention.dispatch import IMPLS, explain, run, step
from rpe3d.geometry import Law

__all__ = ["IMPLS", "Inputs", "attention", "explain", "reference", "shared_step"]


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
    turned: bool = False,
    impl: str = "auto",
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention under a law: the output [b, h, t, e] and the log-sum-exp [b, h, t] of every row.

    Positions are ranges or integers [t] or [b, t], rising; without them the keys are 0 .. s - 1 and the queries the
    last of them. A mask is False at padding, on either side. `scale` defaults to 1 / sqrt(d); `softcap` bends scores
    by tanh; `sinks` is one logit per head that joins the denominator. With `turned` q and k have been turned by the
    model's own RoPE, as a Hugging Face cache holds them. impl: "auto", "reference", "blocked", or forward only
    "prefill" and "decode"; `explain` says what "auto" would take, and why. backend: the library behind "blocked".
    """
    if torch.compiler.is_compiling() and not (torch.is_grad_enabled() and _any_requires_grad(q, k, v, sinks)):
        return _compiled(
            q,
            k,
            v,
            sinks,
            query_positions,
            key_positions,
            query_mask,
            key_mask,
            law,
            scale,
            softcap,
            turned,
            impl,
            backend,
        )
    x = check(
        q,
        k,
        v,
        law,
        query_positions=query_positions,
        key_positions=key_positions,
        query_mask=query_mask,
        key_mask=key_mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        turned=turned,
    )
    out, lse = run(x, impl, backend)
    return out, lse


def shared_step(q: Tensor, k: Tensor, v: Tensor, law: Law, **given: Any) -> Step | None:
    """`attention` as a function of q, k, v and sinks, for all layers of a forward whose vectors look like these.

    Everything but the vectors is checked and chosen once. None where "auto" takes no kernel of ours. No gradient flows.
    """
    return step(check(q, k, v, law, **given))


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    query_positions: Positions,
    key_positions: Positions,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    law: Law,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """Inside torch.compile: one operator. Its positions are tensors."""
    tensors: list[Tensor | None] = []
    for p in (query_positions, key_positions):
        if isinstance(p, range):
            p = torch.arange(p.start, p.stop, device=q.device)
        tensors.append(p.positions if isinstance(p, Placed) else p)
    starts = key_positions.starts if isinstance(key_positions, Placed) else None
    tensors.append(starts if isinstance(starts, Tensor) else None)
    result: tuple[Tensor, Tensor] = compiled.attention(q, k, v, sinks, *tensors, query_mask, key_mask, law.json, *rest)
    return result
