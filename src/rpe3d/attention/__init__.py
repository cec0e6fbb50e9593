"""Attention that keeps a law: q, k, v and a law to the output and the log-sum-exp of every row.

    out, lse = attention(q, k, v, law)                      # q [b, h, t, d], k and v [b, g, s, d]
    out, lse = attention(q, k, v, law, turned=True)         # q and k turned by stock RoPE already

`reference` is the specification. `blocked` makes it of the machine's own attention calls. `decode` is a kernel for a
few queries against a long cache.
"""

from __future__ import annotations

from torch import Tensor

from rpe3d.attention import reference
from rpe3d.attention.contract import Inputs, Positions, check
from rpe3d.attention.dispatch import IMPLS, explain, run
from rpe3d.geometry import Law

__all__ = ["IMPLS", "Inputs", "attention", "explain", "reference"]


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
    model's own RoPE, as a Hugging Face cache holds them. impl: "auto", "reference", "blocked" or "decode" (forward
    only); `explain` says what "auto" would take, and why. backend: the library behind "blocked".
    """
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
    return run(x, impl, backend)
