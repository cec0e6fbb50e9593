"""Launching Triton kernels: on the right device, and with little of the host's time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

_STAY = nullcontext()


class Launcher:
    """A Triton kernel that remembers what Triton compiled of it.

    Triton examines every argument of every launch, which takes longer than most of our kernels run. Here a launch like
    an earlier one goes straight to what was compiled for that.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.interpreted = not isinstance(kernel, triton.JITFunction)
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        device: torch.device,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        """Launch. Arguments come first in the kernel's signature, then its constants, in the order given here."""
        with on(device):
            key = (device.index, *constants.values(), *options.values(), *map(_kind, arguments))
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self.kernel[grid](*arguments, **constants, **options)
                if not self.interpreted:
                    self._compiled[key] = compiled
            else:
                compiled[grid](*arguments, *constants.values())


def _kind(argument: Any) -> Any:
    """All that Triton compiles for in an argument: of a tensor dtype and alignment; of an integer 1, 16 and width."""
    kind = type(argument)
    if kind is int:
        return argument == 1, argument & 15 == 0, argument >> 31
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15 == 0
    return tuple(map(_kind, argument)) if kind is tuple else kind


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device. Changing it takes longer than a launch, so only where it differs."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _STAY
    return torch.cuda.device(device)
