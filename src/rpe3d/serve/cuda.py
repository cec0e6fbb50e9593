"""vLLM's flash attention with laws. UNTESTED on CUDA: its parts are tested, the whole has not run on a GPU.

A decoding step is our kernel over pages; of a prompt's piece the keys are read together and `rpe3d.attention` runs.
The batch is looked at on the host, so attention stays outside of CUDA graphs, and the rest of the model inside.
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
from rpe3d.serve.backend import Batch, LawBackend, LawBuilder, LawImpl, served_law


class Builder(LawBuilder, FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Batches of vLLM's flash attention, split by length."""

    supports_update_block_table = False  # what is split off holds pages, too

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        if served_law(vllm_config) is not None:
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)


class Impl(LawImpl, FlashAttentionImpl):  # type: ignore[misc]
    """vLLM's flash attention, and ours where a law is more than plain RoPE."""

    def caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as [pages, page, g, d]."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values

    def keys_and_values(self, layer: Any, kv_cache: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (cache[pages].flatten(0, 1).transpose(0, 1) for cache in self.caches(kv_cache))
        return keys, values

    def attend_far(self, layer: Any, query: Tensor, kv_cache: Tensor, batch: Batch, output: Tensor) -> None:
        assert self.law is not None
        decoding = plan(self.law).refusal is None
        single = [far for far in batch.far if decoding and far.tokens.stop - far.tokens.start == 1]
        rest = [far for far in batch.far if not decoding or far.tokens.stop - far.tokens.start > 1]
        super().attend_far(layer, query, kv_cache, replace(batch, far=rest), output)
        if not single:
            return
        tokens = torch.tensor([far.tokens.start for far in single], device=query.device)
        rows = torch.tensor([far.row for far in single], device=query.device)
        out, _ = paged.attend(
            query[tokens][:, :, None],
            *self.caches(kv_cache),
            self.law,
            pages=batch.pages[rows],
            lengths=batch.lengths[rows],
            scale=self.scale,
        )
        output[tokens] = out[:, :, 0]


class Backend(LawBackend, FlashAttentionBackend):  # type: ignore[misc]
    """Stands in for FLASH_ATTN, and is it for models without a law."""

    impl, builder = Impl, Builder
