"""Compute how much memory transformers' caches take for a text, found by running one token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rpe3d.config import whole
from rpe3d.models.probe import run_one_token

GROUP, RESIDUAL = 64, 128
"""Defaults of transformers' `QuantizedLayer`: numbers that share a scale and a zero point, and unquantised tokens."""


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """What one layer caches for one sequence."""

    numbers: int
    """Numbers per token, keys and values together; 0 for a layer that keeps only a state."""
    window: int | None
    """Maximum number of tokens that the layer keeps; None: all."""
    state: int
    """Bytes of a state that does not grow, such as that of a convolution or of linear attention."""

    def tokens(self, context: int) -> int:
        return context if self.window is None else min(context, self.window)


def layer_caches(model: Any) -> list[LayerCache]:
    """Return what every layer of a model caches; refuse a model that does not run on one token."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    run_one_token(model, type(model).__name__, past_key_values=cache)
    return [_layer(layer) for layer in cache.layers]


def _layer(layer: Any) -> LayerCache:
    kept = [x for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None]
    # An indexer's keys, or states of a recurrence, stand beside them, in lists or alone.
    names = ("conv_states", "recurrent_states")
    states = [x for name in names for x in (getattr(layer, name, None) or []) if isinstance(x, torch.Tensor)]
    return LayerCache(
        numbers=sum(x.shape[1] * x.shape[-1] for x in kept if x.ndim == 4),
        window=int(layer.sliding_window) if getattr(layer, "is_sliding", False) else None,
        state=sum(x.nbytes for x in states),
    )


def cache_bytes(layers: list[LayerCache], context: int, dtype: torch.dtype) -> dict[str, int | str]:
    """Return the bytes that each cache takes for one sequence of `context` tokens, or why it is not available.

    `offloaded` counts what stays on the device: transformers keeps two layers there, and those with a window.
    """
    context, width = whole("context", context), dtype.itemsize
    sizes = [layer.numbers * layer.tokens(context) * width + layer.state for layer in layers]
    full = [size for layer, size in zip(layers, sizes, strict=True) if layer.window is None]
    kept = [size for layer, size in zip(layers, sizes, strict=True) if layer.window is not None]
    found: dict[str, int | str] = {
        "dynamic": sum(sizes),
        "static": sum(sizes),
        "offloaded": sum(sorted(full)[-2:]) + sum(kept),
    }
    if any(layer.window is not None or layer.state or not layer.numbers for layer in layers):
        why = "not for this model: transformers quantises only full attention"
        return found | {"fp8": why, "4 bits": why, "2 bits": why}
    numbers = sum(layer.numbers for layer in layers)
    found["fp8"] = numbers * context
    for bits in (4, 2):
        rounded = max(0, context - RESIDUAL)
        scales = 2 * width / GROUP
        found[f"{bits} bits"] = int(numbers * (rounded * (bits / 8 + scales) + min(context, RESIDUAL) * width))
    return found


def told(found: dict[str, int | str], dtype: torch.dtype) -> str:
    """Return one line with the sizes of all caches."""
    parts = []
    for name, size in found.items():
        if isinstance(size, str):
            continue
        parts.append(f"{name} {_gib(size)}")
    refused = {size: [n for n, s in found.items() if s == size] for size in found.values() if isinstance(size, str)}
    parts += [f"{', '.join(names)} {why}" for why, names in refused.items()]
    return f"{'; '.join(parts)} (one sequence, {str(dtype).removeprefix('torch.')})"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
