"""A tiny model with a tokenizer of one token a byte."""

from __future__ import annotations

import pytest
import torch

import tiny_lm
from rpe3d.evaluate import Tokens


@pytest.fixture(autouse=True)
def _tiny(one_thread):
    """All tests here."""


@pytest.fixture
def model():
    return tiny_lm.model()


@pytest.fixture
def tokenizer():
    return tiny_lm.tokenizer()


@pytest.fixture
def texts():
    """Two texts of different lengths."""
    draw = torch.Generator().manual_seed(1)
    return [Tokens(name=name, ids=torch.randint(1, 257, (n,), generator=draw)) for name, n in (("a", 1000), ("b", 700))]
