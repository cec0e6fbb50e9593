"""Tables and bars in a terminal: labels are shown as they are, and no number is lost."""

from __future__ import annotations

import pytest

from rpe3d.cli.terminal import new_table, progress_bar, show


@pytest.mark.parametrize("label", ["[/b]", "[b]near[/b]", ":x:", "[link=a]"])
def test_a_label_is_text_and_not_markup(capsys, label):
    """A law's label is the user's (`[/b]=3d-rpe:chunk=64`): rich would take it for a tag, and fail or drop it."""
    table = new_table("law", "length", words=("law",))
    table.add_row(label, "512")
    show(table)
    with progress_bar() as progress:
        progress(f"{label} at 512", 1, 1)
    said = capsys.readouterr()
    assert label in said.out
    assert f"{label} at 512" in said.err


@pytest.mark.parametrize("columns", [20, 40, 60, 80])
def test_a_narrow_terminal_loses_no_column_and_no_digit(capsys, monkeypatch, columns):
    """Words are folded where a terminal is narrow; the law's column must not vanish, nor 994.84 become 994.…"""
    monkeypatch.setenv("COLUMNS", str(columns))
    table = new_table("law", "length", "ppl", "tail ppl", "copy nll", "passkey", "tokens/s", "", words=("law", ""))
    table.add_row("near", "512", "994.84", "940.56", "6.93", "0/1", "136611", "")
    show(table)
    said = capsys.readouterr().out
    assert "…" not in said
    for cell in ("law", "tokens/s", "near", "512", "994.84", "940.56", "6.93", "0/1", "136611"):
        assert cell in said
