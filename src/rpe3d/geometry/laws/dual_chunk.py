"""3D-RPE as its authors' code computes it: dual chunk attention (`dca`) with the chunk phase φ_j on far pairs.

Departs from that code, which rotates keys by a phase that depends on the prompt length, in prefill only: here the phase
depends on the key's position alone, so that cached decoding equals the full forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rpe3d.drawing.palette import DASHED, ORANGE, Style
from rpe3d.geometry.law import parameter
from rpe3d.geometry.laws.dca import check_dual_chunk, dual_chunk_regions
from rpe3d.geometry.phased import Phased
from rpe3d.geometry.region import Phase, Region


@dataclass(frozen=True, kw_only=True)
class DualChunk(Phased):
    """Dual chunk attention whose far queries and far keys carry the phase +φ of their chunk."""

    name: ClassVar[str] = "3d-rpe-dual-chunk"
    summary: ClassVar[str] = "3D-RPE as its authors' code computes it: dual chunk attention with a chunk phase"
    style: ClassVar[Style] = Style(ORANGE, DASHED)

    chunk: int = parameter(None, "tokens per chunk, c; default window - pretrained / 16")
    window: int = parameter(None, "largest position shown, w; default 3/4 of pretrained")

    def check(self) -> dict[str, Any]:
        chunk, window = check_dual_chunk(self, self.chunk, self.window)
        if self.chunk is None:
            chunk = self._fitting(chunk, window)
        return self._check_phase(chunk, window) | {"window": window}

    @property
    def regions(self) -> tuple[Region, ...]:
        return dual_chunk_regions(self.chunk_in_use, self.window, Phase(base=self.phi_base, sign=+1))

    @property
    def endless(self) -> bool:
        return True
