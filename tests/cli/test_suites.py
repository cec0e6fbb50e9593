"""`rpe3d eval` on the suites of 2024 and later: made or read, resumed, told by their parts, drawn and scored again."""

from __future__ import annotations

import json

import pytest
from refusal import refusal

import tiny_lm
from rpe3d.cli import main
from rpe3d.evaluate.tasks import measure

pytestmark = pytest.mark.usefixtures("one_thread")
STORIES = "".join(
    f"{i} Ada went to hall {n * i}.\n" if i % 3 else f"{i} Where is Ada? \thall\t{i - 1}\n"
    for n in range(1, 4)
    for i in range(1, 7)
)
QUESTION = {
    "_id": "1", "domain": "Code", "sub_domain": "s", "difficulty": "hard", "length": "short", "question": "Which?",
    "choice_A": "a", "choice_B": "b", "choice_C": "c", "choice_D": "d", "answer": "A", "context": "It is a. " * 900,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("suites") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    (place / "babilong").mkdir()
    (place / "babilong" / "qa1_single-supporting-fact_test.txt").write_text(STORIES)
    (place / "longbench-v2").mkdir()
    questions = [QUESTION | {"answer": letter, "difficulty": kind} for letter, kind in (("A", "hard"), ("B", "easy"))]
    (place / "longbench-v2" / "data.json").write_text(json.dumps(questions))
    (place / "text.txt").write_text(" ".join(f"It is I, no. {i} of us." for i in range(900)))
    return place


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Answers of a few tokens: what a random model says is of no interest here."""
    from rpe3d.evaluate.tasks import generate

    answers = generate._answers
    monkeypatch.setattr(generate, "_answers", lambda model, chat, p, max_new, line: answers(model, chat, p, 3, line))


def run(folder, data, tasks, *argv):
    options = ("--data", data, "--texts", data / "text.txt", "--limit", 2, "--device", "cpu")
    return main(["eval", *map(str, (folder, "--tasks", tasks, *options, *argv))])


def test_every_suite_goes_from_questions_to_a_page_and_its_predictions_score_the_same(folder, data, tmp_path, capsys):
    pytest.importorskip("wonderwords", reason="needles have its words")
    tasks = "babilong:qa1,kv,infinitebench,longbench-v2:choices,longbench-v2:generation,needle"
    assert run(folder, data, tasks, "--law", "rope", "--length", "3k", "--report", tmp_path) == 0
    said = capsys.readouterr()
    results = json.loads((tmp_path / "eval.json").read_text())
    assert len(results["rows"]) == 8
    for row in results["rows"]:
        assert (row["status"], row["n"]) == ("ok", 2)
        file = tmp_path / row["predictions"]
        assert main(["score", "--suite", row["suite"], "--task", row["task"], str(file)]) == 0
        assert json.loads(capsys.readouterr().out)["score"] == row["score"]
    parts = {row["suite"]: row.get("parts", {}) for row in results["rows"]}
    assert set(parts["longbench-v2"]) == {"difficulty", "length", "domain"}
    assert set(parts["needle"]["depth"]) == {"0", "100"}
    assert set(parts["kv"]["depth"]) == {"0", "100"}
    for title in ("BABILong", "Key-value retrieval", "InfiniteBench", "LongBench v2, choices, by", "Needle"):
        assert title in " ".join(said.out.split())
    maps = {path.name for path in tmp_path.glob("*.png")}
    made = {f"infinitebench-{task}.png" for task in ("passkey", "number_string", "kv_retrieval")}
    assert maps == {"needle-number.png", "kv-fill.png"} | made
    names = {name: [part["name"] for part in some] for name, some in results["data"].items()}
    assert names["babilong:qa1"] == ["qa1_single-supporting-fact_test.txt", "text.txt"]
    assert names["needle:number"] == ["text.txt"]
    assert "kv:fill" not in names


def test_an_interrupted_run_resumes_with_the_choices_that_are_left(folder, data, tmp_path, monkeypatch, capsys):
    likely, calls = measure.log_likelihoods, []

    def once(*given):
        calls.append(given[2])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return likely(*given)

    monkeypatch.setattr(measure, "log_likelihoods", once)
    command = (folder, data, "longbench-v2", "--length", "2k", "--json", tmp_path / "r.json")
    assert run(*command) == 130
    assert run(*command) == 0
    assert len(calls) == 3  # one answer was kept, one was lost, and that one alone was asked again
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    lines = [json.loads(line) for line in (tmp_path / row["predictions"]).read_text().splitlines()]
    for line in lines:
        best = max(range(4), key=lambda i: line["log_likelihoods"][i])
        assert line["response"] == f"The correct answer is ({'ABCD'[best]})"
        assert line["judge"] == (line["pred"] == line["answer"])


def test_a_length_with_a_file_of_its_own_is_added_to_the_same_results(folder, tmp_path, capsys):
    place = tmp_path / "babilong" / "qa1"
    place.mkdir(parents=True)
    (tmp_path / "text.txt").write_text("unused")
    for name in ("1k", "2k"):
        record = {"input": f"Ada is in the {name}.", "question": "Where is Ada? ", "target": "office"}
        (place / f"{name}.json").write_text(json.dumps([record] * 3))
    for lengths, code in (("1k", 0), ("1k,2k", 0), ("2k,4k", 1)):
        assert run(folder, tmp_path, "babilong:qa1", "--length", lengths, "--json", tmp_path / "r.json") == code
    results = json.loads((tmp_path / "r.json").read_text())
    assert list(results["data"]) == ["babilong:qa1 at 1024", "babilong:qa1 at 2048"]
    assert [(row["length"], row["status"][:25]) for row in results["rows"]] == [
        (1024, "ok"), (2048, "ok"), (4096, "skipped: qa1 has no quest")
    ]  # fmt: skip


def test_what_is_missing_is_said_before_the_model_is_loaded(tmp_path, capsys):
    def fails(*argv):
        return refusal(capsys, "eval", tmp_path / "no-model", *argv)

    code, said, hint = fails("--tasks", "babilong:qa1", "--length", "4k")
    assert (code, said) == (1, "babilong:qa1 has no questions: --data is not given")
    assert "put them into DIR/babilong" in hint
    code, said, hint = fails("--tasks", "longbench-v2", "--data", tmp_path)
    assert said == f"{tmp_path} has no questions of longbench-v2:choices"
    assert f"put it into {tmp_path / 'longbench-v2'}" in hint
    assert fails("--tasks", "kv:fifty")[0] == 1
