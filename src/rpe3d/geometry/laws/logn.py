"""Log-n scaling (Su 2021, kexue.fm/archives/8823) as in Qwen-7B: scores of a query at p > L_p times ln p / ln L_p.

A softmax over all keys of a row ignores a loss that they share, so a `Fade` of all keys with focus 1 is this scaling.
Two departures: Qwen-7B has ln(p + 1) at position p, which is reached one token later here; and in a model with its own
attention sinks, unlike Qwen-7B, the keys of a sharper query weigh less relative to the sink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rpe3d.drawing.palette import DASHED, INK, Style
from rpe3d.geometry.laws.rope import Rope
from rpe3d.geometry.region import Fade, Region


@dataclass(frozen=True, kw_only=True)
class LogN(Rope):
    """Sharpen the attention of queries beyond the pretrained length; positions are those of plain RoPE."""

    name: ClassVar[str] = "logn"
    summary: ClassVar[str] = "log-n scaling (Qwen-7B): plain RoPE, with sharper queries beyond the pretrained length"
    style: ClassVar[Style] = Style(INK, DASHED)
    needs_attention: ClassVar[bool] = True

    @property
    def regions(self) -> tuple[Region, ...]:
        return (Region(fade=Fade(rate=0.0, focus=1.0, span=float(self.pretrained))),)

    @property
    def exact_up_to(self) -> float:
        return float(self.pretrained)
