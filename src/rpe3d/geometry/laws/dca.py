"""Dual chunk attention, DCA (An et al. 2024, arXiv 2402.17463), as ChunkLlama publishes it.

A key at offset n of its chunk is at position n. A query at offset m is at m for its own chunk, at min(m + c, w) for the
previous chunk, and at w for all farther ones. The default chunk is ChunkLlama's first (docs/footguns.md).

The deployed version is sharper: Qwen2.5-1M's config and vLLM's backend for it multiply q and k of a text of n tokens by
s(n) = max(1, 0.1 ln(n / L_p) + 1), and so every score by s². `growth=0.1` does the same, with n the tokens up to and
including the query: that agrees with vLLM in a decoding step and for the last token of a prompt. Earlier tokens of a
prompt get a smaller factor than in vLLM, and do not depend on what comes after them. `attention_factor` is one s for
texts of any length, so it also changes short prompts; `deployed` is s(context).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from rpe3d.config import ConfigError, real, whole
from rpe3d.drawing.palette import BROWN, Style
from rpe3d.geometry.law import Law, parameter
from rpe3d.geometry.region import Phase, Region, Temperature, Turn


@dataclass(frozen=True, kw_only=True)
class Dca(Law):
    """Restart positions in every chunk, and put queries at one position for all far chunks."""

    name: ClassVar[str] = "dca"
    summary: ClassVar[str] = "dual chunk attention (ChunkLlama): positions restart per chunk, far queries share one"
    style: ClassVar[Style] = Style(BROWN)

    chunk: int = parameter(None, "tokens per chunk, c; default window - pretrained / 16")
    window: int = parameter(None, "largest position shown, w; default 3/4 of pretrained")
    attention_factor: float = parameter(
        1.0,
        "multiplies cos and sin; `deployed` is 0.1 ln(context / pretrained) + 1, as in Qwen2.5-1M and vLLM",
        later=True,
    )

    growth: float = parameter(
        0.0, "sharpens queries beyond pretrained by (1 + growth ln(n / pretrained))^2; Qwen2.5-1M uses 0.1", later=True
    )

    def check(self) -> dict[str, Any]:
        chunk, window = check_dual_chunk(self, self.chunk, self.window)
        given: object = self.attention_factor
        deployed = 0.1 * math.log(self.factor) + 1
        if isinstance(given, str) and given != "deployed":
            raise ConfigError(f"attention_factor is {given!r}", "pass a number above 0, or deployed")
        factor = real("attention_factor", deployed if given == "deployed" else given, above=True, most=1e9)
        growth = real("growth", self.growth, least=0, most=1e3)
        return {"chunk": chunk, "window": window, "attention_factor": factor, "growth": growth}

    @property
    def attention_scaling(self) -> float:
        return super().attention_scaling * self.attention_factor

    @property
    def temperature(self) -> Temperature | None:
        return Temperature(rate=self.growth, span=float(self.pretrained)) if self.growth else None

    @property
    def regions(self) -> tuple[Region, ...]:
        return dual_chunk_regions(self.chunk, self.window)

    @property
    def endless(self) -> bool:
        return True

    @property
    def chunk_in_use(self) -> int:
        return self.chunk


def dual_chunk_regions(chunk: int, window: int, phase: Phase | None = None) -> tuple[Region, ...]:
    """Return dual chunk attention (An et al. 2024, arXiv 2402.17463), with an optional phase on the far pairs.

    Keys stand at n; queries at m for their own chunk, at min(m + c, w) for the previous one, at w for all farther ones.
    Only differences count, and a chunk or two away whole chunks can be added to both sides: so the first two regions
    leave the keys where stock RoPE has them, with the query at i c + m and at i c + min(m, w - c).
    """
    following = Turn(chunk=chunk, offset=1.0, ceiling=float(window - chunk), stride=float(chunk))
    far_query = Turn(chunk=chunk, stride=0.0, start=float(window), phase=phase)
    far_key = Turn(chunk=chunk, offset=1.0, stride=0.0, phase=phase)
    return (
        Region(unit=chunk, last=0),
        Region(unit=chunk, first=1, last=1, query=following),
        Region(unit=chunk, first=2, query=far_query, key=far_key),
    )


def check_dual_chunk(law: Law, chunk: object, window: object) -> tuple[int, int]:
    """Check chunk and largest shown position, by default as ChunkLlama sets them: w = 3/4 L_p, c = w - L_p / 16."""
    largest = max(1, law.pretrained * 3 // 4) if window is None else whole("window", window)
    if largest > law.pretrained:  # Qwen2.5-1M deploys w = L_p, the first position that it was not trained on
        raise ConfigError(
            f"window is {largest}, but {law.name} shows position {largest} itself and the model has seen "
            f"only {law.pretrained}",
            f"lower window to at most {law.pretrained}",
        )
    size = max(1, largest - law.pretrained // 16) if chunk is None else whole("chunk", chunk)
    if size > largest:
        raise ConfigError(
            f"chunk is {size}, above window {largest}, so far keys would come after the query",
            f"lower chunk to at most {largest}, or raise window",
        )
    return size, largest
