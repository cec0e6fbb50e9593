"""vLLM's flash attention with laws.

A step in which every sequence has one new token is one launch of our kernel over pages, for all of them, whatever their
lengths: nothing is read from the device, so vLLM captures the whole step in a CUDA graph. Batches with a prompt in them
run in pieces around attention, as vLLM does it: of a prompt's piece the keys are read together and `rpe3d.attention`
runs, sequences that decode beside it share one launch. Laws without a kernel (`leaky-rerope`, a chosen far field, short
chunks) decode one sequence after the other, outside of graphs.

What has run where: an earlier form of this module, whose decoding was not captured, gave transformers' answers on an
H200 in seven of eight engines (V1 and V2 runners, eager and piecewise graphs, fp16 and bf16); the eighth, in a process
of its own, did not start (docs/log.md). Full graphs have been tested in parts, on a CPU, and not yet on a
GPU: `make test-serve-gpu`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from rpe3d.attention.decode import paged
from rpe3d.attention.lowering import plan
from rpe3d.geometry import Law
from rpe3d.serve.backend import Batch, LawBackend, LawBuilder, LawImpl, Step, index, served_law


def has_kernel(law: Law, head_size: int) -> bool:
    """Say whether the kernel over pages runs a law with such heads."""
    return plan(law).refusal is None and head_size % 16 == 0 and head_size <= 256


class Builder(LawBuilder, FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Batches of vLLM's flash attention: steps as a whole, others split by length."""

    supports_update_block_table = False  # what is split off holds pages, too

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.steps: paged.Steps | None = None
        if self.law is not None and has_kernel(self.law, self.headdim):
            most = self.vllm_config.scheduler_config.max_num_seqs
            self.steps = paged.Steps(
                self.law, self.device, sequences=most, heads=self.num_heads_q, groups=self.num_heads_kv
            )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        law = served_law(vllm_config)
        if law is None:
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if has_kernel(law, kv_cache_spec.head_size):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        if self.steps is not None and self._is_step(common):
            whole = FlashAttentionMetadataBuilder.build(self, 0, common, self.knows_windows())
            n = common.num_reqs
            whole.rpe3d = Step(self.steps, slice(0, n), common.block_table_tensor[:n], common.seq_lens[:n])
            return whole
        whole = super().build(common_prefix_len, common, fast_build)
        batch: Batch | None = getattr(whole, "rpe3d", None)
        if batch is not None and self.steps is not None:
            whole.rpe3d = self._together(batch, common)
        return whole

    def _is_step(self, common: Any) -> bool:
        """Say whether the kernel takes a batch: each sequence has one new token, or is the padding of a graph.

        Where steps are captured, all of them do, since a graph serves any lengths. Elsewhere vLLM's own kernel has
        those that the law leaves to plain RoPE.
        """
        assert self.law is not None
        if common.max_query_len != 1 or common.num_actual_tokens != common.num_reqs:
            return False
        graphs: bool = self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        return graphs or common.max_seq_len > self.law.exact_up_to

    def _together(self, batch: Batch, common: Any) -> Batch:
        """Take the far sequences of a mixed batch that have one new token each together."""
        single = [far for far in batch.far if far.tokens.stop - far.tokens.start == 1]
        rest = [far for far in batch.far if far.tokens.stop - far.tokens.start > 1]
        if not single:
            return batch
        assert self.steps is not None
        rows = index([far.row for far in single], self.device)
        tokens = index([far.tokens.start for far in single], self.device)
        step = Step(self.steps, tokens, common.block_table_tensor[rows], common.seq_lens[rows])
        return replace(batch, far=rest, step=step)


class Impl(LawImpl, FlashAttentionImpl):  # type: ignore[misc]
    """vLLM's flash attention, and ours where a law is more than plain RoPE."""

    def caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as [pages, page, g, d]."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values

    def keys_and_values(self, layer: Any, kv_cache: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (cache[pages].flatten(0, 1).transpose(0, 1) for cache in self.caches(kv_cache))
        return keys, values

    def reserve(self, query: Tensor) -> Tensor:
        """Take for a moment what the longest prompt will, while vLLM measures how much memory its cache may have.

        That prompt's keys and values are read together, and its far keys are turned.
        """
        return query.new_empty(3, self.longest, self.num_kv_heads, self.head_size)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None and self.law is not None:
            self.reserve(query)
        step = getattr(attn_metadata, "rpe3d", None)
        if self.law is not None and isinstance(step, Step):
            self.take(step, query, kv_cache, output)
            return output
        done: Tensor = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )
        return done

    def attend_far(self, layer: Any, query: Tensor, kv_cache: Tensor, batch: Batch, output: Tensor) -> None:
        super().attend_far(layer, query, kv_cache, batch, output)
        if batch.step is not None:
            self.take(batch.step, query, kv_cache, output)

    def take(self, step: Step, query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        """Attend from the tokens of a step, and write their rows of `output`."""
        given = {"pages": step.pages, "lengths": step.lengths, "scale": self.scale}
        if isinstance(step.tokens, slice):
            q, out = query[step.tokens, :, None], output[step.tokens, :, None]
            step.attend(q, *self.caches(kv_cache), out, **given)
            return
        q = query[step.tokens][:, :, None]
        out = torch.empty_like(q)
        step.attend(q, *self.caches(kv_cache), out, **given)
        output[step.tokens] = out[:, :, 0]


class Backend(LawBackend, FlashAttentionBackend):  # type: ignore[misc]
    """Stands in for FLASH_ATTN, and is it for models without a law."""

    impl, builder = Impl, Builder
