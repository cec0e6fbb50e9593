"""What a user looks up: laws, tasks, completion; and how much a verb says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from refusal import refusal

import rpe3d
import tiny_lm
from rpe3d.cli import VERBS, main
from rpe3d.cli.completion import options
from rpe3d.evaluate.tasks import PROBES, SUITES, suite

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("listing") / "model")


def test_laws_are_listed_with_what_they_take(capsys):
    assert main(["laws"]) == 0
    out, err = capsys.readouterr()
    assert {line.split()[0] for line in out.splitlines() if line.strip()} >= set(rpe3d.laws())
    assert "rpe3d laws LAW" in err
    assert main(["laws", "3d-rpe"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in rpe3d.laws()["3d-rpe"].parameters)
    assert main(["laws", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)["laws"]
    assert told["yarn"]["parameters"] == rpe3d.laws()["yarn"].parameters
    assert refusal(capsys, "laws", "3drpe")[2].startswith("did you mean '3d-rpe'?")


def test_laws_print_as_a_table_and_stay_a_mapping():
    known = rpe3d.laws()
    assert isinstance(known, dict)
    assert dict(known)["rope"].description in str(known)
    lines = f"{known}".splitlines()
    assert lines[0].startswith("rope ")
    assert any(line.split()[:2] == ["chunk,", "window,"] for line in lines)
    assert repr(known) == str(known)


def test_the_package_shows_its_own_names_alone():
    """No helper, no typing name: what a user sees at `rpe3d.<TAB>`."""
    assert [name for name in dir(rpe3d) if not name.startswith("__")] == sorted(rpe3d.__all__)


def test_tasks_are_those_that_eval_takes(capsys):
    assert main(["tasks"]) == 0
    assert "niah_single_1" in capsys.readouterr().out
    assert main(["tasks", "--json", "-"]) == 0
    suites = json.loads(capsys.readouterr().out)["suites"]
    assert set(suites) == {*SUITES, *PROBES}
    for name in SUITES:
        assert list(suites[name]["tasks"]) == list(suite(name).TASKS)
        assert {task for task, usual in suites[name]["tasks"].items() if usual} == set(suite(name).DEFAULT)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash on this machine")
@pytest.mark.parametrize(
    ("words", "expected"),
    [(["rpe3d", "gen"], "generate"), (["rpe3d", "compare", "--lengt"], "--lengths"), (["rpe3d", "train", "l"], "lm")],
)
def test_bash_completes_verbs_and_options(capsys, words, expected):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    asked = f'COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _rpe3d; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True)
    assert expected in done.stdout.split()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_every_verb(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(verb in script for verb in VERBS)
    assert set(options()) == set(VERBS)


SMALL = ("--lengths", "256", "--windows", "1", "--measures", "ppl", "--device", "cpu")


@pytest.mark.parametrize("where", ["before", "after"])
def test_quiet_leaves_the_data_and_verbose_says_more(folder, capsys, where):
    def said(flag):
        argv = ["compare", str(folder), "--laws", "rope", *SMALL]
        assert main([flag, *argv] if where == "before" else [*argv, flag]) == 0
        return capsys.readouterr()

    quiet, verbose = said("--quiet"), said("-v")
    assert quiet.err.replace("\n", "") == "" or "Loading weights" in quiet.err  # transformers was imported before
    assert "rope" in quiet.out
    assert f"debug: loaded {folder}" in verbose.err


def test_quiet_is_quiet_in_a_process_of_its_own(folder):
    argv = [sys.executable, "-m", "rpe3d", "-q", "generate", str(folder), "hello", "--max-new", "2", "--device", "cpu"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_errors_stay_two_lines_and_verbose_shows_where_they_come_from(capsys):
    assert main(["-q", "laws", "x"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert main(["-v", "laws", "x"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert refusal(capsys, "-q", "laws", "-v")[:2] == (2, "--quiet and --verbose are given together")


def test_json_goes_to_stdout_and_leaves_no_file(folder, capsys, tmp_path, monkeypatch):
    """`--json -` wrote a file of that name."""
    monkeypatch.chdir(tmp_path)
    for verb in (
        ["compare", "--law", "rope", *SMALL],
        ["eval", "--laws", "rope", "--lengths", "256", "--tasks", "copy", "--copies", "1", "--device", "cpu"],
        ["bench", "--law", "rope", "--length", "256", "--new", "1", "--repeat", "1", "--device", "cpu"],
        ["doctor"],
    ):
        assert main([verb[0], str(folder), *verb[1:], "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["schema"] == 1
    assert list(tmp_path.iterdir()) == []
