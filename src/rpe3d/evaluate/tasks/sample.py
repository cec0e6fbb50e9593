"""One question of a suite, ready for any generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What the model is asked, how much it may say, and what is stored with its prediction."""

    prompts: tuple[str, ...]
    """Usually one prompt; L-Eval's sci_fi asks a second time, without the document."""
    max_new: int
    gold: Mapping[str, Any]
    line_only: bool = False
    """Whether the first line break after at least one token ends the answer."""
    choices: tuple[str, ...] = ()
    """Complete answers, of which the likeliest is taken instead of a generated one."""
