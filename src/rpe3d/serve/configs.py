"""Rewrite a config before vLLM reads it: dual chunk attention becomes the law that it is."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from vllm.transformers_utils import config as loading

from rpe3d.models.carried import carried
from rpe3d.models.own_context import own_context
from rpe3d.serve.checks import FAMILIES
from rpe3d.serve.entry import law_entry
from rpe3d.serve.fork import avoid_fork

DUAL_CHUNKS = "dual_chunk_attention_config"


def install() -> None:
    """Wrap vLLM's last step of reading a config, which completes its rope parameters, once."""
    stock = loading.patch_rope_parameters
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    def patch_rope_parameters(config: Any) -> None:
        avoid_fork()  # plugins are loaded once, and CUDA may have been started since
        understand(config)
        stock(config)

    loading.patch_rope_parameters = patch_rope_parameters


def understand(config: Any) -> None:
    """Write dual chunk attention as a law into a config, and remove what vLLM must not read next to a law.

    vLLM had dual chunk attention until 0.11, and now fails on configs that name it. `factor` belongs to the scaling
    below the law: vLLM would multiply the law's context by it.
    """
    dual = isinstance(getattr(config, DUAL_CHUNKS, None), Mapping) and config.model_type in FAMILIES
    if dual and carried(config) is None and (own := own_context(config)) is not None and own.law is not None:
        for name, value in law_entry(config, own.law, own.length, {}).items():
            setattr(config, name, value)
    held = carried(config)
    if held is None:
        return
    held.pop("factor", None)
    if dual:
        delattr(config, DUAL_CHUNKS)
