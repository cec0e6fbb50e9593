"""Room in vLLM's pages for what a chosen far field keeps about them, behind their keys and values.

vLLM asks an attention backend for the size of a page before it counts how many fit into memory, so this room is
accounted for like keys and values. `rpe3d.attention.chosen.paged` says what is kept there, and why it stays right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rpe3d.attention.chosen.paged import Layout, refusal
from rpe3d.geometry import Law


def layout(law: Law, spec: Any) -> Layout | None:
    """Return the layout of what a law keeps in these pages; None if they have no room, or no kernel runs the law."""
    if spec.head_size_v != spec.head_size or refusal(law, spec.block_size, spec.head_size):
        return None
    found = Layout.of(law, spec.block_size, spec.head_size)
    return found if spec.page_size_bytes >= _padded(found, spec) else None


def with_room(law: Law | None, spec: Any, sizes: list[Any]) -> Any:
    """Return a layer's pages with room for what a law keeps, if the paged kernels run the law.

    `sizes` are the page sizes that vLLM's kernels take. vLLM splits others, and pages with room behind their keys
    cannot be split.
    """
    whole = any(
        spec.block_size % size.base == 0 if isinstance(size, MultipleOf) else spec.block_size == size for size in sizes
    )
    if law is None or not law.chooses or not whole or type(spec) is not FullAttentionSpec:
        return spec
    windowed = spec.sliding_window is not None or spec.attention_chunk_size is not None
    if windowed or spec.page_size_padded is not None or spec.head_size_v != spec.head_size:
        return spec
    if refusal(law, spec.block_size, spec.head_size):
        return spec
    return replace(spec, page_size_padded=_padded(Layout.of(law, spec.block_size, spec.head_size), spec))


def _padded(found: Layout, spec: Any) -> int:
    return found.padded(spec.real_page_size_bytes, spec.num_kv_heads, spec.head_size)
