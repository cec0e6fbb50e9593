"""Attention layers of a stock model, each to be called again on its own: what a law's layers are judged by."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tiny import CLOSE, LONG, logits, near


@dataclass
class Call:
    """One attention layer's part in a stock forward, to be called again on its own."""

    layer: int
    module: nn.Module
    given: dict[str, Any]
    output: Tensor
    rotary: nn.Module
    rotary_given: dict[str, Any]

    def again(self, **changes: Any) -> Tensor:
        self.rotary(**self.rotary_given)  # as in a forward: some families note their positions here
        bound = inspect.signature(self.module.forward).bind_partial()
        bound.arguments.update({k: v for k, v in self.given.items() if k in bound.signature.parameters})
        extra = {k: v for k, v in self.given.items() if k not in bound.signature.parameters}
        out = self.module(**{**bound.arguments, **extra, **changes})
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def masked(self) -> dict[str, Any]:
        """What a law's attention is given where nothing is padded: no mask, except for a layer's own window."""
        windowed = getattr(self.module, "sliding_window", None) is not None
        return {} if windowed or "attention_mask" not in self.given else {"attention_mask": None}

    def at(self, distances: Tensor) -> Tensor:
        """The stock layer, its keys placed at these distances before its last query: the oracle for that query."""
        positions = (distances.max() - distances)[None]
        given = {k: positions if _positions(v) else v for k, v in self.rotary_given.items()}
        return self.again(position_embeddings=self.rotary(**given))

    def unturned(self) -> bool:
        return near(self.at(torch.zeros(LONG)), self.output, CLOSE * float(self.output.abs().max()))


def _positions(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and value.shape[-1] == LONG


def _first(table: Any) -> Tensor | None:
    """Tell one table of cos and sin, or of complex numbers, from another."""
    found: Tensor | None = table[0] if isinstance(table, tuple) else table
    return found


def calls(model: nn.Module, ids: Tensor) -> list[Call]:
    """Every attention layer's arguments and output in one stock forward, with the rotary call that served it."""
    turns: list[tuple[nn.Module, dict[str, Any], Any]] = []
    calls: list[Call] = []

    def bound(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
        found = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        return {**found, **found.pop("kwargs", {})}

    def turned(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        turns.append((module, bound(module, args, kwargs), output))

    def attended(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = bound(module, args, kwargs)
        table = _first(given.get("position_embeddings"))
        for rotary, rotary_given, made in turns:
            if table is not None and _first(made) is table:
                first = output[0] if isinstance(output, tuple) else output
                calls.append(Call(module.layer_idx, module, given, first, rotary, rotary_given))

    hooks = []
    for module in model.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            hooks.append(module.register_forward_hook(turned, with_kwargs=True))
        elif hasattr(module, "layer_idx") and hasattr(module, "scaling"):
            hooks.append(module.register_forward_hook(attended, with_kwargs=True))
    try:
        logits(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return calls
