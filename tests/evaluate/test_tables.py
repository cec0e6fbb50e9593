"""Tables as the paper prints them, and its own numbers beside ours, marked."""

from __future__ import annotations

import csv
import io
import re

import pytest

from rpe3d.evaluate.report import write_page
from rpe3d.evaluate.scores import margin, scores
from rpe3d.evaluate.tables import CSV, PAPER, rows_csv, tables
from rpe3d.evaluate.tasks import leval, longbench, ruler

# The paper's LongLora-16k row in its supplement, and the means over its categories.
LONGLORA = dict(zip(PAPER["longbench"]["columns"], PAPER["longbench"]["rows"]["LongLora-16k"], strict=True))


def row(suite, task, score, length=16384, law="3d-rpe", n=200, status="ok"):
    made = dict.fromkeys(CSV) | {"suite": suite, "task": task, "score": score, "n": n, "status": status}
    return made | {"law": law, "length": length, "metric": "ppl windows", "seconds": 1.0, "samples_per_minute": 5.0}


def results(rows):
    model = {"name": "a <b>", "architecture": "L", "parameters": 7, "pretrained": 4096, "dtype": "x", "device": "cpu"}
    data = {"longbench:lcc": [{"name": "lcc.jsonl", "sha256": "0" * 64, "n": 500}]}
    settings = {"limit": None}
    return {"model": model, "rows": rows, "command": "rpe3d eval", "settings": settings, "versions": {}, "data": data}


def test_table_1_is_the_plain_mean_over_each_category():
    made = {t.title.split(":")[0]: t for t in tables(results([row("longbench", t, s) for t, s in LONGLORA.items()]))}
    ours = made["Table 1"].lines[0]
    assert ours.label == "3d-rpe at 16k"
    assert ours.texts() == ["28.67", "28.14", "27.80", "63.69", "56.03"]
    assert made["Supplement D.2"].lines[0].texts()[:2] == ["19.80", "29.10"]
    assert made["Supplement D.2"].columns[0] == "narrativeqa (200)"


def test_a_category_with_a_task_missing_has_no_mean():
    (table, _) = tables(results([row("longbench", t, 1.0) for t in ("lcc", "repobench-p", "qasper", "narrativeqa")]))
    assert table.lines[0].texts() == ["", "", "", "", "1.00"]


def test_the_papers_lines_are_marked_and_in_our_columns():
    (table,) = tables(results([row("leval", "tpo", 50.0), row("leval", "sci_fi", 1.0), row("leval", "coursera", 2.0)]))
    assert [column.split(" ")[0] for column in table.columns] == ["coursera", "tpo", "sci_fi"]
    quoted = {line.label: line.texts() for line in table.lines if line.quoted}
    assert quoted["3D-RPE-LLaMA2-7B-Chat"] == ["39.38", "57.99", ""]
    assert not table.lines[0].quoted
    assert "none of them was measured here" in table.note


def test_table_3_has_a_column_for_each_text_and_length():
    rows = [row("ppl", "pg19", 8.0, 8192), row("ppl", "pg19", 9.0), row("ppl", "books", 7.0, 8192, law="yarn")]
    (table,) = tables(results(rows))
    assert table.title == "Table 3: Perplexity, protocol windows"
    assert table.columns == ["pg19 8k", "pg19 16k", "books 8k"]
    assert [line.texts() for line in table.lines[:2]] == [["8.00", "9.00", ""], ["", "", "7.00"]]
    assert {line.label: line.texts() for line in table.lines}["LLaMA2-7B-Base"] == ["131.09", ">10^2", ""]


def test_a_table_of_ours_alone_quotes_nothing():
    rows = [row("ruler", "vt", 50.0), row("ruler", "cwe", 70.0), row("passkey", "", 90.0), row("copy", "", 1.5)]
    found = tables(results([*rows, row("ppl", "", 3.0, status="out of memory")]))
    assert next(table.title for table in found) == "RULER (number of samples)"
    assert found[0].lines[0].texts() == ["50.00", "70.00", "60.00"]
    assert found[1].lines[0].texts() == ["90.00", "1.50"]
    assert not any(line.quoted for table in found for line in table.lines)


def test_the_papers_tables_are_whole():
    assert PAPER["longbench"]["columns"] == list(longbench.DEFAULT)
    assert PAPER["leval"]["columns"] == list(leval.DEFAULT)
    for name in ("longbench_categories", "longbench", "leval", "ppl"):
        assert {len(cells) for cells in PAPER[name]["rows"].values()} == {len(PAPER[name]["columns"])}


@pytest.mark.parametrize("category", PAPER["longbench_categories"]["columns"])
def test_table_1_of_the_paper_is_the_mean_of_its_supplement_for_longlora(category):
    """As printed: LongAlpaca-16k there, LongLora-16k here, and within rounding the same model."""
    tasks = [name for name, task in longbench.TASKS.items() if task.category == category]
    at = PAPER["longbench_categories"]["columns"].index(category)
    printed = PAPER["longbench_categories"]["rows"]["LongAlpaca-16k"][at]
    assert printed == pytest.approx(sum(LONGLORA[task] for task in tasks) / len(tasks), abs=0.06)


def test_table_1_of_the_paper_is_the_mean_of_its_supplement():
    """Its own row, 3D-RPE-LLaMA2-7B-Chat, to the last printed digit."""
    own = dict(zip(PAPER["longbench"]["columns"], PAPER["longbench"]["rows"]["3D-RPE-LLaMA2-7B"], strict=True))
    printed = PAPER["longbench_categories"]["rows"]["3D-RPE-LLaMA2-7B-Chat"]
    for category, mean in zip(PAPER["longbench_categories"]["columns"], printed, strict=True):
        scores = [own[name] for name, task in longbench.TASKS.items() if task.category == category and name in own]
        assert sum(scores) / len(scores) == pytest.approx(mean, abs=0.011), category


def test_table_3_of_the_paper_is_not_as_its_text_says_on_proof_pile():
    """Section 5.3: ahead of fine-tuned models at 8k and 16k, and of LongChat-32k at 32k. On PG-19 it is."""
    rows = {
        name: dict(zip(PAPER["ppl"]["columns"], cells, strict=True)) for name, cells in PAPER["ppl"]["rows"].items()
    }
    own, tuned = rows["3D-RPE-LLaMA2-7B"], ("LongLoRA-32k", "LongLoRA-100k", "LongChat-32k", "Activation Beacon")
    claimed = [(at, name) for at in ("8k", "16k") for name in tuned] + [("32k", "LongChat-32k")]
    behind = {f"pg19 {at}": [] for at, _ in claimed} | {f"proof-pile {at}": [] for at, _ in claimed}
    for column, names in behind.items():
        names += [name for at, name in claimed if column.endswith(f" {at}") and rows[name][column] <= own[column]]
    assert {column: names for column, names in behind.items() if names} == {
        "proof-pile 16k": ["LongLoRA-32k", "LongLoRA-100k", "LongChat-32k"],
        "proof-pile 32k": ["LongChat-32k"],
    }


def test_the_page_needs_no_network_and_says_what_is_quoted_and_what_failed(tmp_path):
    rows = [row("longbench", "lcc", 40.0), row("longbench", "qasper", None, status="out of memory")]
    paths = write_page(results(rows), tmp_path / "new")
    page = (tmp_path / "new" / "report.html").read_text()
    assert sorted(path.name for path in paths) == ["report.html", "rows.csv"]
    assert not re.search(r"(?:src|href)=\"(?!rows\.csv)", page)
    assert "<h1>LongBench at 16k, lcc: " in page
    assert "a &lt;b&gt;" in page
    assert page.count('<span class="mark">quoted</span>') == len(PAPER["longbench"]["rows"])
    assert "longbench qasper: out of memory" in page
    assert next(iter(csv.DictReader(io.StringIO(rows_csv(results(rows))))))["score"] == "40.0"


def test_the_mean_of_ruler_says_of_how_many_tasks():
    """Upstream has 13, of which two need data sets."""
    rows = [row("ruler", task, 50.0) for task in ruler.DEFAULT]
    (table,) = tables(results(rows))
    assert table.columns[-1] == "mean of 11 tasks, of 13"


@pytest.mark.parametrize(("score", "n", "wide"), [(50.0, 100, 9.62), (0.0, 10, 13.87), (100.0, 10, 13.87)])
def test_a_margin_is_that_of_wilsons_interval(score, n, wide):
    """Half of (upper - lower): 0.4038 to 0.5962 for 50 of 100, 0 to 0.2775 for 0 of 10 (Newcombe 1998, method 3)."""
    assert margin(score, n) == pytest.approx(wide, abs=0.02)


def test_an_evaluation_is_said_in_a_headline_and_within_the_noise_nobody_wins():
    near = [row("ruler", "vt", 50.0, law="dca"), row("ruler", "vt", 52.0), row("ruler", "cwe", 1.0)]
    assert scores(results(near)) == [
        "RULER at 16k, vt: 3d-rpe 52.0 ± 6.9, dca 50.0 ± 6.9; no law is better than another, within the noise."
    ]
    apart = [*near, row("ruler", "vt", 5.0, law="rope"), row("ppl", "", 9.0), row("ppl", "", 8.0, law="dca")]
    first, second = scores(results(apart))
    assert first.endswith("rope 5.0 ± 3.1; 3d-rpe and dca are within the noise.")
    assert second == "Perplexity at 16k: dca 8.00, 3d-rpe 9.00."
    assert scores(results([row("ppl", "", None, status="out of memory")])) == ["Nothing could be measured."]


def test_the_page_links_to_the_predictions_beside_the_results(tmp_path):
    made = row("ruler", "vt", 50.0, n=100) | {"predictions": "e.predictions/3d-rpe-16384/ruler/vt.jsonl"}
    write_page(results([made]), tmp_path / "report", tmp_path / "e.json")
    page = (tmp_path / "report" / "report.html").read_text()
    assert 'href="../e.predictions/3d-rpe-16384/ruler/vt.jsonl"' in page
    assert "50.00 ± 9.6" in page
