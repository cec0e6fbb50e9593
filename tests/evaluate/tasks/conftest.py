"""What the suites' tests share: chats with tokenizers of one token a byte or a word, and the benchmarks' data."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiny_lm
from rpe3d.evaluate.tasks.chat import Chat


class Words:
    """A tokenizer of one token a word, which is all that RULER asks of it."""

    chat_template = None
    bos_token_id = None

    def __call__(self, text, **_):
        return SimpleNamespace(input_ids=text.split() or [""])


@pytest.fixture
def words():
    return Chat(tokenizer=Words(), form="none")


@pytest.fixture
def chat():
    """Bytes, with BOS, in Llama 2's form."""
    return Chat(tokenizer=tiny_lm.tokenizer(bos=True), form="llama2")


@pytest.fixture(scope="session")
def benchmarks():
    """The folder with LongBench, L-Eval and golden predictions, which are not ours to ship: RPE3D_DATA, or one beside
    the checkout."""
    folder = Path(os.environ.get("RPE3D_DATA") or Path(__file__).parents[4] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("RPE3D_DATA names no folder with the benchmarks' data (longbench/, leval/, golden/)")
    return folder
