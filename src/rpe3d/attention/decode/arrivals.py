"""Zeros for kernels whose programs count each other in memory, and leave the zeros as they found them."""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor

from rpe3d.geometry.law import apart

_SIZE = 2**18  # 1 MiB
_ROUND = 32  # counters of two launches share no cache line
_pools: dict[torch.device, _Pool] = {}


class _Pool:
    """A device's counters. Launches in one stream run one after the other, and so share theirs."""

    def __init__(self, device: torch.device) -> None:
        self.counters: Tensor = apart(lambda: torch.zeros(_SIZE, dtype=torch.int32, device=device))
        self.used = 0
        self.by_stream: dict[tuple[int, int], Tensor] = {}

    def take(self, n: int) -> Tensor | None:
        """Return n counters that nobody else has, while there are any."""
        start, self.used = self.used, self.used + -(-n // _ROUND) * _ROUND
        return self.counters[start : start + n] if self.used <= _SIZE else None


def zeros(n: int, device: torch.device) -> Int32[Tensor, " n"]:
    """Return n zeros, which the kernel about to be launched in the current stream may use and has to leave zero.

    A launch that is captured in a CUDA graph gets counters of its own, since graphs may run side by side. Zeros made
    for the occasion would cost a second launch; they are the last resort.
    """
    if device.type != "cuda":
        return torch.zeros(n, dtype=torch.int32, device=device)
    capturing = torch.cuda.is_current_stream_capturing()
    pool = _pools.get(device)
    if pool is None and not capturing:
        pool = _pools[device] = _Pool(device)
    found = None
    if pool is not None and capturing:
        found = pool.take(n)
    elif pool is not None:
        key = (torch.cuda.current_stream(device).cuda_stream, n)
        found = pool.by_stream.get(key)
        if found is None and (found := pool.take(n)) is not None:
            pool.by_stream[key] = found
    return torch.zeros(n, dtype=torch.int32, device=device) if found is None else found
