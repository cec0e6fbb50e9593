"""Tiny models of real families, with weights large enough that positions matter."""

from __future__ import annotations

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
