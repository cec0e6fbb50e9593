"""Memory that runs out, however it is said."""

from __future__ import annotations

import torch

# In the words of the CUDA driver and Triton, of cuBLAS and cuDNN, of torch's allocator on the CPU, and of cuDNN's
# attention, which says no more than that it did not run.
WORDS = ("out of memory", "status_alloc_failed", "can't allocate memory", "mha_graph.execute")


def out_of_memory(error: Exception) -> bool:
    """Whether `error` says that memory ran out. Only torch's allocator on the GPU has a type for it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)
