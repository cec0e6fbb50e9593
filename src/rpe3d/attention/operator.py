"""Wrap attention as one opaque operator of plain values, so that torch.compile(fullgraph=True) keeps one graph.

It is forward only. If gradients are needed, the graph breaks and the eager implementations run as they are.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rpe3d.attention.choose import choose
from rpe3d.attention.problem import Placed, Positions, check, sharpened
from rpe3d.geometry import Law, make_law


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    law: Law,
    impl: str,
    backend: str | None,
    *,
    query_positions: Positions,
    key_positions: Positions,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """Return `attention` inside torch.compile: its positions become tensors, the law its JSON."""
    tensors: list[Tensor | None] = []
    for p in (query_positions, key_positions):
        if isinstance(p, range):
            p = torch.arange(p.start, p.stop, device=q.device)
        tensors.append(p.positions if isinstance(p, Placed) else p)
    starts = key_positions.starts if isinstance(key_positions, Placed) else None
    tensors.append(starts if isinstance(starts, Tensor) else None)
    result: tuple[Tensor, Tensor] = attention(q, k, v, sinks, *tensors, law.json, impl, backend, **rest)
    return result


@torch.library.custom_op("rpe3d::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    key_starts: Tensor | None,
    law: str,
    impl: str,
    backend: str | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    rotated: bool,
) -> tuple[Tensor, Tensor]:
    """Return `rpe3d.attention.attention`, with the law as its JSON, and `Placed.starts` of the keys if known."""
    keys = key_positions if key_positions is None or key_starts is None else Placed(key_positions, starts=key_starts)
    problem = check(
        q,
        k,
        v,
        _law(law),
        query_positions=query_positions,
        key_positions=keys,
        query_mask=query_mask,
        key_mask=key_mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        rotated=rotated,
    )
    q = sharpened(q, problem.law, query_positions, k.shape[2])
    out, lse = choose(replace(problem, q=q), impl, backend).prepared(q, k, v, sinks)
    return out.contiguous(), lse.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@lru_cache(maxsize=64)
def _law(text: str) -> Law:
    """Return the law of a graph, which holds it as JSON; made once, it keeps what kernels read of it."""
    return make_law(**json.loads(text))
