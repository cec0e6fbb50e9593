"""STRING (An et al. 2024, arXiv 2410.18745): f = d below S, and d - S + W from there on, at every length.

Positions that training saw often replace the last third, which it saw rarely: so the law also helps within the
pretrained length. Beyond 2 L_p - W tokens either S - 1 or L - 1 - S + W is an unseen position: nothing is published for
longer texts, and there the law behaves like stock RoPE.

Two departures. The published code has S = int(0.33 L_p), W = 128 and an `attention_factor` of 0.1 ln 2 + 1 = 1.0693,
which also changes short prompts and is therefore left to the user. In a prompt it counts pairs at distance S twice, as
S and as W; here they are counted once, as W, as that code does in decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rpe3d.config import real, whole
from rpe3d.drawing.palette import BROWN, DASHED, Style
from rpe3d.geometry.law import Law, parameter
from rpe3d.geometry.region import Region, Turn


@dataclass(frozen=True, kw_only=True)
class String(Law):
    """Shift far pairs down to positions that training saw more often; keys stay as stock RoPE rotates them."""

    name: ClassVar[str] = "string"
    summary: ClassVar[str] = "STRING: exact up to a distance, farther pairs shifted down to positions seen more often"
    style: ClassVar[Style] = Style(BROWN, DASHED)

    shift: int = parameter(
        None, "distances below this are exact RoPE, S; default context - 0.67 L_p, or half of the context if less"
    )
    local: int = parameter(None, "position shown for distance S, W; default 128, or pretrained / 16 if that is less")
    attention_factor: float = parameter(1.0, "multiplies cos and sin; the published code uses 1.0693")

    def check(self) -> dict[str, Any]:
        longest, context = self.pretrained, self.context
        local = min(128, longest // 16) if self.local is None else self.local
        local = whole("local", local, least=0, most=longest - 1)
        # As many positions are dropped as at the pretrained length, until the near pairs would show more than the far.
        dropped = max(1, 33 * longest // 100, local)
        default = min(dropped + context - longest, (context + local + 1) // 2)
        shift = default if self.shift is None else whole("shift", self.shift, least=max(1, local))
        factor = real("attention_factor", self.attention_factor, above=True, most=1e9)
        return {"shift": shift, "local": local, "attention_factor": factor}

    @property
    def regions(self) -> tuple[Region, ...]:
        far_query = Turn(start=float(self.local - self.shift))
        return (Region(last=self.shift - 1), Region(first=self.shift, query=far_query))

    @property
    def attention_scaling(self) -> float:
        return super().attention_scaling * self.attention_factor
