"""Self-Extend (Jin et al. 2024, arXiv 2401.01325, algorithm 1).

From distance w on, a query is at position p div G + w - w div G and a key at p div G.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from rpe3d.config import ConfigError, whole
from rpe3d.drawing.palette import GREEN, Style
from rpe3d.geometry.law import parameter
from rpe3d.geometry.region import Region, Turn
from rpe3d.geometry.windowed import Windowed, used_length


@dataclass(frozen=True, kw_only=True)
class SelfExtend(Windowed):
    """Keep near pairs exact and floor far positions to groups."""

    name: ClassVar[str] = "self-extend"
    summary: ClassVar[str] = "Self-Extend: exact window, far positions floored to groups"
    style: ClassVar[Style] = Style(GREEN)

    group: int = parameter(None, "tokens that share a far position, G; default: the fewest that stay below 5/8 L_p")

    def check(self) -> dict[str, Any]:
        parameters = super().check()
        window = parameters["window"]
        default = default_group(self.pretrained, self.context, window)
        group = default if self.group is None else whole("group", self.group)
        largest = (self.context - 1) // group + window - window // group
        if largest >= self.pretrained:
            raise ConfigError(
                f"group {group} with window {window} shows position {largest} at context {self.context}, beyond "
                f"the pretrained length {self.pretrained}",
                "raise group or lower window",
            )
        return parameters | {"group": group}

    @property
    def regions(self) -> tuple[Region, ...]:
        start = float(self.window - self.window // self.group)
        far_query = Turn(chunk=self.group, start=start)
        return (self.near, Region(first=self.window, query=far_query, key=Turn(chunk=self.group)))


def default_group(pretrained: int, context: int, window: int) -> int:
    """Return the fewest tokens that have to share a far position so that all positions stay below `used_length`."""
    return math.ceil(context / max(1, used_length(pretrained) - window))
