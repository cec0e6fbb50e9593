"""Keep the summaries of a cache's blocks from one decoding step to the next.

A block's summary never changes, so a step need not read the keys of every block again. But a cache can be cropped,
reordered, refilled or belong to another text, without notice. So each summary is kept with a fingerprint of the keys it
was made from: sums of the bits of PRINTED numbers of each, and of the first keys, whose mean is subtracted in all
summaries. A step takes the fingerprints again and remakes the summaries that no longer fit. Nothing has to be
invalidated.
"""

from __future__ import annotations

from typing import Protocol, TypeGuard

import torch
from jaxtyping import BFloat16, Float32, Int64
from torch import Tensor

from rpe3d.geometry import Law

PRINTED = 8


class Memory:
    """The summaries of one layer's cache; room for those of any, which it makes as it needs it."""

    def __init__(self) -> None:
        self.kind: tuple[object, ...] = ()
        self.captured: dict[int, tuple[Tensor, ...]] = {}
        """Tensors that a CUDA graph writes to whenever it is replayed: they live as long as this does."""
        self.summaries: BFloat16[Tensor, "b g m d"]
        self.prints: Int64[Tensor, "b g m"]
        self.centre: Float32[Tensor, "b g d"]
        self.centre_print: Int64[Tensor, "b g"]

    def prepare(self, law: Law, k: Tensor, blocks: int) -> None:
        """Have room for so many blocks of these keys under a law; what is kept of others of that shape stays."""
        b, g, _, d = k.shape
        stream = torch.cuda.current_stream(k.device).cuda_stream if k.is_cuda else 0
        kind = (law.json, b, g, d, k.dtype, k.device, stream)
        if kind != self.kind or blocks > self.summaries.shape[2]:
            self._make(kind, k, blocks)
        if capturing(k):
            self.captured[self.summaries.data_ptr()] = self._tensors

    def _make(self, kind: tuple[object, ...], k: Tensor, blocks: int) -> None:
        b, g, _, d = k.shape
        room = 1 << max(5, (blocks - 1).bit_length())
        self.kind = kind
        self.summaries = torch.empty(b, g, room, d, dtype=torch.bfloat16, device=k.device)
        self.prints = torch.full((b, g, room), -1, dtype=torch.int64, device=k.device)
        self.centre = torch.empty(b, g, d, dtype=torch.float32, device=k.device)
        self.centre_print = torch.full((b, g), -1, dtype=torch.int64, device=k.device)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return self.summaries, self.prints, self.centre, self.centre_print

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of this memory."""
        return sum(x.nbytes for x in self._tensors) if self.kind else 0


def capturing(x: Tensor) -> bool:
    """Return whether launches for a tensor go into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class Remembers(Protocol):
    """A prepared problem that takes the memory of the cache its keys come from."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, memory: Memory | None = None
    ) -> tuple[Tensor, Tensor]: ...


def remembers(prepared: object) -> TypeGuard[Remembers]:
    """Return whether a prepared problem takes a memory.

    To check a protocol would take as much host time as a launch, in every layer.
    """
    return getattr(prepared, "remembers", False)
