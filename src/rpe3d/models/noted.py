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
    """Note the positions of a forward: a hook on the modules that make cos and sin."""
    given = positions_given(module, args, kwargs)
    _noted.made = (module.config, _one_row(given) if given is not None and given.ndim == 3 else given)


def _one_row(positions: Tensor) -> Tensor:
    """Return the positions that three rows agree on; refuse a picture's. In a graph, which cannot refuse: none."""
    row = positions[0]
    if positions.stride(0) == 0 or len(positions) == 1:
        return row
    same = (positions == row).all()
    if torch.compiler.is_compiling() or (positions.is_cuda and torch.cuda.is_current_stream_capturing()):
        return torch.where(same, row, -1)
    if not same:
        raise ConfigError(
            "pictures stand on a plane, and a law places tokens on one line",
            "give text alone, or call rpe3d.restore(model) for the stock model",
        )
    return row


def positions(config: Any, given: Tensor | None) -> Tensor:
    """Return the positions that were noted in this forward of a model; refuse where none were.

    `given` is what attention was handed, if anything. Where checkpointing runs a layer again, it is handed the same
    tensor, and what belongs to that is known.
    """
    tracing = torch.compiler.is_compiling()
    made = getattr(_noted, "made", None)
    if not tracing and torch._C._current_graph_task_id() != -1:  # within a backward pass
        made = None if given is None else (config, _told.get(given))
    if made is None or made[0] is not config or made[1] is None:
        raise ConfigError(
            "this model passes no position ids to its attention, and they are not known while layers run again",
            "train it without gradient checkpointing",
        )
    found: Tensor = made[1]
    if given is not None and torch.is_grad_enabled() and not tracing:
        _told[given] = found
    return found


def watch(rotaries: Any) -> None:
    """Note positions in these modules from now on. Safe to call again."""
    unwatch(rotaries)
    for rotary in rotaries:
        rotary.register_forward_pre_hook(note, with_kwargs=True)


def is_watched(rotary: Any) -> bool:
    """Say whether positions are noted in a rotary module."""
    return any(hook is note for hook in rotary._forward_pre_hooks.values())


def unwatch(rotaries: Any) -> None:
    """Note nothing in these modules any more."""
    for rotary in rotaries:
        hooks = rotary._forward_pre_hooks
        for number in [number for number, hook in hooks.items() if hook is note]:
            del hooks[number]
            rotary._forward_pre_hooks_with_kwargs.pop(number, None)
