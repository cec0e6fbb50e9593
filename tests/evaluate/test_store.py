"""The results file: whole at any moment, one writer, taken up by the same run only."""

from __future__ import annotations

import json

import pytest

from rpe3d.config import ConfigError
from rpe3d.evaluate.origin import made_from
from rpe3d.evaluate.store import Store, check, locked, read, write_json

ROW = {"law": "rope", "length": 256, "status": "ok", "made_from": made_from({"settings": {"seed": 0}})}
CONTENT = {"schema": 1, "kind": "compare", "command": "x", "settings": {"seed": 0}, "rows": [ROW]}


def rows_of(file, content, overwrite):
    """The rows that a run on `file` takes up."""
    origin = made_from(content)
    store = Store(
        file=file, content={**content}, parts=("law", "length"), keys=[("rope", 256)], origin=lambda *_: origin
    )
    store.take(store.earlier(overwrite))
    return store.rows


@pytest.fixture
def file(tmp_path):
    write_json(tmp_path / "r.json", CONTENT)
    return tmp_path / "r.json"


def test_a_file_is_replaced_whole_or_not_at_all(file):
    with pytest.raises(ValueError, match="Out of range"):
        write_json(file, {**CONTENT, "bad": float("nan")})
    assert read(file) == CONTENT
    assert [p.name for p in file.parent.iterdir()] == ["r.json"]


def test_finished_rows_of_the_same_run_are_kept_and_others_are_not(file):
    assert rows_of(file, {**CONTENT, "command": "y", "rows": []}, overwrite=False) == {("rope", 256): ROW}
    write_json(file, {**CONTENT, "rows": [{**ROW, "status": "out of memory"}]})
    assert rows_of(file, CONTENT, overwrite=False) == {}
    assert rows_of(file.with_name("none"), CONTENT, overwrite=False) == {}


def test_results_of_something_else_are_refused_unless_they_may_go(file):
    other = {**CONTENT, "settings": {"seed": 1}}
    with pytest.raises(ConfigError, match=r"r\.json holds results of other settings: .* --overwrite"):
        check(file, other)
    assert rows_of(file, other, overwrite=True) == {}


def test_rows_that_were_merged_by_hand_are_refused(file):
    write_json(file, {**CONTENT, "rows": [{**ROW, "made_from": "something else"}]})
    with pytest.raises(ConfigError, match=r"rope at 256 in .*r\.json was not made from what the file says"):
        rows_of(file, CONTENT, overwrite=False)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 2, "kind": "compare"}', "\ud800"])
def test_a_file_of_something_else_is_never_overwritten(tmp_path, text):
    path = tmp_path / "mine"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    before = path.read_bytes()
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="holds no results of `rpe3d compare`"):
            rows_of(path, CONTENT, overwrite)
    assert path.read_bytes() == before


def test_a_second_writer_is_refused_while_the_first_is_there(file):
    with locked(file), pytest.raises(ConfigError, match=r"another run is writing to .*r\.json"), locked(file):
        pass
    with locked(file):
        pass
    assert [p.name for p in file.parent.iterdir()] == ["r.json"]


@pytest.mark.parametrize(("name", "problem"), [("", "not a regular file"), ("no/r.json", "there is no folder")])
def test_a_place_that_cannot_be_written_to_is_refused(tmp_path, name, problem):
    with pytest.raises(ConfigError, match=problem), locked(tmp_path / name):
        pass
    assert list(tmp_path.iterdir()) == []


def test_numbers_come_back_as_they_were(file):
    content = {**CONTENT, "rows": [{**ROW, "ppl": 1 / 3}]}
    write_json(file, content)
    assert json.loads(file.read_text()) == content


def test_a_place_where_no_lock_can_be_made_is_not_taken_for_another_run(file, monkeypatch):
    """On file systems such as /proc a lock that cannot be made looks like one that is held."""
    import filelock

    def held(self, **_):
        raise filelock.Timeout(str(file))

    monkeypatch.setattr(filelock.FileLock, "acquire", held)
    with pytest.raises(ConfigError, match=f"cannot write {file}"), locked(file):
        pass


def test_longppl_of_earlier_files_is_read_by_its_name_of_today(file):
    """The contract calls it `long_ppl`; rows were written as `longppl` before."""
    row = {name: value for name, value in ROW.items() if name != "length"}
    write_json(file, {**CONTENT, "rows": [{**row, "longppl": 7.5}, ROW]})
    assert read(file)["rows"] == [{**row, "long_ppl": 7.5}, ROW]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (None, "it has no list of rows"),
        ([1], "it has no list of rows"),
        ([{}], "a row has no 'law'"),
        ([{"law": "rope", "length": 256}], "a row has no 'status'"),
    ],
)
def test_a_file_with_damaged_rows_is_refused_in_a_sentence(file, rows, problem):
    write_json(file, {**CONTENT, "rows": rows})
    with pytest.raises(ConfigError, match=f"is damaged: {problem}"):
        rows_of(file, CONTENT, overwrite=False)
