"""The documentation's site: reference pages say what the code has, and a link that leads nowhere is found."""

from __future__ import annotations

import logging

import pytest

import reference
import rpe3d
from rpe3d.cli import VERBS
from rpe3d.geometry.registry import LAWS


def test_the_command_line_page_has_every_verb_and_its_options():
    page = reference.commands()
    assert [line for line in page.splitlines() if line.startswith("## ")] == [f"## `rpe3d {verb}`" for verb in VERBS]
    assert "--lengths N,N" in page


def test_the_page_of_laws_has_every_law_and_parameter():
    sections = reference.laws().split("\n## ")
    for (name, law), section in zip(LAWS.items(), sections[1:], strict=True):
        assert section.startswith(f"`{name}`")
        assert all(f"| `{parameter}` |" in section for parameter in law.parameters())


def test_the_python_page_has_every_public_name_once():
    headings = [line for line in reference.python().splitlines() if line.startswith("### ")]
    assert {f"### `{name}`" for name in rpe3d.__all__} <= set(headings)
    assert headings.count("### `extend`") == 1


def test_a_signature_reads_as_its_source():
    def made(model: object, law: str = "3d-rpe", *, context: int | None = None, **parameters: int) -> bool:
        return True

    shown = "(model: object, law: str = '3d-rpe', *, context: int | None = None, **parameters: int) -> bool"
    assert " ".join(reference._signature(made).split()) == shown.replace("(m", "( m").replace("int) ->", "int, ) ->")


def test_every_json_file_is_described():
    for section in reference.schemas().split("\n## ")[1:]:
        assert len(section) > 100, section


def test_links_lead_from_the_repository_to_the_site_and_dead_ones_are_named(caplog):
    pytest.importorskip("mkdocs", reason="mkdocs is missing: pip install '.[docs]'")
    import hooks

    assert hooks.rewritten("guides/extend.md", "../../README.md") == "../index.md"
    assert hooks.rewritten("index.md", "docs/results.md") == "results.md"
    assert hooks.rewritten("log.md", "../src/rpe3d/geometry/region.py") == "files/src/rpe3d/geometry/region.py"
    assert hooks.rewritten("log.md", "https://arxiv.org/abs/2406.09897") == "https://arxiv.org/abs/2406.09897"
    page = type("Page", (), {"file": type("File", (), {"src_uri": "results.md"})})
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        hooks.on_page_markdown("[gone](../benchmarks/results/gone.csv)", page)
    assert "benchmarks/results/gone.csv, which does not exist" in caplog.text
