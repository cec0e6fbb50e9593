"""vLLM's CPU attention with laws. The layout of keys in its cache depends on the processor, and is found by trying."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from rpe3d.config import ConfigError
from rpe3d.serve.backend import LawBackend, LawBuilder, LawImpl, served_law
from rpe3d.serve.refusals import told
from rpe3d.serve.versions import instructions

Reader = Callable[[Tensor], Tensor]
"""Function from a part of the cache [g, pages, page · d] to [g, pages, page, d]."""


class Builder(LawBuilder, CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Batches of vLLM's CPU attention, split by length."""

    @told()
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if served_law(self.vllm_config) is not None:
            readers(self.dtype, self.block_size, self.head_dim, self.isa)  # refuse now what could not be read later


class Impl(LawImpl, CPUAttentionBackendImpl):  # type: ignore[misc]
    """vLLM's CPU attention, or ours if a law is more than plain RoPE."""

    def keys_and_values(self, layer: Any, kv_cache: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        blocks, heads, page, _ = kv_cache.shape
        held = kv_cache.view(blocks, heads, 2, page * self.head_size).transpose(0, 1)
        found = []
        for part, read in enumerate(readers(kv_cache.dtype, page, self.head_size, instructions(self, layer))):
            found.append(read(held[:, pages, part]).flatten(1, 2))
        return found[0], found[1]


class Backend(LawBackend, CPUAttentionBackend):  # type: ignore[misc]
    """Replaces CPU_ATTN, and behaves like it for models without a law."""

    impl, builder = Impl, Builder


@lru_cache(maxsize=8)
def readers(dtype: torch.dtype, page: int, dim: int, isa: str) -> tuple[Reader, Reader]:
    """Return how to read the keys and the values of a page, found by writing numbers to one and looking for them."""
    number = torch.arange(page * dim).view(page, 1, dim)
    places = torch.zeros(2, page * dim, dtype=torch.long)
    for factor in (128**2, 128, 1):  # any type holds 128 numbers exactly
        digits = (number // factor % 128).to(dtype)
        cache = torch.zeros(1, 1, 2 * page, dim, dtype=dtype)
        ops.cpu_attn_reshape_and_cache(digits, digits, *cache.chunk(2, dim=2), torch.arange(page), isa)
        places += factor * cache.view(2, page * dim).long()
    return _reader(places[0], page, dim), _reader(places[1], page, dim)


def _reader(held: Tensor, page: int, dim: int) -> Reader:
    """Return a reader of pages whose n-th number is number held[n] of [page, dim]."""
    order, number = held.argsort(), torch.arange(page * dim)
    if not held[order].equal(number):
        raise ConfigError("vLLM's cache holds keys in an unknown layout", "serve with --dtype float32")
    if order.equal(number):
        return lambda part: part.unflatten(2, (page, dim))
    if order.view(page, dim).T.flatten().equal(number):
        return lambda part: part.unflatten(2, (dim, page)).transpose(2, 3).contiguous()
    return lambda part: part[..., order].unflatten(2, (page, dim))
