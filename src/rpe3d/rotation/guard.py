"""Which device a kernel is launched on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_STAY = nullcontext()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device. Changing it takes longer than a launch, so only where it differs."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _STAY
    return torch.cuda.device(device)
