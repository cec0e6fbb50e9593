"""`rpe3d eval`: what goes where, what is refused before the model is loaded, and what an interruption leaves."""

from __future__ import annotations

import json
import sys

import pytest
from refusal import refusal

import rpe3d
import tiny_lm
from launched import launched
from rpe3d.cli import main
from rpe3d.cli.eval import finish
from rpe3d.evaluate.tasks.longbench import DEFAULT

pytestmark = pytest.mark.usefixtures("one_thread")
TASKS = "longbench:hotpotqa,leval:gsm100,passkey"
SMALL = ("--length", "1k", "--passkeys", "1", "--device", "cpu", "--batch", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("eval") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    place = tmp_path_factory.mktemp("data")
    hotpot = [{"context": "C" * i, "input": "Q", "answers": ["A"], "all_classes": None, "length": i} for i in (5, 6, 7)]
    (place / "hotpotqa.jsonl").write_text("\n".join(map(json.dumps, hotpot)))
    (place / "leval").mkdir()
    gsm = {"input": "1 + 1", "instructions": ["?"], "outputs": ["2"], "evaluation": "exam"}
    (place / "leval" / "gsm100.jsonl").write_text(json.dumps(gsm))
    return place


@pytest.fixture
def quick(monkeypatch):
    """Answers of a few tokens: what a random model says is of no interest here."""
    from rpe3d.evaluate.tasks import generate

    answers = generate._answers
    monkeypatch.setattr(generate, "_answers", lambda model, chat, p, max_new, line: answers(model, chat, p, 3, line))


def run(*argv):
    return main(["eval", *map(str, argv)])


def fails(capsys, *argv):
    return refusal(capsys, "eval", *argv)


def test_tables_are_data_and_predictions_lie_beside_the_results(folder, data, tmp_path, capsys, quick):
    command = (folder, "--tasks", TASKS, "--data", data, "--law", "rope,dca", *SMALL, "--report", tmp_path / "r")
    assert run(*command) == 0
    captured = capsys.readouterr()
    assert "rope at 1k" in captured.out
    assert "3D-RPE-LLaMA2-7B-Chat" in captured.out
    assert "(quoted)" in captured.out
    assert "note: model has no chat template, so prompts are used as they are" in captured.err
    assert captured.err.splitlines()[-1].startswith(f"wrote {tmp_path / 'r' / 'eval.json'}, ")
    results = json.loads((tmp_path / "r" / "eval.json").read_text())
    assert (results["schema"], results["kind"]) == (1, "eval")
    assert [(row["law"], row["suite"], row["n"]) for row in results["rows"]] == [
        (law, suite, n) for law in ("rope", "dca") for suite, n in (("longbench", 3), ("leval", 1), ("passkey", 1))
    ]
    for row in results["rows"]:
        file = tmp_path / "r" / row["predictions"]
        assert len(file.read_text().splitlines()) == row["n"]
        if row["suite"] != "passkey":
            assert main(["score", "--suite", row["suite"], "--task", row["task"], str(file)]) == 0
            assert json.loads(capsys.readouterr().out)["score"] == row["score"]
    before = results["rows"]
    assert run(*command) == 0
    assert json.loads((tmp_path / "r" / "eval.json").read_text())["rows"] == before


def test_a_table_that_is_too_wide_has_its_tasks_going_down_and_no_number_is_broken(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    row = {"law": "3d-rpe", "length": 32768, "suite": "longbench", "n": 4, "status": "ok"}
    scores = [11.25 + n for n, _ in enumerate(DEFAULT)]
    rows = [row | {"task": task, "score": score} for task, score in zip(DEFAULT, scores, strict=True)]
    finish({"rows": rows}, None, None)
    out = capsys.readouterr().out
    lines = out[out.index("Supplement") :].splitlines()
    assert [sum(f" {score:.2f} " in line for line in lines) for score in scores] == [1] * len(scores)
    assert not any(f" {scores[0]:.2f} " in line and f" {scores[1]:.2f} " in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_an_interruption_leaves_what_was_done_and_the_same_command_goes_on(folder, data, tmp_path, capsys, monkeypatch):
    from rpe3d.evaluate.tasks import generate

    asked = []

    def second_time_interrupted(model, chat, prompts, max_new, line_only):
        if len(asked) == 1:
            asked.append("stop")
            raise KeyboardInterrupt
        asked.extend(prompts)
        return ["A"] * len(prompts)

    monkeypatch.setattr(generate, "_answers", second_time_interrupted)
    file = tmp_path / "r.json"
    command = (folder, "--tasks", "longbench:hotpotqa", "--data", data, *SMALL, "--batch", "1", "--json", file)
    assert run(*command) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    assert len((tmp_path / "r.predictions/stock-1024/longbench/hotpotqa.jsonl").read_text().splitlines()) == 1
    assert run(*command) == 0
    assert len(asked) == 4
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["score"], row["n"]) == (0.0, 3)  # "A" is an article, which upstream strips


def test_a_row_that_cannot_be_made_is_said_and_the_exit_status_tells(folder, data, tmp_path, capsys, quick):
    command = (folder, "--tasks", "longbench:hotpotqa", "--data", data, *SMALL, "--length", "512,1k")
    assert run(*command, "--json", tmp_path / "r.json") == 1
    captured = capsys.readouterr()
    assert "stock at 1k" in captured.out
    assert "note: stock at 512, longbench:hotpotqa: skipped: LongBench has no room" in captured.err
    statuses = [row["status"] for row in json.loads((tmp_path / "r.json").read_text())["rows"]]
    assert [status.split(":")[0] for status in statuses] == ["skipped", "ok"]


def test_a_law_file_does_not_change_what_the_checkpoint_says_of_itself(tmp_path):
    """An extended checkpoint's length is that of its law, not the pretrained one."""
    rpe3d.extend(tiny_lm.model(), "3d-rpe", context=1024).save_pretrained(tmp_path / "model")
    tiny_lm.tokenizer().save_pretrained(tmp_path / "model")
    law = rpe3d.make_law("dca", pretrained=256, context=1024, head_dim=16)
    (tmp_path / "law.json").write_text(json.dumps(law.to_dict()))
    command = ("--tasks", "passkey", "--passkeys", "1", "--device", "cpu", "--json", tmp_path / "r.json")
    assert run(tmp_path / "model", *command, "--law", tmp_path / "law.json") == 0
    results = json.loads((tmp_path / "r.json").read_text())
    assert [row["length"] for row in results["rows"]] == [1024]
    assert results["model"]["law"]["name"] == "3d-rpe"


def test_a_template_without_a_system_turn_is_said_where_one_is_needed(data, tmp_path, capsys, quick):
    tiny_lm.save(tmp_path / "model")
    tokenizer = tiny_lm.tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages }}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    note = "note: the chat template has no system turn, so L-Eval's instructions open the user's turn"
    for task, said in (("leval:gsm100", True), ("longbench:hotpotqa", False)):
        assert run(tmp_path / "model", "--tasks", task, "--data", data, *SMALL) == 0
        assert (note in capsys.readouterr().err) == said


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--tasks", "longbenchs"], "suite of tasks 'longbenchs' is not known"),
        (["--tasks", "leval:toefl"], "leval task 'toefl' is not known"),
        (["--tasks", "passkey", "--law", "ropes"], "law 'ropes' is not known"),
        (["--tasks", "passkey", "--length", "100"], "length is 100, outside [256,"),
        (["--tasks", "passkey", "--protocol", "press"], "protocol 'press' is not known"),
        (["--tasks", "passkey", "--limit", "0"], "limit is 0, outside [1,"),
        (["--tasks", "passkey", "--context", "64k"], "--context is given without --law"),
        (["--tasks", "passkey", "--law", "rope", "--length", "8k", "--context", "4k"], "length 8192 is beyond the"),
        (["--tasks", "passkey", "--chat", "lama2"], "chat 'lama2' is not known"),
        (["--tasks", "passkey", "--json", "none/r.json"], "there is no folder none"),
        (["--tasks", "longbench:lcc", "--data", "none"], "there is no folder none"),
        (["--tasks", "ppl:pg19"], "ppl:pg19 has no texts: --data is not given"),
        (["--tasks", "ppl", "--texts", "none.txt"], "cannot read none.txt"),
        (["--tasks", "ppl", "--length", "1M"], "no text is as long as a window of 1048576 tokens"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_looked_for(capsys, argv, problem):
    code, said, hint = fails(capsys, "/nowhere/at/all", *argv)
    assert code == 1
    assert said.startswith(problem)
    assert hint


def test_a_data_folder_of_another_benchmark_is_refused(data, capsys):
    code, said, hint = fails(capsys, "/nowhere/at/all", "--tasks", "longbench:lcc", "--data", data / "leval")
    assert (code, said) == (1, f"{data / 'leval'} has no questions of longbench:lcc; it has gsm100.jsonl")
    assert "THUDM/LongBench" in hint


def test_a_file_that_is_no_results_file_is_kept(tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    code, said, _ = fails(capsys, "/nowhere/at/all", "--tasks", "passkey", "--json", tmp_path / "mine", "--overwrite")
    assert (code, said) == (1, f"{tmp_path / 'mine'} exists but holds no results of `rpe3d eval`")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_model_without_a_chat_template_is_said_where_one_is_asked_for(folder, capsys):
    code, said, hint = fails(capsys, folder, "--tasks", "passkey", "--chat", "template", *SMALL)
    assert (code, said) == (1, "model has no chat template")
    assert "--chat" in hint


def test_layers_that_the_model_lacks_are_refused_before_anything_is_measured(folder, tmp_path, capsys):
    file = tmp_path / "r.json"
    laws = "rope,3d-rpe:chunk=16,window=32,reach=64,far=2,full=99"
    said = fails(capsys, folder, "--tasks", "passkey", "--laws", laws, *SMALL, "--json", file)
    assert said[:2] == (1, "the law names layer 99, but the model has layers 0 to 1")
    assert not file.exists()


@pytest.mark.parametrize("argv", [["--tasks"], [], ["--tasks", "ppl", "--length", "8q"]])
def test_wrong_usage_exits_with_2(capsys, argv):
    assert fails(capsys, "default", *argv)[0] == 2


@pytest.mark.parametrize("module", ["jieba", "wonderwords"])
def test_a_missing_package_says_how_to_install_it(capsys, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    task = {"jieba": "longbench:dureader", "wonderwords": "ruler:vt"}[module]
    code, said, hint = fails(capsys, "/nowhere/at/all", "--tasks", task)
    assert (code, said, hint) == (1, f"{module} is not installed", "pip install 'rpe3d[eval]'")


@pytest.mark.usefixtures("one_thread")
def test_two_processes_give_the_rows_and_predictions_of_one(folder, data, tmp_path):
    """The batches are dealt out, and a refusal of the process that writes is everybody's."""
    argv = [folder, "--tasks", "longbench:hotpotqa,passkey", "--data", data]
    argv += ["--length", "1k", "--passkeys", "3", "--device", "cpu", "--json"]
    assert run(*argv, tmp_path / "1.json") == 0
    codes, said = launched(2, "eval", *argv, tmp_path / "2.json")
    assert codes == [0, 0], said
    rows, lines = {}, {}
    for count in (1, 2):
        timed = ("seconds", "samples_per_minute", "predictions")
        found = json.loads((tmp_path / f"{count}.json").read_text())["rows"]
        rows[count] = [{key: value for key, value in row.items() if key not in timed} for row in found]
        lines[count] = [sorted((tmp_path / row["predictions"]).read_text().splitlines()) for row in found]
    assert rows[1] == rows[2]
    assert lines[1] == lines[2]
    codes, said = launched(2, "eval", *argv, tmp_path / "2.json", "--seed", "1")
    assert codes == [1, 1]
    assert all("holds results of other settings\nhint: " in words for words in said)


def test_longppl_is_that_of_compare_on_the_same_key_tokens(folder, tmp_path, capsys):
    """Key tokens of any evaluator: here every tenth token, since a random model finds none."""
    keys = tmp_path / "keys.json"
    shared = ("--windows", "2", "--device", "cpu", "--keys", keys)
    compare = ("compare", folder, "--laws", "rope,dca", "--lengths", "512", "--measures", "longppl", *shared)
    assert main([*map(str, compare)]) == 0
    content = json.loads(keys.read_text())
    for window in content["keys"]["512"]["windows"]:
        window["keys"] = list(range(130, 512, 10))
    keys.write_text(json.dumps(content))
    assert main([*map(str, (*compare, "--json", tmp_path / "c.json"))]) == 0
    asked = (folder, "--tasks", "longppl", "--law", "rope,dca", "--length", "512", *shared)
    assert run(*asked, "--json", tmp_path / "e.json") == 0
    compared, found = (json.loads((tmp_path / name).read_text())["rows"] for name in ("c.json", "e.json"))
    assert [row["score"] for row in found] == [row["long_ppl"] for row in compared]
    assert "and LongPPL" in capsys.readouterr().out
    assert run(*asked, "--json", tmp_path / "e.json") == 0  # resumed
    assert json.loads((tmp_path / "e.json").read_text())["rows"] == found
    capsys.readouterr()
    content["keys"]["512"]["windows"][1]["keys"].pop()
    keys.write_text(json.dumps(content))
    code, problem, _ = fails(capsys, *asked, "--json", tmp_path / "e.json")
    assert (code, problem) == (1, f"{tmp_path / 'e.json'} holds results of other data")


def test_an_option_that_has_no_effect_is_said(folder, data, tmp_path, capsys, quick):
    idle = ("--copies", "1", "--limit", "1", "--data", data, "--texts", data / "hotpotqa.jsonl", "--chat", "none")
    assert run(folder, "--tasks", "passkey", *SMALL, *idle, "--chat-rules", "authors", "--overwrite") == 0
    said = [line.split()[1] for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert sorted(said) == ["--chat", "--chat-rules", "--copies", "--data", "--limit", "--overwrite", "--texts"]
    used = (
        "--limit",
        "1",
        "--data",
        data,
        "--texts",
        data / "hotpotqa.jsonl",
        "--windows",
        "1",
        "--json",
        tmp_path / "r",
    )
    assert run(folder, "--tasks", f"{TASKS},copy", *SMALL, *used, "--seed", "1", "--overwrite") == 1  # a short text
    said = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert said == ["note: --windows has no effect without ppl or longppl"]


def test_key_tokens_of_another_tokenizer_serve_eval_as_they_serve_compare(folder, tmp_path, capsys):
    """A file that `compare --keys` took was refused by `eval --keys`."""
    keys, text = tmp_path / "keys.json", tmp_path / "t.txt"
    text.write_text("one two three four " * 100)
    shared = ("--windows", "2", "--device", "cpu", "--keys", keys, "--texts", text)
    compare = ("compare", folder, "--laws", "rope,dca", "--lengths", "512", "--measures", "longppl", *shared)
    assert main([*map(str, compare)]) == 0
    content = json.loads(keys.read_text()) | {"tokenizer": "another"}
    content["keys"]["512"]["spans"] = {"t.txt": [[100, 300], [700, 900]]}
    keys.write_text(json.dumps(content))
    assert main([*map(str, (*compare, "--json", tmp_path / "c.json"))]) == 0
    asked = (folder, "--tasks", "longppl", "--law", "rope,dca", *shared, "--json", tmp_path / "e.json", "--length")
    assert run(*asked, "512") == 0
    compared, found = (json.loads((tmp_path / name).read_text())["rows"] for name in ("c.json", "e.json"))
    assert [row["score"] for row in found] == [row["long_ppl"] for row in compared]
    assert run(*asked, "384,512") == 0  # the same keys, of which another length has others
    rows = json.loads((tmp_path / "e.json").read_text())["rows"]
    assert [row for row in rows if row["length"] == 512] == found
    assert len(rows) == 4
    del content["keys"]["512"]["spans"]
    keys.write_text(json.dumps(content))
    capsys.readouterr()
    code, problem, _ = fails(capsys, *asked, "512")
    assert (code, problem) == (1, f"{keys} holds key tokens of another tokenizer")


def test_longppl_without_key_tokens_is_refused(folder, tmp_path, capsys):
    code, problem, _ = fails(capsys, folder, "--tasks", "longppl", "--device", "cpu")
    assert (code, problem) == (1, "longppl and --keys need each other")
    code, problem, hint = fails(capsys, folder, "--tasks", "longppl", "--device", "cpu", "--keys", tmp_path / "none")
    assert (code, problem) == (1, f"{tmp_path / 'none'} does not exist")
    assert "rpe3d compare" in hint
