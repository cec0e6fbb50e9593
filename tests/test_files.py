"""Files that are whole or absent, and locks: what every command that writes counts on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rpe3d import files
from rpe3d.config import ConfigError

REFUSALS = {"busy": ("it is taken", "wait"), "unwritable": ("it cannot be written", "look elsewhere")}


def test_a_file_is_replaced_at_the_end_and_kept_where_writing_fails(tmp_path):
    path = tmp_path / "a.txt"
    files.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError), files.replacing(path) as unfinished:
        unfinished.write_text("half\ud800", encoding="utf-8")
    assert path.read_text() == "old"
    files.write_text(path, "new")
    assert path.read_text() == "new"
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]


def test_a_number_that_json_does_not_have_leaves_the_file_as_it_was(tmp_path):
    files.write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a.json", {"a": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}


def test_of_several_files_all_or_none_are_replaced(tmp_path):
    (tmp_path / "b").mkdir()  # a folder that no file can replace
    (tmp_path / "c").write_text("old")
    with pytest.raises(ConfigError, match="cannot write the report: "), files.refusing("cannot write the report", "no"):
        files.write_all({"b": b"new", "c": b"new"}, tmp_path)
    assert (tmp_path / "c").read_text() == "old"
    assert files.write_all({"c": b"new", "d": b"new"}, tmp_path / "more") == [tmp_path / "more" / n for n in "cd"]
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["b", "c", "c", "d", "more"]


def test_a_folder_gets_its_name_when_it_is_filled(tmp_path):
    with files.new_folder(tmp_path / "out") as unfinished:
        (unfinished / "a").write_text("x")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "a").read_text() == "x"
    with pytest.raises(OSError, match="not empty"), files.new_folder(tmp_path / "out"):
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_lock_is_refused_to_a_second_holder_and_a_dead_ones_is_free(tmp_path):
    lock = tmp_path / ".lock"
    held = f"import filelock, os; filelock.FileLock({str(lock)!r}).acquire(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", held], check=False)
    assert lock.exists()
    taken = pytest.raises(ConfigError, match="it is taken: wait")
    with files.locked(lock, **REFUSALS), taken, files.locked(lock, **REFUSALS):
        pass
    assert not lock.exists()


def test_a_lock_in_what_is_not_a_folder_cannot_be_written(tmp_path):
    (tmp_path / "a").write_text("x")
    with pytest.raises(ConfigError, match="it cannot be written"), files.locked(tmp_path / "a" / ".lock", **REFUSALS):
        pass
