"""Attention as one opaque operator of plain values: torch.compile(fullgraph=True) keeps a model in one graph.

Forward only. Where gradients are asked for, the graph breaks and the eager implementations run as they are.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rpe3d.attention.contract import Placed, check
from rpe3d.attention.dispatch import run
from rpe3d.geometry import Law, make_law


@torch.library.custom_op("rpe3d::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    key_starts: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    law: str,
    scale: float | None,
    softcap: float | None,
    turned: bool,
    impl: str,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """`rpe3d.attention.attention`, with the law as its JSON, and `Placed.starts` of the keys where they are known."""
    keys = key_positions if key_positions is None or key_starts is None else Placed(key_positions, starts=key_starts)
    x = check(
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
        turned=turned,
    )
    out, lse = run(x, impl, backend)
    return out.contiguous(), lse.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@lru_cache(maxsize=64)
def _law(text: str) -> Law:
    return make_law(**json.loads(text))
