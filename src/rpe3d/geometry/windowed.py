"""Shared parts of laws with an exact window: the window, and how many positions their defaults show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rpe3d.config import whole
from rpe3d.geometry.law import Law, parameter
from rpe3d.geometry.region import Region


def used_length(pretrained: int) -> int:
    """Return 5/8 of the pretrained length: models use less context than they were trained with (docs/log.md)."""
    return max(2, 5 * pretrained // 8)


@dataclass(frozen=True, kw_only=True)
class Windowed(Law):
    """Base of laws that are exact RoPE below a distance `window`."""

    window: int = parameter(None, "distances below this are exact RoPE; default pretrained / 8")

    def check(self) -> dict[str, Any]:
        window = max(1, self.pretrained // 8) if self.window is None else self.window
        return {"window": whole("window", window, most=self.pretrained - 1)}

    @property
    def near(self) -> Region:
        return Region(last=self.window - 1)
