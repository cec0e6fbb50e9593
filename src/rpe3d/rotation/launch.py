"""Launching Triton kernels: on the right device, and with little of the host's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

_STAY = nullcontext()


class Launcher:
    """A Triton kernel that remembers what Triton compiled of it.

    Triton examines every argument of every launch, which takes longer than most of our kernels run. Here a launch like
    an earlier one goes straight to what was compiled for that.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.interpreted = not isinstance(kernel, triton.JITFunction)
        self._compiled: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}

    def __call__(self, *launch: Any) -> None:
        """Bind, and launch at once."""
        self.bind(*launch)()

    def bind(
        self,
        device: torch.device,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> Bound:
        """Return a launch whose first arguments are still to come, and may come many times.

        Arguments come first in the kernel's signature, then its constants, in the order given here.
        """
        key = (device.index, *constants.values(), *options.values(), *map(_kind, arguments))
        compiled = self._compiled.setdefault(key, {})
        return Bound(self, compiled, device, grid, tuple(arguments), constants, options)


class Bound:
    """What `Launcher.bind` returns."""

    def __init__(
        self,
        launcher: Launcher,
        compiled: dict[tuple[Any, ...], Any],
        device: torch.device,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self.launcher, self.compiled, self.device, self.grid = launcher, compiled, device, grid
        self.arguments, self.constants, self.options = arguments, constants, options
        # Addresses, which spare every launch two questions per tensor; `arguments` keeps the tensors.
        self.rest = (*(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments), *constants.values())
        self.ready: dict[tuple[Any, ...], Any] = {}
        """What was compiled, on this grid."""

    def __call__(self, *first: Any) -> None:
        """Launch with these in front of the other arguments."""
        kinds = tuple(map(_kind, first))
        with on(self.device):
            run = self.ready.get(kinds)
            if run is None and (compiled := self.compiled.get(kinds)) is not None:
                run = self.ready[kinds] = _runner(compiled, self.grid, self.device)
            if run is not None:
                run(*first, *self.rest)
                return
            kernel = self.launcher.kernel[self.grid]
            compiled = kernel(*first, *self.arguments, **self.constants, **self.options)
            if not self.launcher.interpreted:
                self.compiled[kinds] = compiled


def _runner(compiled: Any, grid: tuple[int, int, int], device: torch.device) -> Callable[..., None]:
    """Return what launches a compiled kernel: `compiled[grid]`, less what it does for hooks where there are none.

    torch's own compiler launches kernels in this way; profilers are what hooks are for.
    """
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    if not isinstance(compiled, CompiledKernel) or any(getattr(hook, "calls", hook) for hook in hooks):
        plain: Callable[..., None] = compiled[grid]
        return plain
    run, index = compiled.run, device.index
    stream_of, fixed = driver.active.get_current_stream, (compiled.function, compiled.packed_metadata, None, None, None)

    def launch(*arguments: Any) -> None:
        run(*grid, stream_of(index), *fixed, *arguments)

    return launch


def _kind(argument: Any) -> Any:
    """Return what Triton compiles for in an argument: a tensor's dtype and alignment, an integer's 1, 16 and width."""
    kind = type(argument)
    if kind is int:
        return argument == 1, argument & 15 == 0, argument >> 31
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15 == 0
    return tuple(map(_kind, argument)) if kind is tuple else kind


def on(device: torch.device) -> AbstractContextManager[object]:
    """Set the current device, on which Triton launches. It takes longer than a launch, so only where it differs."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _STAY
    return torch.cuda.device(device)
