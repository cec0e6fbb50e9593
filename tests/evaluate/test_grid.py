"""The grid: rows are measured once, written one by one, and kept in the order asked."""

from __future__ import annotations

import json

import pytest

from rpe3d.evaluate.grid import fill
from rpe3d.evaluate.origin import commit, made_from
from rpe3d.evaluate.ranks import Ranks
from rpe3d.evaluate.store import Store

KEYS = [("rope", 256), ("rope", 512), ("dca", 256)]


def store(file, keys=KEYS, **given):
    content = {"schema": 1, "kind": "compare", "command": "x", "settings": {"seed": 0}, "rows": []}
    return Store(
        file=file, content=content, parts=("law", "length"), keys=keys, origin=lambda *_: made_from(content), **given
    )


def measured(seen, stop=None, status="ok"):
    def measure(waiting):
        for key in reversed(waiting):  # in any order
            if key == stop:
                raise KeyboardInterrupt
            seen.append(key)
            yield key, {"law": key[0], "length": key[1], "status": status}

    return measure


def kept(file):
    return [(row["law"], row["length"]) for row in json.loads(file.read_text())["rows"]]


def test_a_stopped_grid_keeps_its_rows_and_the_next_run_measures_the_others(tmp_path):
    file, seen = tmp_path / "r.json", []
    with pytest.raises(KeyboardInterrupt):
        fill(store(file), measured(seen, stop=KEYS[0]), Ranks())
    assert kept(file) == KEYS[1:]
    fill(store(file), measured(seen), Ranks())
    assert (kept(file), seen) == (KEYS, [*reversed(KEYS)])
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_rows_that_failed_are_measured_again_and_finished_ones_only_when_asked(tmp_path):
    file, seen = tmp_path / "r.json", []
    fill(store(file), measured(seen, status="out of memory"), Ranks())
    fill(store(file), measured(seen), Ranks())
    fill(store(file), measured(seen), Ranks())
    assert len(seen) == 2 * len(KEYS)
    fill(store(file), measured(seen), Ranks(), overwrite=True)
    assert len(seen) == 3 * len(KEYS)


def test_a_file_that_collects_keeps_the_rows_of_other_commands_before_its_own(tmp_path):
    file, seen = tmp_path / "r.json", []
    fill(store(file, KEYS[2:], collects=True), measured(seen), Ranks())
    fill(store(file, KEYS, collects=True), measured(seen), Ranks())
    fill(store(file, KEYS[:1], collects=True), measured(seen), Ranks())
    assert kept(file) == [KEYS[2], KEYS[0], KEYS[1]]
    assert len(seen) == len(KEYS)


def test_a_grid_without_a_file_is_measured_all_the_same():
    grid = store(None)
    fill(grid, measured([]), Ranks())
    assert [(row["law"], row["length"]) for row in grid.content["rows"]] == KEYS
    assert {row["made_from"] for row in grid.content["rows"]} == {made_from(grid.content)}
    assert {row["commit"] for row in grid.content["rows"]} == {commit()}
