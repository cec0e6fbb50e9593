"""StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): the last tokens and the first few; the rest is not attended to.

Positions are counted inside the cache, so the first tokens always come right before the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rpe3d.config import LONGEST, ConfigError, whole
from rpe3d.drawing.palette import DASHED, GREY, Style
from rpe3d.geometry.law import parameter
from rpe3d.geometry.region import Region, Turn
from rpe3d.geometry.windowed import Windowed


@dataclass(frozen=True, kw_only=True)
class StreamingLlm(Windowed):
    """See the last tokens and the first few (sinks), and leave out the rest."""

    name: ClassVar[str] = "streaming-llm"
    summary: ClassVar[str] = "StreamingLLM: the last tokens and the first few (sinks), nothing between"
    style: ClassVar[Style] = Style(GREY, DASHED)

    window: int = parameter(None, "last tokens that are seen; default pretrained / 2 - sinks")
    sinks: int = parameter(None, "first tokens that are always seen; default 4")

    def check(self) -> dict[str, Any]:
        sinks = min(4, self.pretrained - 1) if self.sinks is None else self.sinks
        sinks = whole("sinks", sinks, least=0, most=self.pretrained - 1)
        window = max(1, self.pretrained // 2 - sinks) if self.window is None else whole("window", self.window)
        if window + sinks > self.pretrained:
            raise ConfigError(
                f"window {window} and {sinks} sinks are more than the pretrained length {self.pretrained}",
                "lower window or sinks",
            )
        return {"sinks": sinks, "window": window}

    @property
    def regions(self) -> tuple[Region, ...]:
        if not self.sinks:
            return (self.near,)
        far_query = Turn(chunk=LONGEST, offset=1.0, ceiling=float(self.sinks + self.window - 1))
        return (self.near, Region(first=self.window, keys=self.sinks, query=far_query))

    @property
    def endless(self) -> bool:
        return True
