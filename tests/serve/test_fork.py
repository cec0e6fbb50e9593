"""The plugin starts no CUDA: vLLM forks its engine, and a child of a process that has started CUDA cannot use it.

vLLM takes `spawn` by itself where torch says that CUDA is initialized; a call that counts devices by the CUDA runtime
poisons a fork and leaves torch saying that it is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-serve` has it")

PROGRAM = """
import sys
import torch
from vllm import LLM  # what vLLM and its packages ask is theirs: vLLM has torch count GPUs by NVML
import vllm.model_executor.layers.rotary_embedding.base, vllm.v1.attention.selector
import vllm.v1.attention.backends.flash_attn, vllm.v1.attention.backends.registry

calls = []

def forbid(place, name):
    def called(*arguments, **named):
        calls.append(name)
        raise AssertionError(f"{name} starts CUDA")
    if hasattr(place, name):
        setattr(place, name, called)

for name in ("_lazy_init", "init", "get_device_capability", "get_device_properties", "get_device_name", "is_available",
             "current_device", "synchronize", "mem_get_info", "current_stream", "is_bf16_supported"):
    forbid(torch.cuda, name)
for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice", "_cuda_getCurrentRawStream"):
    forbid(torch._C, name)
forbid(torch.accelerator, "is_available")

import rpe3d
from rpe3d.serve import launch, metrics, plugin
from rpe3d.models import devices

EXTRA
plugin.register()
plugin.register()
launch.prepare(sys.argv[1], "3d-rpe", 512, {})
devices.has_cuda()
import rpe3d.attention.decode.paged, rpe3d.attention.chosen
assert calls == [], calls
assert not torch.cuda.is_initialized()
print("nothing was started")
"""


def run(folder, extra=""):
    environment = os.environ | {metrics_variable(): '{"law": "3d-rpe"}'}
    line = [sys.executable, "-W", "ignore", "-c", PROGRAM.replace("EXTRA", extra), str(folder)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)


def metrics_variable():
    from rpe3d.serve.metrics import VARIABLE

    return VARIABLE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from engines import model

    made = tmp_path_factory.mktemp("forked")
    model().save_pretrained(made)
    return made


def test_registering_the_plugin_starts_no_cuda(folder):
    done = run(folder)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "nothing was started"


def test_a_call_that_starts_cuda_would_be_seen(folder):
    done = run(folder, "torch.cuda.is_available()")
    assert done.returncode != 0
    assert "is_available starts CUDA" in done.stderr


@pytest.mark.parametrize(("answer", "method"), [(0, "spawn"), (3, None), (201, "spawn"), (None, None)])
def test_engines_are_spawned_where_the_driver_has_been_started(monkeypatch, answer, method):
    """By what the driver says of its context, not torch: 3 is CUDA_ERROR_NOT_INITIALIZED; None: it is not loaded."""
    from rpe3d.serve import fork

    def library(name, mode):
        assert mode & os.RTLD_NOLOAD, "loading a driver that is not there is no answer"
        if answer is None:
            raise OSError(name)
        return SimpleNamespace(cuCtxGetCurrent=lambda context: answer)

    monkeypatch.setattr(fork.ctypes, "CDLL", library)
    monkeypatch.delenv(fork.METHOD, raising=False)
    fork.avoid_fork()
    assert os.environ.get(fork.METHOD) == method
