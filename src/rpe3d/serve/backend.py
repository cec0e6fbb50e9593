"""Attention under a law on top of one of vLLM's backends.

A batch is split by length, on the host, from the lengths that vLLM has there. Sequences that the law leaves to plain
RoPE stay with vLLM's kernel. Of the others, keys are read from the pages and `rpe3d.attention` runs, the same function
as under Hugging Face. A backend may take all sequences with one new token each together (`Step`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rpe3d.attention import Shared
from rpe3d.config import ConfigError
from rpe3d.geometry import Law
from rpe3d.serve.checks import config_law
from rpe3d.serve.refusals import told
from rpe3d.serve.rope import MADE
from rpe3d.serve.versions import forgotten


class LawBackend:
    """Goes before a backend of vLLM, and names the implementation and the builder that keep laws."""

    impl: ClassVar[type[Any]]
    builder: ClassVar[type[Any]]

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        return cls.builder


@dataclass(frozen=True)
class Far:
    """A sequence that has outgrown plain RoPE: its tokens in the batch, its length, its pages, its row in the batch."""

    tokens: slice
    length: int
    pages: Tensor
    row: int


@dataclass(frozen=True)
class Step:
    """Sequences with one new token each, which `attend` takes in one launch; all layers of a forward share it."""

    attend: Callable[..., Any]
    tokens: slice | Tensor
    """Where their tokens lie in the batch."""
    pages: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Batch:
    """A batch with `Far` sequences; all layers of a forward share it."""

    far: list[Far]
    near: Any = None
    """vLLM's metadata of the other sequences; None where there are none."""
    near_tokens: slice | Tensor | None = None
    step: Step | None = None
    """Far sequences that are not in `far`."""
    shared: dict[int, Any] = field(default_factory=dict)
    """What the layers share, for each row of the batch: `Shared`, or what a backend has in its place."""


def served_law(engine: Any) -> Law | None:
    """Return the law that attention must apply in an engine; None where its rotary layer does, or there is no law."""
    model = engine.model_config
    law = None if model is None else config_law(model.hf_text_config)
    return law if law is not None and law.single_turn is None and law.needs_attention else None


class LawBuilder:
    """Goes before a metadata builder of vLLM: splits every batch, once for all layers."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Layers with a window are vLLM's alone. Where vLLM keeps them in one cache with the others, the layers know.
        windowed = type(self.kv_cache_spec).__name__ == "SlidingWindowSpec"  # type: ignore[attr-defined]
        self.law = None if windowed else served_law(self.vllm_config)  # type: ignore[attr-defined]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common, law = common_attn_metadata, self.law
        build = super().build  # type: ignore[misc]
        if law is None or common.max_seq_len <= law.exact_up_to:
            return build(common_prefix_len, common, fast_build)
        batch = split(common, law.exact_up_to, lambda near: build(0, near, fast_build))
        whole = build(0, common, fast_build or (batch is not None and self.knows_windows()))
        whole.rpe3d = batch
        return whole

    def knows_windows(self) -> bool:
        """Say whether vLLM has looked at all layers. From then on it need not plan what it will not run."""
        return getattr(self, "aot_sliding_window", ()) is not None


def split(common: Any, longest: float, build: Any) -> Batch | None:
    """Split off the sequences of more than `longest` tokens; None where there are none."""
    starts, lengths = common.query_start_loc_cpu.tolist(), host_lengths(common)
    rows = [row for row in range(common.num_reqs) if starts[row] < starts[row + 1]]
    far = [
        Far(slice(starts[row], starts[row + 1]), lengths[row], common.block_table_tensor[row], row)
        for row in rows
        if lengths[row] > longest
    ]
    if not far:
        return None
    near = [row for row in rows if lengths[row] <= longest]
    if not near:
        return Batch(far)
    numbers = [t for row in near for t in range(starts[row], starts[row + 1])]
    tokens = index(numbers, common.slot_mapping.device)
    return Batch(far, build(_only(common, near, len(numbers), tokens, starts, lengths)), tokens)


def host_lengths(common: Any) -> list[int]:
    """Return the tokens of every sequence without waiting for the device.

    vLLM knows an upper bound, which speculative decoding alone does not reach, and that is refused under a law.
    """
    known = common.seq_lens_cpu_upper_bound
    lengths: Tensor = common.seq_lens if common.seq_lens.device.type == "cpu" or known is None else known
    found: list[int] = lengths.tolist()
    return found


def index(numbers: list[int], device: torch.device) -> slice | Tensor:
    """Return rising numbers as an index: a slice where they are consecutive, which costs nothing."""
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return slice(numbers[0], numbers[-1] + 1)
    host = torch.tensor(numbers, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _only(
    common: Any, rows: list[int], count: int, tokens: slice | Tensor, starts: list[int], lengths: list[int]
) -> Any:
    """Return the part of a batch that holds the sequences `rows`, with `count` tokens."""
    counts = [starts[row + 1] - starts[row] for row in rows]
    at = torch.tensor([0, *counts], dtype=common.query_start_loc_cpu.dtype).cumsum(0, dtype=torch.int32)
    chosen = index(rows, common.seq_lens.device)
    return replace(
        common,
        query_start_loc=at.to(common.query_start_loc.device, non_blocking=True),
        query_start_loc_cpu=at,
        seq_lens=common.seq_lens[chosen],
        num_reqs=len(rows),
        num_actual_tokens=count,
        max_query_len=max(counts),
        max_seq_len=max(lengths[row] for row in rows),
        block_table_tensor=common.block_table_tensor[chosen],
        slot_mapping=common.slot_mapping[tokens],
        **forgotten(common),
    )


class LawImpl:
    """Goes before an attention implementation of vLLM, which runs whatever is plain RoPE."""

    scale: float
    head_size: int

    @told()
    def __init__(self, *arguments: Any, **named: Any) -> None:
        from vllm.config import get_current_vllm_config

        super().__init__(*arguments, **named)
        engine = get_current_vllm_config()
        # A layer with a window is vLLM's alone, as it is transformers' under Hugging Face: the law is for the others.
        windowed = getattr(self, "sliding_window", None) not in (None, -1, (-1, -1))
        self.law = law = None if windowed else served_law(engine)
        self.longest = 0 if law is None else int(engine.model_config.max_model_len)
        if law is not None and law.json not in MADE:
            raise ConfigError(
                f"attention would keep {law.name}, but the model's rotary layer was not made by rpe3d",
                "this family is not supported",
            )
        extras = [getattr(self, name, None) for name in ("alibi_slopes", "sinks", "logits_soft_cap")]
        if law is not None and any(isinstance(x, Tensor) or x for x in extras):
            raise ConfigError("a layer has sinks, a softcap or a bias of its own", "it is not served under a law")

    def keys_and_values(self, layer: Any, kv_cache: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values in these pages, in order: [g, tokens, d] each, contiguous in d."""
        raise NotImplementedError

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
        """Write every row of `output` [tokens, h, d], as an attention forward of vLLM."""
        batch: Batch | None = None if self.law is None else getattr(attn_metadata, "rpe3d", None)
        stock = super().forward  # type: ignore[misc]
        if batch is None:
            plain: Tensor = stock(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return plain
        if batch.near is not None:
            some = [x[batch.near_tokens] for x in (query, key, value)]
            output[batch.near_tokens] = stock(layer, *some, kv_cache, batch.near, torch.empty_like(some[0]))
        self.attend_far(layer, query, kv_cache, batch, output)
        return output

    def attend_far(self, layer: Any, query: Tensor, kv_cache: Tensor, batch: Batch, output: Tensor) -> None:
        """Attend in the sequences on which the law is not plain RoPE, one by one."""
        for far in batch.far:
            self.attend_one(layer, query, kv_cache, batch, far, output)

    def attend_one(self, layer: Any, query: Tensor, kv_cache: Tensor, batch: Batch, far: Far, output: Tensor) -> None:
        """Attend in one sequence: its keys are read from the pages into one piece."""
        pages = far.pages[: -(-far.length // kv_cache.shape[2])]
        k, v = self.keys_and_values(layer, kv_cache, pages)
        q = query[far.tokens].transpose(0, 1)[None]
        out = self._attend(q, k[None, :, : far.length], v[None, :, : far.length], batch, far)
        output[far.tokens] = out[0].transpose(0, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, far: Far) -> Tensor:
        assert self.law is not None
        keys = range(far.length)
        queries = keys[far.length - q.shape[2] :]
        attend: Shared = batch.shared.setdefault(far.row, Shared())
        return attend(q, k, v, self.law, scale=self.scale, rotated=True, query_positions=queries, key_positions=keys)[0]
