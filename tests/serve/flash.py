"""vLLM's FlashAttention, played by plain PyTorch."""

from __future__ import annotations

import torch

from rpe3d.serve.prompt import tile


def flash(
    q, k, v, *, cu_seqlens_q, seqused_k, block_table, softmax_scale, causal, max_seqlen_q, max_seqlen_k, out=None, **_
):
    """Return what vLLM's `flash_attn_varlen_func` documents: sequences over pages, causal from the last corner.

    Gathered keys fill whole tiles, and values beyond a sequence are multiplied by 0, so none may be NaN.
    """
    out = torch.full_like(q, torch.nan) if out is None else out
    lse = torch.full(q.shape[1::-1], torch.nan)
    page, group = k.shape[1], q.shape[1] // k.shape[2]
    starts = cu_seqlens_q.tolist()
    assert (block_table.dtype, starts[-1]) == (torch.int32, len(q))
    if len(k) == 1:  # gathered keys
        assert page % tile(q.shape[2])[1] == 0
        assert v.isfinite().all()
    for i, keys in enumerate(seqused_k.tolist()):
        rows = slice(starts[i], starts[i + 1])
        count = starts[i + 1] - starts[i]
        assert 0 < count <= max_seqlen_q
        assert 0 < keys <= max_seqlen_k
        pages = block_table[i, : -(-keys // page)].long()
        one, other = (
            x[pages].flatten(0, 1)[:keys].repeat_interleave(group, 1).transpose(0, 1) for x in (k.float(), v.float())
        )
        scores = softmax_scale * q[rows].float().transpose(0, 1) @ one.transpose(1, 2)
        if causal:
            behind = torch.arange(keys)[None] > torch.arange(keys - count, keys)[:, None]
            scores = scores.masked_fill(behind, -torch.inf)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = (scores.softmax(-1) @ other).transpose(0, 1).to(q.dtype)
    return out, lse
