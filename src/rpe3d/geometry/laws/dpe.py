"""DPE (Lu et al. 2025, arXiv 2504.18857): Self-Extend with a separate group size for each part of the pairs.

From distance w on, a pair of scale G is at p div G + w - w div G as a query and at p div G as a key. Scales are
found for a model by a needle search at the target length (`rpe3d tune MODEL --law dpe`); without them this law is
Self-Extend. Published for Llama-3-8B (8192 positions) at 131072 tokens with window 1024: 4, 4, 2, 16, 32, 32, 16, 128
in the README and in the names of the predictions, 2, 8, 2, 8, 32, 32, 32, 4 in the config file. Given scales may show
positions beyond the pretrained length: the published ones do, and the search found that some pairs tolerate it.

Two departures. The published `top k` leaves some pairs of each head at their true distance, as a scale of 1 does; a law
is the same for all heads, so this is left out. In a prompt the published code joins window and far positions by
w - w / G; here it is w - w div G, as in its decoding. If G divides w, as in all its settings, they are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from rpe3d.config import ConfigError, whole
from rpe3d.drawing.palette import DASHED, GREEN, Style
from rpe3d.geometry.law import parameter
from rpe3d.geometry.laws.self_extend import default_group
from rpe3d.geometry.region import Region, Turn, by_pair
from rpe3d.geometry.windowed import Windowed

GROUPS = 8


@dataclass(frozen=True, kw_only=True)
class Dpe(Windowed):
    """Self-Extend with a separate group size for each part of the pairs of dimensions."""

    name: ClassVar[str] = "dpe"
    summary: ClassVar[str] = "DPE: Self-Extend with a separate group size for each part of the pairs of dimensions"
    style: ClassVar[Style] = Style(GREEN, DASHED)
    single_position: ClassVar[bool] = False

    window: int = parameter(None, "distances below this are exact RoPE; default 1024, or pretrained / 8 if less")
    scales: tuple[int, ...] = parameter(
        None,
        "tokens that share a far position, one number for each equal part of the pairs, fastest first, e.g. 4-4-2-16;"
        " default: the group of self-extend for all",
    )

    def check(self) -> dict[str, Any]:
        window = super().check()["window"]
        if self.window is None:
            window = min(1024, window)
        pairs = self.rotary.pairs
        if self.scales is None:
            scales = (default_group(self.pretrained, self.context, window),) * min(GROUPS, pairs)
        else:
            scales = _numbers(self.scales)
        if not 1 <= len(scales) <= pairs:
            raise ConfigError(
                f"there are {len(scales)} scales for {pairs} pairs of dimensions", f"pass between 1 and {pairs}"
            )
        return {"window": window, "scales": scales}

    @property
    def regions(self) -> tuple[Region, ...]:
        window = self.window
        query = self._by_scale(lambda scale: Turn(chunk=scale, start=float(window - window // scale)))
        return (self.near, Region(first=window, query=query, key=self._by_scale(lambda scale: Turn(chunk=scale))))

    def _by_scale(self, turn: Callable[[int], Turn]) -> Turn:
        """Return each scale's turn for its part of the pairs; parts differ by one pair if they cannot be equal."""
        borders = [self.rotary.pairs * n // len(self.scales) for n in range(len(self.scales) + 1)]
        return by_pair((borders[n + 1] - borders[n], turn(scale)) for n, scale in enumerate(self.scales))


def _numbers(given: Any) -> tuple[int, ...]:
    """Read scales from a sequence, or from text such as 4-4-2-16."""
    try:
        items = [int(part) for part in given.split("-")] if isinstance(given, str) else list(given)
    except (TypeError, ValueError):
        raise ConfigError(
            f"scales is {given!r}, which is not a list of whole numbers", "write them as (4, 4, 2, 16) or 4-4-2-16"
        ) from None
    return tuple(whole("scale", item) for item in items)
