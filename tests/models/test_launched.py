"""Processes that were launched together end one by one, without a crash."""

from __future__ import annotations

import sys

import pytest

from launched import launched_python

ENDING = """
import atexit, os, sys
from pathlib import Path
import torch.distributed as dist

def threads():
    return [name for file in Path("/proc/self/task").glob("*/comm") if "gloo" in (name := file.read_text().strip())]

atexit.register(lambda: print(len(threads()), file=sys.stderr))
from rpe3d.models.processes import processes
assert processes(cpu=True).process_index == processes(cpu=True).process_index
from transformers import AutoModelForCausalLM, GenerationMixin  # imports most of torch.distributed

class Trainer:
    def __init__(self):
        self.group, self.itself = dist.group.WORLD, self

trainer = Trainer()
del trainer
dist.all_gather_object([None, None], "a text")
assert threads()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are read from /proc")
def test_the_threads_of_gloo_end_before_python_does():
    """Otherwise a process may abort at its exit, in a thread that Python no longer serves (code -6)."""
    codes, said = launched_python(2, "-c", ENDING)
    assert codes == [0, 0], said
    assert [text.splitlines()[-1] for text in said] == ["0", "0"]
