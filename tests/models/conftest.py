"""Tiny models of real families, with weights large enough that positions matter."""

from __future__ import annotations

import sys

import pytest
import torch
from checkpoints import cache, folder, gguf, llama  # noqa: F401  fixtures

from tiny_models import make


@pytest.fixture
def tiny():
    return make


@pytest.fixture
def ids():
    return torch.randint(3, 97, (1, 120), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _compiled_anew():
    """Graphs of earlier tests do not count against torch's limit of recompilations."""
    yield
    if compiler := sys.modules.get("torch._dynamo"):
        compiler.reset()
