"""Find out whether vLLM can fork its engine: a child of a process that has started CUDA cannot use it.

vLLM asks torch, which does not know of every start. On an H200, a program that had extended a model on the CPU could no
longer fork a child that uses CUDA ("CUDA error: initialization error"), while torch said that nothing was initialized.
The call is probably `torch.cuda.is_current_stream_capturing()`, which transformers makes in each forward pass.
"""

from __future__ import annotations

import ctypes
import os

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def driver_started() -> bool:
    """Return whether the CUDA driver has been started in this process, without starting it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # not loaded, so not started
        return False
    return int(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p()))) != NOT_INITIALIZED


def avoid_fork() -> None:
    """Make vLLM spawn its processes if a fork could not use CUDA, as it does by itself if torch knows."""
    if os.environ.get(METHOD) == "spawn" or not driver_started():
        return
    from vllm.logger import init_logger

    os.environ[METHOD] = "spawn"
    init_logger("vllm.plugins.rpe3d").warning(
        "the CUDA driver has been started in this process, so engines are spawned instead of forked: "
        "a script needs `if __name__ == '__main__':` around the code that starts them."
    )
