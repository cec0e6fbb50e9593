"""`rpe3d score`: one line of JSON, or one line that says what is wrong."""

from __future__ import annotations

import json

import pytest
from refusal import refusal

from rpe3d.cli import main

GOOD = {"pred": "Paris", "answers": ["Paris"], "all_classes": None, "length": 5}


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_the_score_is_one_line_of_json(tmp_path, capsys):
    file = write(tmp_path / "a.jsonl", GOOD, {**GOOD, "pred": ""}, {**GOOD, "pred": "It is Paris\n\nno"})
    assert main(["score", "--suite", "longbench", "--task", "hotpotqa", str(file)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"suite": "longbench", "task": "hotpotqa", "score": 46.67, "n": 3}
    assert captured.err == "note: 1 of 3 predictions are empty\n"


def test_all_three_suites_are_scored(tmp_path, capsys):
    exam = write(tmp_path / "e.jsonl", {"gt": "18", "any_pred": "The answer is 18.", "evaluation": "exam"})
    needle = write(tmp_path / "r.jsonl", {"index": 0, "pred": "123 and", "outputs": ["123", "456"]})
    for suite, task, file, score in (("leval", "gsm100", exam, 100.0), ("ruler", "niah_multivalue", needle, 50.0)):
        assert main(["score", "--suite", suite, "--task", task, str(file)]) == 0
        assert json.loads(capsys.readouterr().out) == {"suite": suite, "task": task, "score": score, "n": 1}


@pytest.mark.parametrize(
    ("argv", "lines", "problem", "hint"),
    [
        (["longbench", "hotpot"], [GOOD], "longbench task 'hotpot' is not known", "did you mean 'hotpotqa'?"),
        (["longbenches", "lcc"], [GOOD], "suite 'longbenches' is not known", "did you mean 'longbench'?"),
        (["longbench", "lcc"], [GOOD, {"answers": ["x"]}], "record 2 has no field 'pred'", "LongBench's format"),
        (["longbench", "trec"], [GOOD], "trec needs the names of all classes", "LongBench's format"),
        (["longbench", "trec"], [{**GOOD, "all_classes": [1]}], "`all_classes` of record 1 is not a list of", "format"),
        (["leval", "tpo"], [GOOD], "record 1 has no field 'gt', but 'pred'", "L-Eval's format"),
        (["longbench", "lcc"], [GOOD, b'{"pred": "\xe9"}'], "line 2 of ", "UTF-8"),
        (["longbench", "lcc"], [b"not json"], "line 1 of ", "one object per line"),
        (["longbench", "lcc"], [], "a.jsonl is empty", "JSONL"),
    ],
)
def test_what_cannot_be_scored_is_said_in_one_line(tmp_path, capsys, argv, lines, problem, hint):
    file = write(tmp_path / "a.jsonl", *lines)
    code, said, advice = refusal(capsys, "score", "--suite", argv[0], "--task", argv[1], file)
    assert code == 1
    assert problem in said
    assert hint in advice


def test_a_missing_file_and_a_missing_option_are_said(tmp_path, capsys):
    code, said, _ = refusal(capsys, "score", "--suite", "longbench", "--task", "lcc", tmp_path / "none.jsonl")
    assert (code, said) == (1, f"cannot read {tmp_path / 'none.jsonl'}: No such file or directory")
    assert refusal(capsys, "score", "--task", "lcc", tmp_path / "none.jsonl")[0] == 2


def test_a_prediction_that_is_there_twice_counts_twice_and_is_said(tmp_path, capsys):
    """As in the benchmark's own script; two runs appended to one file look like one."""
    file = write(tmp_path / "a.jsonl", {**GOOD, "_id": "a"}, {**GOOD, "_id": "b"}, {**GOOD, "_id": "a"})
    assert main(["score", "--suite", "longbench", "--task", "hotpotqa", str(file)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["n"] == 3
    assert captured.err == "note: 1 of 3 predictions have the '_id' of an earlier one, and count as well\n"


def test_the_score_is_written_to_a_file_as_well(tmp_path, capsys):
    file, out = write(tmp_path / "a.jsonl", GOOD), tmp_path / "score.json"
    argv = ["score", "--suite", "longbench", "--task", "hotpotqa", str(file), "--json"]
    assert main([*argv, str(out)]) == 0
    assert json.loads(out.read_text()) == json.loads(capsys.readouterr().out)
    assert main([*argv, "-"]) == 0
    assert json.loads(capsys.readouterr().out)["score"] == 100.0
    assert refusal(capsys, *argv, tmp_path / "no" / "score.json")[1] == f"there is no folder {tmp_path / 'no'}"
