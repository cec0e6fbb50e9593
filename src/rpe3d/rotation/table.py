"""Tables of cos and sin for vectors that stock RoPE has turned and a law turns further."""

from __future__ import annotations

from collections import OrderedDict
from importlib.util import find_spec
from threading import Lock
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from rpe3d.geometry import Fade, Turn
from rpe3d.rotation import cos_sin

Places = tuple[range, ...]
"""Positions of tokens that follow one another: consecutive ones in each range."""
Table = tuple[Float[Tensor, "t l"], Float[Tensor, "t l"]]
KEPT = 2**26
"""Bytes of tables that are kept: those of 32768 tokens of 128 dimensions, forward and backward, take three quarters."""
_HAS_TRITON = find_spec("triton") is not None


def table(turn: Turn, positions: range, frequencies: Float64[Tensor, " l"], dtype: torch.dtype) -> Table:
    """Return cos and sin of θ_l (x(p) - p) + y(p): from where stock RoPE put a vector to where `turn` puts it."""
    if frequencies.is_cuda and dtype == torch.float32 and _HAS_TRITON and turn.in_numbers:
        from rpe3d.rotation import table_kernel

        return table_kernel.table(turn, positions, frequencies)
    return plain(turn, positions, frequencies, dtype)


def plain(turn: Turn, positions: range, frequencies: Float64[Tensor, " l"], dtype: torch.dtype) -> Table:
    """Compute what the kernel must equal; this takes twenty launches and the kernel one."""
    p = torch.arange(positions.start, positions.stop, device=frequencies.device)
    return cos_sin(turn.angle(p, frequencies, stock=True), dtype=dtype)


def positions_of(places: Places) -> Int[Tensor, " t"]:
    """Return all positions, on the host."""
    return torch.cat([torch.arange(run.start, run.stop, device="cpu") for run in places])


class Tables:
    """cos and sin of turns, and of turns that also sharpen, for the layers of a forward; the last KEPT bytes are kept.

    Each is for the stream that made it. A CUDA graph has its own: it would read a kept one when that may be gone.
    """

    def __init__(self) -> None:
        self.entries: OrderedDict[Any, tuple[Tensor, Table]] = OrderedDict()
        self.sharp: dict[Any, Tensor] = {}
        self.bytes = 0
        self.lock = Lock()

    def __call__(
        self,
        turn: Turn,
        fade: Fade | None,
        places: Places,
        frequencies: Float64[Tensor, " l"],
        dtype: torch.dtype,
    ) -> Table:
        stream = 0
        if frequencies.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return self._made(turn, fade, places, frequencies, dtype)
            stream = torch.cuda.current_stream(frequencies.device).cuda_stream
        key = (turn, fade, places, id(frequencies), dtype, stream)
        with self.lock:
            if (found := self.entries.pop(key, None)) is None:
                made = self._made(turn, fade, places, frequencies, dtype)
                found = (frequencies, made)  # with what the key names by its address
                self.bytes += sum(part.nbytes for part in made)
            self.entries[key] = found
            while self.bytes > KEPT:
                _, (_, old) = self.entries.popitem(last=False)
                self.bytes -= sum(part.nbytes for part in old)
        return found[1]

    def sharpness(self, fade: Fade, places: Places, device: torch.device, dtype: torch.dtype) -> Float[Tensor, " t"]:
        """Return `Fade.sharpness` of queries at these positions: one number each, so all of them are kept."""
        key = (fade, places, device, dtype)
        if key not in self.sharp:
            self.sharp[key] = fade.sharpness(positions_of(places)).to(device, dtype, non_blocking=True)
        return self.sharp[key]

    def _made(self, turn: Turn, fade: Fade | None, places: Places, frequencies: Tensor, dtype: torch.dtype) -> Table:
        parts = [table(turn, run, frequencies, dtype) for run in places]
        cos, sin = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
        if fade is None:
            return cos, sin
        sharp = self.sharpness(fade, places, frequencies.device, dtype)[:, None]
        return sharp * cos, sharp * sin
