"""Where tokens stand, for models whose attention is not told: noted where their cos and sin are made.

Some families hand position ids to the module that makes cos and sin, and not to their attention. A hook on that module
notes them for the layers that follow. Models of pictures and text have three rows of positions (time, height, width),
of which a text's are the same: anything else is refused, since a law places tokens on one line.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from rpe3d.config import ConfigError

_noted = threading.local()
_told = WeakTensorKeyDictionary()
"""What was noted, by the positions that attention was handed: while these live, layers may run again."""


def positions_given(module: nn.Module, args: Any, kwargs: Any) -> Tensor | None:
    """Return the position ids among the arguments of a module's forward."""
    if "position_ids" not in kwargs and args:
        names = list(inspect.signature(module.forward).parameters)
        kwargs = dict(zip(names, args, strict=False))
    given = kwargs.get("position_ids")
    return given if isinstance(given, Tensor) else None


def note(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Note the positions of a forward pass: a hook on the modules that compute cos and sin."""
    given = positions_given(module, args, kwargs)
    _noted.made = (module.config, _one_row(given) if given is not None and given.ndim == 3 else given)


def _one_row(positions: Tensor) -> Tensor:
    """Return the positions that three rows agree on; refuse an image's (in a graph, which cannot refuse, return -1)."""
    row = positions[0]
    if positions.stride(0) == 0 or len(positions) == 1:
        return row
    same = (positions == row).all()
    if torch.compiler.is_compiling() or (positions.is_cuda and torch.cuda.is_current_stream_capturing()):
        return torch.where(same, row, -1)
    if not same:
        raise ConfigError(
            "images have two-dimensional positions, but a law places tokens on one line",
            "pass only text, or call rpe3d.restore(model) for the stock model",
        )
    return row


def positions(config: Any, given: Tensor | None) -> Tensor:
    """Return the positions that were noted in this forward pass of a model; refuse if there are none.

    `given` is what attention was passed, if anything. When checkpointing recomputes a layer, it passes the same tensor,
    whose positions are known.
    """
    tracing = torch.compiler.is_compiling()
    made = getattr(_noted, "made", None)
    if not tracing and torch._C._current_graph_task_id() != -1:  # within a backward pass
        made = None if given is None else (config, _told.get(given))
    if made is None or made[0] is not config or made[1] is None:
        raise ConfigError(
            "this model passes no position ids to its attention, and they are unknown while layers are recomputed",
            "train it without gradient checkpointing",
        )
    found: Tensor = made[1]
    if given is not None and torch.is_grad_enabled() and not tracing:
        _told[given] = found
    return found


def watch(rotaries: Any) -> None:
    """Note positions in these modules from now on. May be called repeatedly."""
    unwatch(rotaries)
    for rotary in rotaries:
        rotary.register_forward_pre_hook(note, with_kwargs=True)


def is_watched(rotary: Any) -> bool:
    """Return whether positions are noted in a rotary module."""
    return any(hook is note for hook in rotary._forward_pre_hooks.values())


def unwatch(rotaries: Any) -> None:
    """Stop noting positions in these modules."""
    for rotary in rotaries:
        hooks = rotary._forward_pre_hooks
        for number in [number for number, hook in hooks.items() if hook is note]:
            del hooks[number]
            rotary._forward_pre_hooks_with_kwargs.pop(number, None)
