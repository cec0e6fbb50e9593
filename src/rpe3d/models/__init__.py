"""Hugging Face models under a law: through transformers' registries, never by patching a class."""

from rpe3d.models.adapters import check_adapter, load_adapter, save_adapter
from rpe3d.models.extend import extend, law_of, restore

__all__ = ["check_adapter", "extend", "law_of", "load_adapter", "restore", "save_adapter"]
