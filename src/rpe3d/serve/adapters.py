"""Refuse LoRA adapters under vLLM that were trained under another law than the model's."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from rpe3d.models.adapters import FILE, check_law
from rpe3d.serve.checks import config_law
from rpe3d.serve.refusals import told


def install() -> None:
    """Wrap the function that loads an adapter in vLLM's workers, once."""
    from vllm.lora.utils import get_adapter_absolute_path
    from vllm.lora.worker_manager import WorkerLoRAManager

    stock = WorkerLoRAManager._load_adapter
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    @told()
    def _load_adapter(self: Any, lora_request: Any) -> Any:
        folder = Path(get_adapter_absolute_path(lora_request.lora_path))
        if (folder / FILE).exists():  # others were trained without a law, and fit a model as much as its weights do
            check_law(config_law(self._adapter_manager.model.config), folder)
        return stock(self, lora_request)

    WorkerLoRAManager._load_adapter = _load_adapter
