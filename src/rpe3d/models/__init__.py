"""Hugging Face models under a law: through transformers' registries, never by patching a class."""

from rpe3d.models.extend import extend, law_of, restore

__all__ = ["extend", "law_of", "restore"]
