"""Recognise and survive out-of-memory errors of any library."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
# In the words of the CUDA driver and Triton, of cuBLAS and cuDNN, of torch's allocator on the CPU, and of cuDNN's
# attention, which says no more than that it did not run.
WORDS = ("out of memory", "status_alloc_failed", "can't allocate memory", "mha_graph.execute")


def out_of_memory(error: Exception) -> bool:
    """Return whether `error` means that memory ran out. Only torch's GPU allocator has a type for it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)


def within_memory(work: Callable[[], T]) -> T | None:
    """Return the result of `work`, or None if memory ran out; the memory is then free again."""
    try:
        return work()
    except Exception as error:
        if not out_of_memory(error):
            raise  # else the traceback holds tensors until here
    gc.collect()
    torch.cuda.empty_cache()
    return None
