"""The tables of docs/results.md are what the CSVs say, and bold says what the windows say."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest

import measured
import results

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_tables_that_its_files_make():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(results.MARKED.findall(page)) == 6 + 2 * len(results.MODELS)
    assert results.written(page) == page, "run python tools/site/results.py docs/results.md"
    changed = page.replace("| 14.68&nbsp;/&nbsp;14.65<br>", "| 14.58&nbsp;/&nbsp;14.65<br>")
    assert changed != page
    assert results.written(changed) == page


@pytest.mark.parametrize("model", ["smollm2", "qwen2.5-coder"])
def test_windows_make_the_row_that_the_run_reported(model):
    """Perplexities are of the mean loss over windows. (TinyLlama's two files name laws in different ways.)"""
    with (results.RESULTS / f"compare-large-{model}.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found = results.rows(model)[row["law"], int(row["length"])]
            assert found.commits == {row["commit"]}
            for column in (column for column in results.COLUMNS if row[column]):
                assert found.number(column) == pytest.approx(float(row[column]), rel=1e-4, abs=6e-5)


def test_bold_is_the_best_and_what_is_not_behind_it_beyond_the_noise(monkeypatch):
    rows = {(law, 64): results.Row() for law in ("best", "near", "behind", "apart")}
    for i in range(12):
        for law, away in (("best", 0.0), ("near", 0.2 * (-1) ** i + 0.01), ("behind", 0.05), ("apart", 0.0)):
            rows[law, 64].items["ppl"][f"{law if law == 'apart' else 'text'}{i}"] = (
                2.0 + i / 10 + away + (law == "apart")
            )
    monkeypatch.setattr(results, "rows", lambda model: rows)
    model = results.Model(
        name="m",
        title="M",
        pretrained=64,
        lengths=(64,),
        tuned="best",
        at_home="best",
        chosen="best",
        dense="near",
        laws=(),
    )
    assert results.not_beaten(model, 64, "ppl", ["best", "near", "behind", "apart"]) == ["best", "near"]


def test_a_difference_in_our_disfavour_is_bold():
    away = results.difference("smollm2", 65536, "ppl", "3d-rpe:far=128", "3d-rpe")
    assert results._signed("ppl", away).startswith("**-1.7 %")
    assert not results._signed(
        "ppl", results.difference("smollm2", 65536, "ppl", "3d-rpe", "3d-rpe:far=128")
    ).startswith("**")


def test_the_headline_names_the_best_other_law_and_says_where_there_is_none():
    lines = results.headline()
    assert len(lines) == 2 + sum(len(model.lengths) for model in results.MODELS.values())
    assert "| SmolLM2-135M, 16k (2x) | **14.66** vs 14.81 dca |" in lines[3]
    assert lines[-1].endswith("| 0.02, no other measured | 4/4, no other measured |")


def test_a_mean_of_fewer_tasks_says_so():
    scores = results.Scores({"leval": {task: (score, 48) for task, score in (("a", 12.0), ("b", 22.9), ("c", 20.8))}})
    assert scores.mean("leval") == "18.6 (3 tasks)"
    scores.by_suite["leval"]["d"] = 2.1, 48
    assert scores.mean("leval") == "14.4"


def test_suites_have_every_task_of_every_law_or_say_not_measured():
    assert len(results.suite_tasks()) == 2 + sum(n for _, n in results.SUITES.values())
    assert [line for line in results.suite_tasks() if "not measured" in line] == [results.suite_tasks()[-1]]
    assert all("tasks)" not in line for line in results.suite_means()[:-1])


def test_what_compare_measured_is_kept_in_place_of_the_same_law_and_length(tmp_path, monkeypatch):
    """A line for the row, and one for each window, copy and passkey; other laws stay as they are."""
    names = ("compare-large-qwen2.5-coder.csv", "compare-large-qwen2.5-coder-windows.csv")
    for name in names:
        shutil.copy(results.RESULTS / name, tmp_path)
    before = [(tmp_path / name).read_text().splitlines() for name in names]
    windows = [{"text": "pg1_A_Book.txt.xz", "start": 0, "nll": 2.0, "tail_nll": 1.5}]
    windows.append({"text": "hott_book.tex.txt.xz", "start": 0, "nll": 1.0, "tail_nll": 0.5})
    numbers = {"ppl": 4.4817, "tail_ppl": 2.7183, "copy_nll": 0.25, "passkey": 1, "passkey_n": 1}
    row = {"law": "dca", "length": 131072, "status": "ok", "parameters": {"chunk": 8}, "commit": "abc+", **numbers}
    row |= {"windows": windows, "copies": [{"nll": 0.25, "seed": 0}], "passkeys": [{"depth": 0.5, "correct": True}]}
    file = tmp_path / "compare.json"
    file.write_text(json.dumps({"model": {"device": "a GPU"}, "rows": [row, row | {"law": "x", "status": "failed"}]}))
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    line = ["measured.py", str(file), "--model", "qwen2.5-coder", "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", line)
    measured.main()
    rows, items = ((tmp_path / name).read_text().splitlines() for name in names)
    assert rows[-1] == "a GPU,abc,dca,chunk=8,131072,4.4817,2.7183,0.25,1,1,2,1"
    assert rows[:-1] == [one for one in before[0] if ",dca,chunk=" not in one or ",131072," not in one]
    assert items[-4:] == [
        "a GPU,abc,dca,131072,window,pg1,2.00000,1.50000",
        "a GPU,abc,dca,131072,window,hott_book,1.00000,0.50000",
        "a GPU,abc,dca,131072,copy,0,0.25000,",
        "a GPU,abc,dca,131072,passkey,0.5,1,",
    ]
    assert items[:-4] == [one for one in before[1] if ",dca,131072," not in one]
