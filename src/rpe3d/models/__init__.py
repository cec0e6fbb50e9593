"""Put Hugging Face models under a law, through transformers' registries and never by patching a class."""

from rpe3d.models.adapters import check_adapter, load_adapter, save_adapter
from rpe3d.models.extend import as_stock, extend, facts, law_of, pretrained_length, restore

__all__ = [
    "as_stock",
    "check_adapter",
    "extend",
    "facts",
    "law_of",
    "load_adapter",
    "pretrained_length",
    "restore",
    "save_adapter",
]
