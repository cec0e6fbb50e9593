"""The processes started by `accelerate launch` or torchrun, and their clean exit."""

from __future__ import annotations

import atexit
import gc
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PATIENCE = timedelta(hours=2)
"""How long processes wait for each other, as all do while one saves a large model; NCCL's own limit is ten minutes."""


def processes(*, cpu: bool) -> Any:
    """Return accelerate's state for this process among those launched; None for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    import torch.distributed.nn.functional  # noqa: F401 - its functions keep the group that exists at this import
    from accelerate import PartialState

    state = PartialState(cpu=cpu, timeout=PATIENCE)
    atexit.unregister(_part)
    atexit.register(_part)
    return state


def _part() -> None:
    """Join gloo's threads while Python can still serve them.

    A thread of gloo takes the GIL to release the tensors of a finished call. If Python is shutting down by then, the
    thread is unwound through a destructor and the process aborts ("terminate called without an active exception"):
    about once in 25 exits. The threads end with the last reference to the group, and a trainer that has not been
    collected yet holds one. (FSDP on CPUs keeps the threads: DTensor's caches hold the group.) NCCL has no such
    threads, and its groups may only be destroyed by all processes together.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
        gc.collect()
