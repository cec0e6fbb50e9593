"""3D-RPE as defined (arXiv 2406.09897, Definition 1 and eq. 4): h~ = e^{i m θ} (cos φ_j h⊥ + sin φ_j h).

With h⊥ = i h this is one rotation by m θ + π/2 - φ_j, for offset m in chunk j and φ_j = base^(-j). No departures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from rpe3d.config import whole
from rpe3d.drawing.palette import DOTTED, ORANGE, Style
from rpe3d.geometry.phased import Phased
from rpe3d.geometry.region import Phase, Region, Turn


@dataclass(frozen=True, kw_only=True)
class Definition(Phased):
    """Restart offsets in every chunk and tell chunks apart by a phase, as the paper defines it."""

    name: ClassVar[str] = "3d-rpe-definition"
    summary: ClassVar[str] = "3D-RPE to the letter of Definition 1: offsets restart, chunks differ by a phase"
    style: ClassVar[Style] = Style(ORANGE, DOTTED)

    def check(self) -> dict[str, Any]:
        if self.chunk is None:
            return self._check_phase(self._fitting(max(1, 3 * self.pretrained // 4), self.pretrained), self.pretrained)
        return self._check_phase(whole("chunk", self.chunk), self.pretrained)

    @property
    def regions(self) -> tuple[Region, ...]:
        phase = Phase(base=self.phi_base, sign=-1, constant=math.pi / 2)
        turn = Turn(chunk=self.chunk_in_use, offset=1.0, stride=0.0, phase=phase)
        return (Region(query=turn, key=turn),)
