"""Colours of the plots and the page, from which every law chooses its own colour and dash (`Law.style`).

Laws of one kind share a colour, or nearly, and differ in their dash. Colours differ in lightness as well as in hue, so
that colour-blind readers can tell them apart, and each has a form for light pages and one for dark ones.
"""

from __future__ import annotations

from typing import NamedTuple


class Colour(NamedTuple):
    """A colour on white, and on black."""

    light: str
    dark: str


class Style(NamedTuple):
    """Style of a law's lines in every drawing."""

    colour: Colour
    dash: tuple[float, ...] = ()
    width: float = 1.4


PAGE = Colour("#ffffff", "#141417")
INK = Colour("#1d1d1f", "#f0f0f2")
SOFT = Colour("#6b6b70", "#a0a0a8")
GRID = Colour("#e4e4e8", "#34343a")
BAND = Colour("#eef2f6", "#22272e")
HIT = Colour("#0b66a8", "#4fa8e8")
MISS = Colour("#f6dccb", "#4a2a18")
ON_HIT = Colour("#ffffff", "#0d1a26")
ON_MISS = Colour("#8a3200", "#ffb58a")

BLUE, SKY = Colour("#0a38e0", "#3b6ff0"), Colour("#0a92ea", "#97c1f7")
ORANGE, BROWN = Colour("#ee5a02", "#e8401a"), Colour("#5c3f10", "#fabd3b")
GREEN, PINK, GREY = Colour("#17695a", "#34ee94"), Colour("#a42392", "#d9369a"), Colour("#808086", "#909098")
PURPLE, TEAL, OLIVE = Colour("#6f4bc0", "#b79cff"), Colour("#008b94", "#4fd6de"), Colour("#6d7d00", "#c3d24a")

KIND_COLOURS = (GREEN, SKY, ORANGE, GRID)
"""Colours of what happens to a pair: exact, compressed, unseen, not attended to."""

DASHED, DOTTED = (5.0, 2.0), (1.2, 1.6)
OWN = Style(ORANGE, width=2.2)
"""Style of 3D-RPE, the subject of this project."""
OTHERS = (Style(PURPLE, width=2.2), Style(TEAL, width=2.2), Style(OLIVE, width=2.2), Style(GREY))
"""Styles of labels that are not the name of a law, such as those of law files."""
COLOURS = (PAGE, INK, SOFT, GRID, BAND, HIT, MISS, ON_HIT, ON_MISS)
"""Colours of a page besides the lines of its laws."""


def variable(colour: Colour) -> str:
    """Return the name of a colour's CSS variable."""
    return f"--{colour.light[1:]}-{colour.dark[1:]}"
