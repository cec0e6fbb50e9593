"""Launch Triton kernels on the right device, with little host time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """A Triton kernel that remembers what Triton compiled for it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.interpreted = not isinstance(kernel, triton.JITFunction)
        self._compiled: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}

    def __call__(self, *launch: Any) -> None:
        """Bind and launch at once."""
        self.bind(*launch)()

    def bind(
        self,
        device: torch.device,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> Bound:
        """Return a launch whose first arguments are supplied later, any number of times."""
        key = (device.index, *constants.values(), *options.values(), *map(_kind, arguments))
        compiled = self._compiled.setdefault(key, {})
        return Bound(self, compiled, device, grid, tuple(arguments), constants, options)

    def series(
        self,
        device: torch.device,
        before: Sequence[Any],
        after: Sequence[Any],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> Series:
        """Return launches in the current stream that differ in their grid and in integers between these arguments.

        Triton compiles once for all of them: integers have 32 bits, and those it specializes are multiples of 16.
        """
        return Series(self, device, tuple(before), tuple(after), constants, options)


class Bound:
    """The result of `Launcher.bind`."""

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
        self.rest = (*_addresses(arguments), *constants.values())
        self.ready: dict[tuple[Any, ...], Any] = {}
        """What was compiled, on this grid."""

    def __call__(self, *first: Any) -> None:
        """Launch with these arguments before the bound ones."""
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


class Series:
    """The result of `Launcher.series`: its first launch is one of `bind`, whose compiled kernel serves all others."""

    def __init__(
        self,
        launcher: Launcher,
        device: torch.device,
        before: tuple[Any, ...],
        after: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self.launcher, self.device, self.constants, self.options = launcher, device, constants, options
        self.before, self.after, self.place = before, after, on(device)
        self.rest = (*_addresses(after), *constants.values())
        self.run: Callable[..., None] | None = None
        self.begin: tuple[Any, ...] = ()
        """What follows the grid in a launch."""
        self.specialized: tuple[int, ...] = ()
        """Which of the integers Triton looks at when it compiles."""

    def __call__(self, grid: tuple[int, int, int], *changing: int) -> None:
        """Launch on a grid, with these integers between the arguments that stay."""
        if self.run is None:
            self._begin(grid, changing)
            return
        if max(changing) >> 31 or any(changing[i] & 15 for i in self.specialized):
            raise ValueError(f"Triton would compile anew for one of {changing}: of 32 bits, or a multiple of 16")
        with self.place:
            self.run(*grid, *self.begin, *changing, *self.rest)

    def _begin(self, grid: tuple[int, int, int], changing: tuple[int, ...]) -> None:
        """Launch as `bind` does. What it compiled serves others, unless it is for these integers alone."""
        bound = self.launcher.bind(
            self.device, grid, (*self.before, *changing, *self.after), self.constants, self.options
        )
        bound()
        compiled = bound.compiled.get(())
        if compiled is None or not _direct(compiled):
            return
        given = self.launcher.kernel.params[len(self.before) :][: len(changing)]
        self.specialized = tuple(i for i, one in enumerate(given) if not one.do_not_specialize)
        if not max(changing) >> 31 and not any(changing[i] & 15 for i in self.specialized):
            stream = driver.active.get_current_stream(self.device.index)
            self.run, self.begin = compiled.run, (stream, *_fixed(compiled), *_addresses(self.before))


def _addresses(arguments: tuple[Any, ...]) -> Iterator[Any]:
    """Yield addresses in the place of tensors, which spare every launch two questions per tensor; they must be kept."""
    return (x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)


def _direct(compiled: Any) -> bool:
    """Say whether a compiled kernel has no hooks to call, as profilers have them: then it can be run straight away."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return isinstance(compiled, CompiledKernel) and not any(getattr(hook, "calls", hook) for hook in hooks)


def _fixed(compiled: Any) -> tuple[Any, ...]:
    """Return what `CompiledKernel.run` takes between the stream and the arguments of a kernel without hooks."""
    return compiled.function, compiled.packed_metadata, None, None, None


def _runner(compiled: Any, grid: tuple[int, int, int], device: torch.device) -> Callable[..., None]:
    """Return what launches a compiled kernel: `compiled[grid]`, less what it does for hooks where there are none.

    torch's own compiler launches kernels in this way.
    """
    if not _direct(compiled):
        plain: Callable[..., None] = compiled[grid]
        return plain
    run, index = compiled.run, device.index
    stream_of, fixed = driver.active.get_current_stream, _fixed(compiled)

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
