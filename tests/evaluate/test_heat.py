"""Heat maps of an evaluation show what its rows say, for every law on one scale."""

from __future__ import annotations

import csv
import re

from rpe3d.evaluate.heat import heat_maps
from rpe3d.evaluate.report import write_page

MODEL = {"name": "m", "architecture": "A", "parameters": 1, "pretrained": 8, "dtype": "float32", "device": "cpu"}


def row(law, length, depths, suite="needle", task="number", **given):
    parts = {"depth": {str(depth): [score, 5] for depth, score in depths.items()}}
    score = sum(depths.values()) / len(depths)
    made = {"law": law, "length": length, "suite": suite, "task": task, "metric": "m", "score": score, "status": "ok"}
    made |= {"n": 5 * len(depths), "empty": 0, "seconds": 1.0, "samples_per_minute": None, "batch": 1, "commit": None}
    return made | {"parts": parts} | given


def results(*rows):
    return {"model": MODEL, "rows": list(rows), "command": "c", "settings": {}, "versions": {}, "data": {}}


ROWS = [
    row("rope", 4096, {0: 0.0, 50: 100.0, 100: 100.0}),
    row("rope", 8192, {0: 0.0, 50: 20.0, 100: 100.0}),
    row("3d-rpe", 4096, {0: 80.0, 50: 100.0, 100: 100.0}),
]


def test_every_law_has_a_panel_and_every_cell_its_percentage(tmp_path):
    (plot,) = heat_maps(results(*ROWS))
    assert [panel.title for panel in plot.panels] == ["rope", "3d-rpe"]
    assert "67 percent at 4096 tokens, 40 percent at 8192 tokens" in plot.panels[0].alt
    assert "Samples in a cell: 5." in plot.caption
    paths = write_page(results(*ROWS), tmp_path)
    assert sorted(path.name for path in paths) == ["needle-number.png", "parts.csv", "report.html", "rows.csv"]
    page = (tmp_path / "report.html").read_text()
    marks = [re.findall(r">(\d+)</text>|>(\d+)<!", part) for part in page.split("<figure>")[1:]]
    found = [sorted(int(a or b) for a, b in some) for some in marks]
    assert found == [[0, 0, 20, 100, 100, 100], [80, 100, 100]]
    for colour in set(re.findall(r"var\((--[\w-]+)\)", page)):
        assert f"{colour}:" in page


def test_a_colour_is_the_same_share_in_every_panel(tmp_path):
    """One scale: 100 percent looks alike under both laws, and 20 is fainter than 80."""
    page = (tmp_path / "report.html", write_page(results(*ROWS), tmp_path))[0].read_text()
    first, second = page.split("<figure>")[1:]
    opacity = [set(re.findall(r"(?<![\w-])(?:fill-)?opacity: ([\d.]+)", part)) for part in (first, second)]
    assert "0.2" in opacity[0]
    assert "0.8" in opacity[1]


def test_many_depths_are_gathered_to_tenths():
    (plot,) = heat_maps(results(row("rope", 4096, {d: 100.0 * (d < 50) for d in range(0, 101, 2)}, "infinitebench")))
    (panel,) = plot.panels
    assert panel.size[1] == 44 + 17 * 11
    assert "49 percent at 4096 tokens" in panel.alt


def test_a_suite_with_one_nameless_task_has_a_map_of_its_own_name():
    (plot,) = heat_maps(results(row("rope", 4096, {5: 100.0, 95: 0.0}, "passkey", "")))
    assert (plot.name, plot.caption.split(":")[0]) == ("passkey", "Passkeys")


def test_rows_without_depths_and_failed_ones_have_no_map(tmp_path):
    rows = [row("rope", 4096, {0: 0.0}, parts={}), row("dca", 4096, {0: 0.0}, status="out of memory")]
    assert heat_maps(results(*rows)) == []
    older = {name: value for name, value in rows[0].items() if name != "parts"}
    assert [path.name for path in write_page(results(older), tmp_path)] == ["rows.csv", "report.html"]


def test_every_part_is_in_the_csv(tmp_path):
    write_page(results(*ROWS), tmp_path)
    with (tmp_path / "parts.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 9
    assert lines[4] == {
        "law": "rope", "length": "8192", "suite": "needle", "task": "number", "kind": "depth", "part": "50",
        "score": "20.0", "n": "5",
    }  # fmt: skip


def test_longbench_v2_is_told_by_difficulty_length_and_domain():
    from rpe3d.evaluate.tables import tables

    parts = {
        "difficulty": {"hard": [25.0, 4], "easy": [50.0, 2]},
        "length": {"long": [0.0, 1], "short": [40.0, 5]},
        "domain": {"Multi-Document QA": [33.3, 6]},
    }
    made = row("rope", 4096, {0: 33.3}, "longbench-v2", "choices", parts=parts)
    whole, by_part = tables(results(made))
    assert whole.title == "LongBench v2 (number of samples)"
    assert by_part.columns == ["easy (2)", "hard (4)", "short (5)", "long (1)", "Multi-Document QA (6)"]
    assert by_part.lines[0].texts() == ["50.00", "25.00", "40.00", "0.00", "33.30"]


def test_babilongs_mean_is_of_the_first_five_tasks():
    from rpe3d.evaluate.tables import tables

    rows = [row("rope", 4096, {0: 10.0 * n}, "babilong", f"qa{n}", parts={}) for n in range(1, 7)]
    (table,) = tables(results(*rows))
    assert table.columns[-1] == "mean of qa1 to qa5"
    assert table.lines[0].texts()[-1] == "30.00"
    (few,) = tables(results(*rows[:3]))
    assert (few.columns[-1], few.lines[0].texts()) == ("qa3 (5)", ["10.00", "20.00", "30.00"])
