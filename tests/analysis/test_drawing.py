"""Pictures are drawn from tables alone, the same every time, in colours that can be read on both pages."""

from __future__ import annotations

import re
import struct
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import combinations

import numpy as np
import pytest

from rpe3d.analysis.figures import FIGURES, picture, write_figures
from rpe3d.analysis.table import Table
from rpe3d.config import ConfigError
from rpe3d.drawing.palette import INK, KIND_COLOURS, PAGE

QUICK = ("figure-1a", "figure-1b", "figure-1ef", "figure-2", "supplement-a")


@pytest.fixture(scope="module")
def tables():
    return {name: figure.table() for name, figure in FIGURES.items()}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_in_light_and_dark(name, tables):
    light, dark = (picture(FIGURES[name], tables[name], scheme, "svg") for scheme in ("light", "dark"))
    for content, page in ((light, PAGE.light), (dark, PAGE.dark)):
        assert ET.fromstring(content).tag.endswith("svg")
        assert page in content.decode()
    assert light != dark


def test_the_same_table_gives_the_same_picture_and_another_table_another(tables):
    figure, table = FIGURES["figure-1ef"], tables["figure-1ef"]
    assert picture(figure, table, "light", "svg") == picture(figure, table, "light", "svg")
    rows = [(law, context, chunk, 0.9 * within, border) for law, context, chunk, within, border in table.rows]
    changed = Table(title=table.title, caption=table.caption, columns=table.columns, rows=rows)
    assert picture(figure, changed, "light", "svg") != picture(figure, table, "light", "svg")


def test_drawing_asks_no_law(tables, monkeypatch):
    """What is drawn is in the table: without the functions that make numbers it is drawn all the same."""

    def never(*_, **__):
        raise AssertionError("a drawing asked for a number")

    for module in ("rpe3d.geometry.theory", "rpe3d.analysis.shown"):
        for name in ("decay_bound", "resolution", "bloch_vector", "shown", "runs"):
            if hasattr(sys.modules[module], name):
                monkeypatch.setattr(f"{module}.{name}", never)
    monkeypatch.setattr("rpe3d.geometry.law.Law.relative_angles", never)
    monkeypatch.setattr("rpe3d.geometry.law.Law.relative_position", never)
    for name in QUICK:
        picture(FIGURES[name], tables[name], "light", "svg")


def test_all_files_of_a_figure_are_written_and_nothing_else(tmp_path):
    written = write_figures(tmp_path, ["figure-1a", "figure-2"])
    stems = [f"{name}{ending}" for name in ("figure-1a", "figure-2") for ending in (".csv", ".svg", ".png")]
    stems += [f"{name}-dark{ending}" for name in ("figure-1a", "figure-2") for ending in (".svg", ".png")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*stems, "index.html"])
    assert sorted(tmp_path.iterdir()) == sorted(written)
    for path in tmp_path.glob("*.png"):
        width, height = struct.unpack(">II", path.read_bytes()[16:24])
        assert min(width, height) > 700, "legible in print: 200 dots an inch"


def test_the_page_shows_what_lies_beside_it(tmp_path):
    write_figures(tmp_path, ["figure-1a"])
    found = []

    class Addresses(HTMLParser):
        def handle_starttag(self, tag, attributes):
            found.extend(value for name, value in attributes if name in ("src", "href", "srcset"))

    Addresses().feed((tmp_path / "index.html").read_text(encoding="utf-8"))
    assert sorted(found) == ["figure-1a-dark.svg", "figure-1a.csv", "figure-1a.svg"]


def test_a_folder_that_cannot_be_written_to_is_one_clear_error(tmp_path):
    (tmp_path / "figure-1a.csv").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write_figures(tmp_path, ["figure-1a"])
    assert [path.name for path in tmp_path.iterdir()] == ["figure-1a.csv"]


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


# Brettel-style projections for red- and green-blind readers (Viénot et al. 1999), on linear RGB.
BLIND = {
    "red": np.array([[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]]),
    "green": np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]]),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", BLIND)
def test_the_kinds_of_pairs_are_told_apart_without_red_or_green(scheme, kind):
    """Unseen pairs are hatched besides; the others have to do with their colours."""
    seen = []
    for colour in KIND_COLOURS:
        text = getattr(colour, scheme)
        rgb = np.array([int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]) ** 2.2
        seen.append((BLIND[kind] @ rgb).clip(0, 1) ** (1 / 2.2))
    for one, other in combinations(seen, 2):
        assert np.abs(one - other).sum() > 0.3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_on_both_pages(scheme):
    """WCAG 2.1: 4.5 to 1 for text."""
    assert contrast(getattr(INK, scheme), getattr(PAGE, scheme)) > 10


def test_letters_are_outlines_so_that_no_font_is_needed(tables):
    text = picture(FIGURES["figure-1a"], tables["figure-1a"], "light", "svg").decode()
    assert "<text" not in text
    assert not re.search(r'href="http|url\(http', text)
