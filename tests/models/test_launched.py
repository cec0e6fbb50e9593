"""Processes that were launched together end one by one, without a crash."""

from __future__ import annotations

from launched import launched_python

ENDING = """
import atexit, sys
import torch.distributed as dist
atexit.register(lambda: print("alive" if dist.is_initialized() else "ended", file=sys.stderr))
from rpe3d.models.processes import processes
assert processes(cpu=True).process_index == processes(cpu=True).process_index
dist.all_gather_object([None, None], "a text")
"""


def test_the_threads_of_gloo_end_before_python_does():
    """Otherwise about one process in 25 aborts at its exit, in a thread that Python no longer serves (code -6)."""
    codes, said = launched_python(2, "-c", ENDING)
    assert codes == [0, 0], said
    assert [text.splitlines()[-1] for text in said] == ["ended", "ended"]
