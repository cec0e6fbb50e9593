"""One layer of a model in vLLM, without an engine: batches, a builder, an implementation over a cache."""

from __future__ import annotations

import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rpe3d import make_law
from rpe3d.attention import attention
from rpe3d.serve import cuda
from rpe3d.serve.rope import MADE

PAGE, GROUPS, HEADS, DIM = 16, 2, 4, 32
LAW = {"chunk": 16, "window": 32, "reach": 64}
CHOSEN = {"chunk": 32, "window": 32, "reach": 64, "far": 3}
EDGE = 48  # window + chunk: up to here 3D-RPE is plain RoPE


def law(name="3d-rpe", **parameters):
    return make_law(name, pretrained=64, context=512, head_dim=DIM, **parameters)


def common(counts, lengths, *, device="cpu", width=9, padding=0):
    """A batch as vLLM describes it: so many new tokens of each sequence; `padding` rows fill up a graph."""
    counts, lengths = counts + [0] * padding, lengths + [0] * padding
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    tokens = sum(counts) + padding
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(counts),
        num_actual_tokens=tokens,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_table_tensor=torch.arange(len(counts) * width, dtype=torch.int32).view(-1, width).to(device),
        slot_mapping=torch.arange(100, 100 + tokens).to(device),
    )


def spec(head_size=DIM):
    return FullAttentionSpec(block_size=PAGE, num_kv_heads=GROUPS, head_size=head_size, dtype=torch.float32)


def builder(config, *, full=False, device="cpu"):
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE if full else CUDAGraphMode.NONE
    with set_current_vllm_config(config):
        return cuda.Builder(spec(), [], config, torch.device(device))


class Served:
    """An implementation of one layer and its builder over a cache that holds the given sequences."""

    def __init__(self, config, monkeypatch, lengths, *, full=False, width=9):
        self.builder, self.law, self.lengths = builder(config, full=full), builder(config).law, lengths
        MADE.add(self.law.json)
        with set_current_vllm_config(config):
            self.impl = cuda.Impl(HEADS, DIM, 0.2, GROUPS, None, None, "auto")
        most = width * PAGE
        self.k, self.v = (torch.randn(len(lengths), GROUPS, most, DIM) for _ in range(2))
        self.cache = torch.full((len(lengths) * width + 5, GROUPS, PAGE, 2 * DIM), torch.nan)
        self.table = torch.randperm(len(self.cache))[: len(lengths) * width].view(-1, width).int()
        self.fill()
        monkeypatch.setattr(FlashAttentionImpl, "forward", self.stock)

    def fill(self):
        for part, x in ((slice(0, DIM), self.k), (slice(DIM, None), self.v)):
            self.cache[self.table.long(), ..., part] = x.unflatten(2, (-1, PAGE)).transpose(1, 2)

    def stock(self, layer, query, key, value, cache, metadata, output, *_):
        """Stand in for vLLM's kernel: plain RoPE, from the tensors that vLLM's kernel is given."""
        keys, values = cache.transpose(1, 2).split(DIM, dim=-1)
        for row, n in enumerate(metadata.seq_lens.tolist()):
            start, stop = metadata.query_start_loc[row : row + 2].tolist()
            held = [x[metadata.block_table[row, : -(-n // PAGE)].long()].flatten(0, 1)[:n] for x in (keys, values)]
            where = {"query_positions": range(n - stop + start, n), "key_positions": range(n)}
            out = self.reference(query[start:stop], *(x.transpose(0, 1) for x in held), law("rope"), **where)
            output[start:stop] = out
        return output

    def reference(self, q, k, v, made, **where):
        q = q.transpose(0, 1)[None]
        out, _ = attention(q, k[None], v[None], made, scale=0.2, rotated=True, impl="reference", **where)
        return out[0].transpose(0, 1)

    def forward(self, metadata, query):
        output = torch.full_like(query, torch.nan)
        key = query[:, :GROUPS]
        assert self.impl.forward(None, query, key, key, self.cache, metadata, output) is output
        return output

    def check(self, query, output, counts):
        start = 0
        for row, (n, count) in enumerate(zip(self.lengths, counts, strict=True)):
            where = {"query_positions": range(n - count, n), "key_positions": range(n)}
            part = slice(start, start + count)
            truth = self.reference(query[part], self.k[row, :, :n], self.v[row, :, :n], self.law, **where)
            torch.testing.assert_close(output[part], truth, rtol=0, atol=2e-5)
            start += count
