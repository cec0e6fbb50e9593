"""What the GPU has free, without starting CUDA."""

from __future__ import annotations

import subprocess

ASK = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")


def free_memory() -> float:
    """Return the GiB of the first GPU that are free; infinity where there is none to ask."""
    try:
        return float(subprocess.run(ASK, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return float("inf")
