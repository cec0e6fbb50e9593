"""vLLM's flash attention with laws.

A step in which every sequence has one new token is one set of launches over pages, for all of them, whatever their
lengths: nothing is read from the device, so vLLM captures the whole step in a CUDA graph. Batches with a prompt in them
run in pieces around attention, as vLLM does it: a prompt's piece is a FlashAttention call for each region of the law
(`prompt`), or `rpe3d.attention` over keys that are read together; sequences that decode beside it share the launches of
a step. Laws without a kernel over pages (`leaky-rerope`, short chunks, a chosen far field whose blocks do not divide a
page) decode one sequence after the other, outside of graphs.

With a chosen far field, pages also hold summaries of their blocks (`kept`), which every forward brings up to date
before it attends.

`make test-serve-gpu` tests it against transformers; what has run on a GPU so far is in docs/guides/serve.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from rpe3d.attention.chosen import law_refusal
from rpe3d.attention.chosen import paged as chosen
from rpe3d.attention.decode import MOST_QUERIES, paged
from rpe3d.attention.decode.loop import _processors
from rpe3d.attention.lowering import plan
from rpe3d.attention.problem import sharpened
from rpe3d.geometry import Law
from rpe3d.serve import kept, prompt
from rpe3d.serve.backend import Batch, Far, LawBackend, LawBuilder, LawImpl, Step, index, served_law

logger = init_logger("vllm.plugins.rpe3d")
TRIALS: dict[Any, str | None] = {}
"""What trials of FlashAttention's calls found in this process, by law, page and heads: a fault, or None."""
FLASH = 3
"""The version of FlashAttention that runs prompts, for Hopper GPUs. Other versions have not been tried."""


def flash_attention(query: Tensor, *stored: Tensor, **given: Any) -> Any:
    """Call vLLM's FlashAttention 3, as vLLM does: dimensions of size 1 must have the strides of others."""
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    keys, values = (canonicalize_singleton_dim_strides(one) for one in stored)
    return flash_attn_varlen_func(query, keys, values, **given, fa_version=FLASH)


def has_kernel(law: Law, spec: Any) -> bool:
    """Say whether kernels over pages run a law over such pages."""
    if law.chooses:
        return kept.layout(law, spec) is not None
    return plan(law).refusal is None and spec.head_size % 16 == 0 and spec.head_size <= 256


class Builder(LawBuilder, FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """Batches of vLLM's flash attention: steps as a whole, others split by length."""

    supports_update_block_table = False  # what is split off holds pages, too

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.steps: paged.Steps | chosen.Steps | None = None
        if self.law is None or not has_kernel(self.law, self.kv_cache_spec):
            return
        given = {"sequences": self.vllm_config.scheduler_config.max_num_seqs}
        given |= {"heads": self.num_heads_q, "groups": self.num_heads_kv}
        if self.law.chooses:
            given |= {"longest": self.vllm_config.model_config.max_model_len, "page": self.kv_cache_spec.block_size}
            self.steps = chosen.Steps(self.law, self.device, **given)
        else:
            self.steps = paged.Steps(self.law, self.device, **given)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        law = served_law(vllm_config)
        if law is None:
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if has_kernel(law, kv_cache_spec):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        whole = self._build(common_prefix_len, common_attn_metadata, fast_build)
        if isinstance(self.steps, chosen.Steps):
            whole.rpe3d_kept = self.steps
        return whole

    def _build(self, common_prefix_len: int, common: Any, fast_build: bool) -> Any:
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

    def __init__(self, *arguments: Any, **named: Any) -> None:
        from vllm.config import get_current_vllm_config

        super().__init__(*arguments, **named)
        engine = get_current_vllm_config()
        Backend.law = served_law(engine)
        self.sequences = 0 if self.law is None else int(engine.scheduler_config.max_num_seqs)
        self.flash = getattr(self, "vllm_flash_attn_version", None) == FLASH

    def caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as [pages, page, g, d]."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values

    def keys_and_values(self, layer: Any, kv_cache: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (cache[pages].flatten(0, 1).transpose(0, 1) for cache in self.caches(kv_cache))
        return keys, values

    def kept(self, steps: chosen.Steps, kv_cache: Tensor) -> chosen.Kept:
        """Return what is kept of the pages of this layer."""
        nbytes = kv_cache[0].numel() * kv_cache.element_size()
        return steps.layout.behind(kv_cache, nbytes, self.num_kv_heads, self.head_size)

    def summarize(self, steps: chosen.Steps, kv_cache: Tensor, metadata: Any) -> None:
        """Keep summaries of the blocks that this forward has completed: vLLM has written its keys before."""
        n = metadata.query_start_loc.shape[0] - 1
        steps.summarize(
            self.caches(kv_cache)[0],
            self.kept(steps, kv_cache),
            pages=metadata.block_table[:n],
            starts=metadata.query_start_loc,
            lengths=metadata.seq_lens[:n],
            slots=metadata.slot_mapping,
            most=metadata.max_query_len,
        )

    def reserve(self, query: Tensor) -> Tensor:
        """Take for a moment what the longest prompt will, while vLLM measures how much memory its cache may have.

        That prompt's keys and values are read together, and its far keys are turned. Steps of a chosen far field keep
        scores of blocks, for as many sequences as there may be.
        """
        assert self.law is not None
        numbers = 3 * self.longest * self.num_kv_heads * self.head_size
        if self.law.chooses and law_refusal(self.law) is None:
            shape = self.sequences, self.num_heads, self.num_kv_heads, self.longest
            numbers += -(-chosen.room(self.law, *shape, query.device) // query.element_size())
        return query.new_empty(numbers)

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
        steps = getattr(attn_metadata, "rpe3d_kept", None)
        if self.law is not None and steps is not None:
            self.summarize(steps, kv_cache, attn_metadata)
        step = getattr(attn_metadata, "rpe3d", None)
        if self.law is not None and isinstance(step, Step):
            self.take(step, query, kv_cache, output)
            return output
        done: Tensor = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )
        return done

    def attend_one(self, layer: Any, query: Tensor, kv_cache: Tensor, batch: Batch, far: Far, output: Tensor) -> None:
        made = batch.shared.get(far.row)
        page, count = kv_cache.shape[2], far.tokens.stop - far.tokens.start
        if made is None and count > MOST_QUERIES and self.runs_prompts(query, page, count, far.length):
            assert self.law is not None
            pages = far.pages[: -(-far.length // page)]
            queries, processors = range(far.length - count, far.length), _processors(query.device)
            made = prompt.Prompt(self.law, queries, pages, page, flash_attention, processors=processors)
            batch.shared[far.row] = made
        if isinstance(made, prompt.Prompt):
            made(query[far.tokens], *self.caches(kv_cache), output[far.tokens], self.scale)
        else:
            super().attend_one(layer, query, kv_cache, batch, far, output)

    def runs_prompts(self, query: Tensor, page: int, rows: int, keys: int) -> bool:
        """Return whether FlashAttention runs a piece of so many rows and keys under the law, over such pages.

        The first call tries it (`prompt.fault`). If the trial fails, the reason is logged and `rpe3d.attention` runs
        prompts instead.
        """
        law = self.law
        if law is None or not self.flash or prompt.refusal(law, page, rows, keys) is not None:
            return False
        given = {"heads": self.num_heads, "groups": self.num_kv_heads, "dtype": query.dtype, "device": query.device}
        key = (law.json, page, *given.values())
        if key not in TRIALS:
            TRIALS[key] = prompt.fault(law, page, **given, flash=flash_attention)
            if TRIALS[key] is not None:
                logger.warning("FlashAttention %d does not run prompts under %s: %s", FLASH, law.name, TRIALS[key])
        return TRIALS[key] is None

    def attend_far(self, layer: Any, query: Tensor, kv_cache: Tensor, batch: Batch, output: Tensor) -> None:
        super().attend_far(layer, query, kv_cache, batch, output)
        if batch.step is not None:
            self.take(batch.step, query, kv_cache, output)

    def take(self, step: Step, query: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        """Attend from the tokens of a step, and write their rows of `output`."""
        given = {"pages": step.pages, "lengths": step.lengths, "scale": self.scale}
        if isinstance(step.attend, chosen.Steps):
            given["kept"] = self.kept(step.attend, kv_cache)
        if isinstance(step.tokens, slice):
            q, out = self.sharpened(query[step.tokens, :, None], step), output[step.tokens, :, None]
            step.attend(q, *self.caches(kv_cache), out, **given)
            return
        q = self.sharpened(query[step.tokens][:, :, None], step)
        out = torch.empty_like(q)
        step.attend(q, *self.caches(kv_cache), out, **given)
        output[step.tokens] = out[:, :, 0]

    def sharpened(self, q: Tensor, step: Step) -> Tensor:
        """Return the queries of a step times the law's temperature, each the last of its sequence."""
        assert self.law is not None
        return sharpened(q, self.law, step.lengths[:, None] - 1, 0)


class Backend(LawBackend, FlashAttentionBackend):  # type: ignore[misc]
    """Stands in for FLASH_ATTN, and is it for models without a law."""

    impl, builder = Impl, Builder
    law: ClassVar[Law | None] = None
    """The law of the layers that were made last in this process: vLLM asks for pages without saying for which model."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        given = super().customize_spec(spec)
        return kept.with_room(cls.law, given, cls.get_supported_kernel_block_sizes(given))
