"""Every kernel compiles for a GPU, also where there is none: Triton's interpreter takes what its compiler refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import rpe3d

MOST = 227 * 1024
"""Bytes of shared memory that a program may have on Hopper."""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_every_kernel_compiles_for_hopper():
    script = Path(__file__).with_name("compiling.py")
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: int(shared) for name, shared in map(str.split, done.stdout.splitlines())}
    sources = [path.read_text(encoding="utf-8") for path in Path(rpe3d.__file__).parent.rglob("*.py")]
    assert found.keys() == {name for text in sources for name in re.findall(r"Launcher\((_\w+)\)", text)}
    assert max(found.values()) <= MOST
