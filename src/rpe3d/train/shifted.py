"""S2-Attn, LongLoRA's shifted sparse attention (Chen et al. 2023, arXiv 2309.12307, section 3.2).

Tokens attend within groups of G. In the second half of the heads the groups are shifted by G / 2, so that information
flows between them. The paper's Algorithm 1 rolls the tokens round, which shows the first G / 2 tokens the last ones;
the authors train with flash attention, where the first and the last half group stand alone. So they do here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | range, Tensor | None], Tensor]
"""Attention of q, k, v at positions, with sinks."""


def shifted(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, group: int, attend: Attend, *, by_position: bool
) -> Tensor:
    """Compute S2-Attn of q [b, h, t, d] and k, v [b, g, t, d].

    With `by_position`, `attend` needs the positions and not only their order.
    """
    h = q.shape[1]
    k, v = (x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
    parts = []
    for heads, offset in ((slice(0, h // 2), 0), (slice(h // 2, h), group // 2)):
        mine = [x[:, heads] for x in (q, k, v)]
        own = None if sinks is None else sinks[heads]
        if not mine[0].shape[1]:
            continue
        outs = []
        for start, stop in ((0, offset), (offset, q.shape[2])):
            if stop > start:
                cut = [x[:, :, start:stop] for x in mine]
                outs.append(_grouped(cut, own, min(group, stop - start), start, attend, by_position))
        parts.append(torch.cat(outs, 2))
    return torch.cat(parts, 1)


def _grouped(
    x: list[Tensor], sinks: Tensor | None, group: int, start: int, attend: Attend, by_position: bool
) -> Tensor:
    """Run causal attention in groups, as rows of a batch. A last group that is not full is padded at its end."""
    b, h, t, _ = x[0].shape
    count = -(-t // group)
    q, k, v = (
        torch.nn.functional.pad(y, (0, 0, 0, count * group - t))
        .reshape(b, h, count, group, -1)
        .transpose(1, 2)
        .reshape(b * count, h, group, -1)
        for y in x
    )
    positions: Tensor | range = range(group)
    if by_position:
        positions = (start + torch.arange(count * group, device=q.device)).view(count, group).repeat(b, 1)
    out = attend(q, k, v, positions, sinks)
    return out.reshape(b, count, h, group, -1).transpose(1, 2).reshape(b, h, count * group, -1)[:, :, :t]
