"""`rpe3d compare`: what goes where, what is refused, and what an interruption leaves (issue: nothing is lost)."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import pytest
from refusal import refusal

import rpe3d
import tiny_lm
from rpe3d.cli import main
from rpe3d.cli.arguments import law, laws
from rpe3d.config import ConfigError
from rpe3d.geometry import LawSpec

SMALL = ("--lengths", "256,512", "--windows", "1", "--copies", "1", "--passkeys", "1", "--device", "cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("compare") / "model")


def run(*argv):
    return main(["compare", *map(str, argv)])


def fails(capsys, *argv):
    return refusal(capsys, "compare", *argv)


def test_the_table_is_data_and_the_rest_is_not(folder, tmp_path, capsys):
    file = tmp_path / "r.json"
    assert run(folder, "--laws", "rope,3d-rpe:chunk=8,window=16,reach=64", *SMALL, "--json", file) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == f"wrote {file}"
    assert "\x1b" not in captured.out
    results = json.loads(file.read_text())
    assert (results["schema"], results["kind"]) == (1, "compare")
    assert set(results) == {"schema", "kind", "command", "model", "versions", "settings", "texts", "rows"}
    assert results["model"]["name"] == str(folder)
    assert results["model"]["pretrained"] == 256
    assert results["texts"][0]["name"] == "python-topics"
    words = captured.out.split()
    for row in results["rows"]:
        assert row["status"] == "ok"
        assert f"{row['copy_nll']:.2f}" in words
    assert results["rows"][3]["parameters"] == {
        "chunk": 8,
        "window": 16,
        "reach": 64,
        "focus": 2.0,
        "fade": 0.125,
        "sinks": 0,
    }
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_an_interrupted_run_leaves_a_valid_file_and_the_same_command_goes_on(folder, tmp_path, capsys, monkeypatch):
    compare = import_module("rpe3d.evaluate.compare")
    measure, measured = compare.measure_row, []

    def third_time_interrupted(bench, entry, length, law):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append((entry.label, length))
        return measure(bench, entry, length, law)

    monkeypatch.setattr(compare, "measure_row", third_time_interrupted)
    file = tmp_path / "r.json"
    command = (folder, "--laws", "rope,dca", *SMALL, "--json", file)
    assert run(*command) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
    left = json.loads(file.read_text())
    assert [(r["law"], r["length"]) for r in left["rows"]] == measured == [("rope", 256), ("rope", 512)]
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    measured[:] = []
    assert run(*command) == 0
    assert measured == [("dca", 256), ("dca", 512)]
    whole = json.loads(file.read_text())
    assert whole["rows"][:2] == left["rows"]
    assert [r["law"] for r in whole["rows"]] == ["rope", "rope", "dca", "dca"]


def test_laws_made_for_a_longer_context_are_measured_on_short_texts(folder, tmp_path):
    """What a server pays that is set up for long prompts and is sent short ones: static YaRN's rope is another."""
    of = {}
    for name, more in (("own", ()), ("long", ("--context", "2k"))):
        file = tmp_path / f"{name}.json"
        argv = ("--laws", "rope,yarn,3d-rpe:chunk=64,window=192", "--lengths", "256", "--measures", "ppl", *more)
        assert run(folder, *argv, "--windows", "1", "--device", "cpu", "--json", file) == 0
        of[name] = json.loads(file.read_text())
    assert "context" not in of["own"]["settings"]
    assert of["long"]["settings"]["context"] == 2048
    assert [row["context"] for row in of["long"]["rows"]] == [2048] * 3
    own, long = ([row["ppl"] for row in of[name]["rows"]] for name in ("own", "long"))
    assert [*own, long[0], long[2]] == pytest.approx([own[0]] * 5, rel=1e-6)
    assert abs(long[1] - own[0]) > 1e-3 * own[0]


def test_results_of_other_settings_are_refused_or_replaced_when_asked(folder, tmp_path, capsys):
    file = tmp_path / "r.json"
    command = (folder, "--laws", "rope", *SMALL, "--measures", "ppl", "--json", file)
    assert run(*command) == 0
    capsys.readouterr()
    before = file.read_text()
    code, problem, hint = fails(capsys, *command, "--seed", "1")
    assert (code, problem) == (1, f"{file} holds results of other settings")
    assert "--overwrite" in hint
    assert file.read_text() == before
    assert run(*command, "--seed", "1", "--overwrite") == 0
    assert json.loads(file.read_text())["settings"]["seed"] == 1


def test_a_second_run_on_the_same_file_is_refused(folder, tmp_path, capsys):
    from rpe3d.evaluate.store import locked

    with locked(tmp_path / "r.json"):
        code, problem, _ = fails(capsys, folder, "--laws", "rope", *SMALL, "--json", tmp_path / "r.json")
    assert (code, problem) == (1, f"another run is writing to {tmp_path / 'r.json'}")


def test_a_text_too_short_for_some_windows_is_named(folder, tmp_path, capsys):
    for name, n in (("short.txt", 300), ("long.txt", 2000)):
        (tmp_path / name).write_text("abcde " * (n // 6))
    argv = ("--measures", "ppl", "--windows", "2", "--lengths", "256,512", "--device", "cpu")
    texts = (tmp_path / "short.txt", tmp_path / "long.txt")
    assert run(folder, "--laws", "rope", *argv, "--json", tmp_path / "r.json", "--texts", *texts) == 0
    assert "note: short.txt has 300 tokens, so longer windows come from other texts" in capsys.readouterr().err
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [[w["text"] for w in row["windows"]] for row in rows] == [
        ["short.txt", "long.txt"],
        ["long.txt", "long.txt"],
    ]


def test_differences_have_intervals_from_three_windows_on_that_do_not_overlap(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "text.txt").write_text("abcde " * 220)
    argv = ("--laws", "rope,dca", "--against", "rope", "--lengths", "256,512", "--device", "cpu", "--texts")
    argv = (folder, *argv, tmp_path / "text.txt", "--measures", "ppl", "--windows")
    assert run(*argv, 3) == 0
    captured = capsys.readouterr()
    table = captured.out[captured.out.index("difference from rope (95 % interval)") :]
    assert [" .. " in line for line in table.splitlines() if "dca" in line] == [True, False]  # 512 tokens overlap
    assert "note: a difference has no interval where there are fewer than three windows" in captured.err
    assert run(*argv, 2) == 0
    assert " .. " not in capsys.readouterr().out


def test_the_report_lies_beside_its_results(folder, tmp_path, capsys, monkeypatch):
    from rpe3d.evaluate import report

    monkeypatch.setattr(
        report, "write_report", lambda results, place, against: [place / f"{len(results['rows'])}.html"]
    )
    out = tmp_path / "new" / "report"
    assert run(folder, "--laws", "rope", *SMALL, "--measures", "ppl", "--report", out) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"wrote {out / 'compare.json'}, {out / '2.html'}"
    assert json.loads((out / "compare.json").read_text())["kind"] == "compare"


def test_an_option_that_has_no_effect_is_said(folder, capsys):
    small = ("--lengths", "512", "--windows", "2", "--copies", "1", "--passkeys", "1", "--device", "cpu")
    assert run(folder, "--laws", "rope", *small, "--measures", "passkey", "--overwrite", "--seed", "1") == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert notes == [
        "note: --windows has no effect without ppl or longppl",
        "note: --copies has no effect without copy",
        "note: --overwrite has no effect without --json or --report",
    ]
    assert run(folder, "--laws", "rope", *small, "--against", "rope", "--json", "-") == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert notes == ["note: --against has no effect without a table: `--json -` prints the rows alone"]


def test_passkeys_need_no_text(folder, tmp_path, capsys):
    """They were refused at lengths that no text has, though they read none; `eval` asked them all the same."""
    (tmp_path / "t.txt").write_text("short")
    small = ("--laws", "rope", "--lengths", "512", "--passkeys", "1", "--device", "cpu", "--texts", tmp_path / "t.txt")
    assert run(folder, *small, "--measures", "passkey") == 0
    assert "--texts has no effect without ppl or copy or longppl" in capsys.readouterr().err
    assert fails(capsys, folder, *small, "--measures", "copy,passkey")[0] == 1


def test_a_report_names_a_text_whose_name_is_not_utf_8(folder, tmp_path):
    """Its page could not be written, once everything was measured."""
    pytest.importorskip("matplotlib")
    text, out = tmp_path / "t\udcff.txt", tmp_path / "report"
    text.write_text("one two three " * 100)
    small = ("--lengths", "256", "--windows", "1", "--measures", "ppl", "--device", "cpu")
    assert run(folder, "--laws", "rope", *small, "--texts", text, "--report", out) == 0
    assert "t\\udcff.txt" in (out / "report.html").read_text()


def test_longppl_is_shown_with_its_key_tokens_and_what_found_them(folder, tmp_path, capsys, monkeypatch):
    """A random model has too few key tokens for a number; a text of its own is in tests/evaluate/test_longppl.py."""
    monkeypatch.setenv("COLUMNS", "160")
    argv = (folder, "--laws", "rope,streaming-llm", "--lengths", "512", "--windows", "1", "--device", "cpu")
    assert run(*argv, "--measures", "longppl", "--keys", tmp_path / "k.json", "--against", "rope") == 0
    captured = capsys.readouterr()
    assert "passkey   longppl   key tokens   tokens/s" in captured.out
    assert "none" in captured.out
    assert f"key tokens at 512 were found by {folder} under rope, against a context of 128 tokens" in captured.err
    assert json.loads((tmp_path / "k.json").read_text())["kind"] == "keys"
    assert run(*argv, "--measures", "ppl") == 0
    assert "longppl" not in capsys.readouterr().out


def test_fixed_keys_are_shown_with_the_windows_that_they_were_found_in(folder, tmp_path, capsys):
    """A random model finds too few key tokens, so the file marks some text by hand; the same command resumes."""
    keys, file = tmp_path / "k.json", tmp_path / "r.json"
    argv = (folder, "--windows", "1", "--device", "cpu", "--measures", "longppl", "--keys", keys)
    assert run(*argv, "--laws", "rope", "--lengths", "256") == 0
    content = json.loads(keys.read_text())
    content["keys"]["256"]["spans"] = {"python-topics": [[0, 10**9]]}
    keys.write_text(json.dumps(content))
    longer = (*argv, "--laws", "dca", "--lengths", "512", "--json", file)
    for _ in range(2):
        capsys.readouterr()
        assert run(*longer, "--fixed-keys") == 0
        said = f"note: key tokens at 512 were found by {folder} under rope in windows of 256 tokens, against a context"
        assert said in capsys.readouterr().err
    (row,) = json.loads(file.read_text())["rows"]
    assert row["key_tokens"] == 512 - 128
    assert fails(capsys, *longer)[:2] == (1, f"{file} holds results of other settings")
    assert json.loads(keys.read_text()) == content


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--keys", "k.json"], "--keys is given without longppl"),
        (["--fixed-keys", "--measures", "longppl"], "--fixed-keys is given without --keys"),
        (
            ["--fixed-keys", "--measures", "longppl", "--keys", "none.json"],
            "none.json does not exist, and --fixed-keys",
        ),
        (["--laws", "ropes"], "law 'ropes' is not known"),
        (["--laws", "yarn:chunk=8"], "law 'yarn' has no parameter 'chunk'"),
        (["--laws", "3d-rpe:chunk"], "'chunk' in '3d-rpe:chunk' has no value"),
        (["--laws", "none.json"], "cannot read the law file none.json: No such file or directory"),
        (["--lengths", "255"], "length is 255, outside [256, 2147483648]"),
        (["--lengths", "1M"], "no text is as long as a window of 1048576 tokens: the longest, python-topics, has"),
        (["--measures", "speed"], "measure 'speed' is not known"),
        (["--protocol", "press"], "protocol 'press' is not known"),
        (["--texts", "none.txt"], "cannot read none.txt: No such file or directory"),
        (["--json", "none/r.json"], "there is no folder"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_looked_for(capsys, argv, problem):
    code, said, hint = fails(capsys, "/nowhere/at/all", *argv)
    assert code == 1
    assert said.startswith(problem)
    assert hint


def test_layers_that_the_model_lacks_are_refused_before_anything_is_measured(folder, tmp_path, capsys):
    file = tmp_path / "r.json"
    argv = (folder, "--laws", "rope,3d-rpe:chunk=16,window=32,reach=64,far=2,full=99", *SMALL, "--json", file)
    code, said, hint = fails(capsys, *argv)
    assert (code, said) == (1, "the law names layer 99, but the model has layers 0 to 1")
    assert hint == "choose from 0, 1"
    assert not file.exists()


def test_a_model_that_is_not_there_is_said_after_everything_else(capsys):
    assert fails(capsys, "/nowhere/at/all")[:2] == (1, "there is no file or folder /nowhere/at/all")


def test_a_file_that_is_no_results_file_is_kept(folder, tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    for extra in ([], ["--overwrite"]):
        code, problem, _ = fails(capsys, folder, *SMALL, "--json", tmp_path / "mine", *extra)
        assert (code, problem) == (1, f"{tmp_path / 'mine'} exists but holds no results of `rpe3d compare`")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("columns", ["80", None])
def test_differences_fit_a_terminal_and_stay_whole_in_a_pipe(folder, capsys, monkeypatch, columns):
    """At 80 columns the law and the length were gone."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    near = "near=3d-rpe:chunk=8,window=16,reach=64"
    assert run(folder, "--laws", f"rope,{near}", "--lengths", "256,512", "--windows", "3", "--copies", "3",
               "--passkeys", "3", "--against", "rope", "--device", "cpu") == 0  # fmt: skip
    table = capsys.readouterr().out.split("from rope")[1].splitlines()
    rows = [line.split() for line in table if line.split()[:1] == ["near"]]
    assert [row[:2] for row in rows] == [["near", "256"], ["near", "512"]] * (1 if columns is None else 0) + (
        [["near", "256"]] * 4 + [["near", "512"]] * 4 if columns else []
    )
    assert all(".." in row for row in rows)
    assert columns is None or max(map(len, table)) <= 80


def test_a_checkpoint_of_its_own_law_is_told_that_it_is_replaced(folder, tmp_path, capsys):
    out = tmp_path / "long"
    assert main(["extend", str(folder), "--context", "1k", "--out", str(out)]) == 0
    few = ("--lengths", "256", "--windows", "1", "--measures", "ppl", "--device", "cpu")
    assert run(out, "--laws", "rope", *few) == 0
    said = capsys.readouterr().err
    assert "the checkpoint's own law (3d-rpe from 256 to 1024 tokens, chunk 16, window 80" in said
    assert "is replaced by the laws that are measured" in said
    assert main(["eval", str(out), "--tasks", "copy", "--copies", "1", "--length", "512", "--device", "cpu"]) == 0
    assert "is replaced" not in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--lengths", "8q"], ["--windows", "x"], ["--dtype", "int8"], ["--lengths", ""]])
def test_wrong_usage_exits_with_2_without_torch(capsys, argv):
    assert fails(capsys, "default", *argv)[0] == 2


def test_laws_are_names_names_with_parameters_and_files(tmp_path):
    file = tmp_path / "mine.json"
    made = rpe3d.make_law("3d-rpe", pretrained=256, context=1024, head_dim=16, reach=128)
    file.write_text(json.dumps({**made.to_dict(), "measured": {"anything": 1}}))
    given = "rope, 3d-rpe:chunk=1k,window=2560,yarn,yarn:beta_fast=16.5,3d-rpe-definition:interpolate=true"
    assert laws(f"{given},{file}") == [
        LawSpec(label="rope", name="rope", parameters={}),
        LawSpec(label="3d-rpe:chunk=1k,window=2560", name="3d-rpe", parameters={"chunk": 1024, "window": 2560}),
        LawSpec(label="yarn", name="yarn", parameters={}),
        LawSpec(label="yarn:beta_fast=16.5", name="yarn", parameters={"beta_fast": 16.5}),
        LawSpec(
            label="3d-rpe-definition:interpolate=true", name="3d-rpe-definition", parameters={"interpolate": True}
        ),
        LawSpec(
            label="mine",
            name="3d-rpe",
            parameters={"chunk": 16, "window": 80, "reach": 128, "focus": 2.0, "fade": 0.125, "sinks": 0},
            pretrained=256,
            context=1024,
        ),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"name": "rope"}', '{"name": 1, "pretrained": 2}', '{"name": "rope", "pretrained": null}']
)
def test_a_file_that_is_no_law_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a law file: pass a file that `rpe3d tune` wrote"):
        law(str(tmp_path / "x.json"))


def test_a_law_file_of_another_model_is_refused(folder, tmp_path, capsys):
    made = rpe3d.make_law("3d-rpe", pretrained=128, context=1024, head_dim=16)
    (tmp_path / "x.json").write_text(made.json)
    code, problem, hint = fails(capsys, folder, "--laws", tmp_path / "x.json", *SMALL)
    assert (code, problem) == (1, "x was made for a model of 128 positions, but this one has 256")
    assert "rpe3d tune" in hint


@pytest.mark.parametrize("module", ["rich", "transformers"])
def test_a_missing_extra_says_how_to_install_it(capsys, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    code, problem, _ = fails(capsys, "default")
    assert (code, problem) == (1, f"{module} is not installed")
