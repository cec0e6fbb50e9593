"""A cache that is full of random keys already, so that decoding at any length is timed without reading prompts first.

vLLM's own connector for benchmarks of decoding takes all prompts as read. Here it takes those that begin with MARK, and
one engine still answers all others for real. The second token of such a prompt says how many there are: none begins
before all have come, so that every step has all of them. What a marked prompt is answered means nothing; how long a
step takes does not depend on what keys hold, and where queries choose their far keys hardly on what summaries do: what
is kept behind the keys of a page is random as well.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector

from serve_peers import MARK


class Filled(DecodeBenchConnector):  # type: ignore[misc]
    """Takes marked prompts as read, and lets them begin together."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.come: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for cache in {cache.untyped_storage().data_ptr(): cache for cache in kv_caches.values()}.values():
            torch.empty(0, dtype=cache.dtype, device=cache.device).set_(cache.untyped_storage()).normal_()
        super().register_kv_caches(kv_caches)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        prompt = request.prompt_token_ids
        if prompt[0] != MARK:
            return 0, False
        self.come.add(request.request_id)
        if len(self.come) < prompt[1]:
            return None, False  # to be asked again
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self.come.discard(request.request_id)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self.come.discard(request.request_id)
        return super().request_finished_all_groups(request, block_ids)
