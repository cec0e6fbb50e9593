"""Count the devices of this machine without starting CUDA in this process.

`torch.cuda.is_available()` calls cudaGetDeviceCount, after which a forked child cannot use CUDA: vLLM, which forks,
then stops with "Cannot re-initialize CUDA in forked subprocess". `torch.cuda.device_count()` asks NVML instead, and the
CUDA runtime only if NVML does not answer (PyTorch's notes on multiprocessing, "Poison fork in multiprocessing").
"""

from __future__ import annotations

from typing import Any

import torch


def device_count(kind: str) -> int:
    """Return the number of devices of a kind (`cpu`, `cuda`, `mps`, `xpu`, ...) that this torch can use here."""
    module: Any = getattr(torch, kind, None)
    count = getattr(module, "device_count", None)  # torch.meta, say, does not exist
    return int(count()) if callable(count) else 0


def has_cuda() -> bool:
    """Return whether this machine has a GPU that CUDA or ROCm can use."""
    return device_count("cuda") > 0


def present(place: torch.device) -> bool:
    """Return whether this machine has the device that `place` names."""
    return (place.index or 0) < device_count(place.type)
