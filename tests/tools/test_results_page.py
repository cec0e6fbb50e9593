"""The tables of docs/results.md are what the CSVs say, and bold says what the windows say."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import results

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_tables_that_its_files_make():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(results.MARKED.findall(page)) == 1 + 2 * len(results.MODELS)
    assert results.written(page) == page, "run python tools/site/results.py docs/results.md"
    assert results.written(page.replace("| 14.68 / 14.65 / ", "| 14.58 / 14.65 / ")) == page


@pytest.mark.parametrize("model", ["smollm2", "qwen2.5-coder"])
def test_windows_make_the_row_that_the_run_reported(model):
    """Perplexities are of the mean loss over windows. (TinyLlama's two files name laws in different ways.)"""
    with (results.RESULTS / f"compare-large-{model}.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found = results.rows(model)[row["law"], int(row["length"])]
            assert found.commits == {row["commit"]}
            for column in results.COLUMNS:
                assert found.number(column) == pytest.approx(float(row[column]), rel=1e-4, abs=6e-5)


def test_bold_is_the_best_and_what_is_not_behind_it_beyond_the_noise(monkeypatch):
    rows = {(law, 64): results.Row() for law in ("best", "near", "behind", "apart")}
    for i in range(12):
        for law, away in (("best", 0.0), ("near", 0.2 * (-1) ** i + 0.01), ("behind", 0.05), ("apart", 0.0)):
            rows[law, 64].items["ppl"][f"{law if law == 'apart' else 'text'}{i}"] = (
                2.0 + i / 10 + away + (law == "apart")
            )
    monkeypatch.setattr(results, "rows", lambda model: rows)
    model = results.Model(name="m", title="M", pretrained=64, lengths=(64,), ours="best", dense="near", laws=())
    assert results.not_beaten(model, 64, "ppl", ["best", "near", "behind", "apart"]) == ["best", "near"]


def test_a_difference_in_our_disfavour_is_bold():
    away = results.difference("smollm2", 65536, "ppl", "3d-rpe:far=128", "3d-rpe")
    assert results._signed("ppl", away).startswith("**-1.7 %")
    assert not results._signed(
        "ppl", results.difference("smollm2", 65536, "ppl", "3d-rpe", "3d-rpe:far=128")
    ).startswith("**")
