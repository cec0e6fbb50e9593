"""`rpe3d train`: what is asked for is what is trained, data goes to stdout, and what is wrong is said first."""

from __future__ import annotations

import json
import sys

import pytest
from refusal import refusal

import tiny_lm
from rpe3d.cli import main
from rpe3d.cli.train import add_arguments, given_settings

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("train") / "model")


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("sun moon star " * 100)
    return file


def given(*argv):
    from argparse import ArgumentParser

    parser = ArgumentParser()
    add_arguments(parser)
    return given_settings(parser.parse_args([*map(str, argv)]))


def fails(capsys, *argv):
    return refusal(capsys, "train", *argv)


def test_a_run_writes_its_folder_and_says_where_the_result_is(folder, text, tmp_path, capsys):
    out = tmp_path / "run"
    command = ["train", "lm", folder, "--data", text, "--context", "512", "--length", "64", "--steps", "2"]
    command += ["--batch", "2", "--chunk", "16", "--window", "16", "--reach", "48", "--device", "cpu", "--out", out]
    assert main([*map(str, command), "--minutes", "1e-9"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "note: out of time after step 1 of 2; the same command resumes there" in captured.err
    assert main([*map(str, command)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out / 'adapter'}\n"
    assert captured.err.splitlines()[-1].startswith(f"wrote {out / 'adapter'}, {out / 'log.csv'}, {out / 'loss.png'}; ")
    assert json.loads((out / "run.json").read_text())["parameters"] == {"chunk": 16, "window": 16, "reach": 48}
    assert main([*map(str, command)]) == 0
    assert f"note: {out / 'adapter'} is already finished" in capsys.readouterr().err


def test_options_go_before_the_recipe_and_the_rest_is_left_to_the_defaults(tmp_path):
    recipe = tmp_path / "r.json"
    recipe.write_text(
        json.dumps({"about": "it", "kind": "lm", "model": "m", "context": 64, "data": ["d"], "steps": 5, "law": "yarn"})
    )
    asked = given("lm", "--recipe", recipe, "--out", "o")
    assert asked == {"kind": "lm", "model": "m", "context": 64, "data": ["d"], "steps": 5, "law": "yarn"}
    asked = given(
        "lm", "n", "--recipe", recipe, "--out", "o", "--steps", "7", "--lora-plus", "--pack", "--context", "2k"
    )
    assert (asked["model"], asked["steps"], asked["method"], asked["pack"]) == ("n", 7, "lora-plus", True)
    assert asked["context"] == 2048
    asked = given(
        "lm", "--recipe", recipe, "--out", "o", "--law", "3d-rpe:chunk=8", "--window", "16", "--set", "reach=32"
    )
    assert (asked["law"], asked["parameters"]) == ("3d-rpe", {"chunk": 8, "window": 16, "reach": 32})


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["lm"], "MODEL is missing"),
        (["lm", "m", "--context", "8k"], "--data is missing"),
        (["lm", "m", "--data", "d"], "--context is missing"),
        (["lm", "m", "--data", "d", "--context", "8k", "--law", "rop"], "law 'rop' is not known"),
        (["lm", "m", "--data", "d", "--context", "8k", "--method", "x"], "method 'x' is not known"),
        (
            ["lm", "m", "--data", "d", "--context", "8k", "--method", "full", "--lora-plus"],
            "--lora-plus is given with --method full",
        ),
        (
            ["lm", "m", "--data", "d", "--context", "8k", "--law", "3d-rpe:chunk=16", "--chunk", "32"],
            "chunk is given twice: in --law 3d-rpe:chunk=16, and as an option",
        ),
        (["lm", "m", "--data", "/nowhere", "--context", "8k"], "there is no file or folder /nowhere"),
        (["lm", "--recipe", "none.json"], "cannot read the recipe none.json: No such file or directory"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(tmp_path, capsys, argv, problem):
    code, said, hint = fails(capsys, *argv, "--out", tmp_path / "run")
    assert code == 1
    assert said.startswith(problem)
    assert hint
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argv", "idle"),
    [
        (["sft", "--pack", "--text-field", "body"], ["--pack", "--text-field"]),
        (["lm", "--method", "full", "--rank", "4"], ["--rank"]),
        (["lm", "--pack", "--rank", "4"], []),
    ],
)
def test_an_option_that_has_no_effect_is_said(tmp_path, capsys, argv, idle):
    kind, *more = argv
    main(["train", kind, "/nowhere/at/all", "--context", "512", "--data", "x", "--out", str(tmp_path / "run"), *more])
    said = [line.split()[1] for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert said == idle


def test_a_recipe_of_the_other_kind_is_refused(tmp_path, capsys):
    (tmp_path / "r.json").write_text('{"kind": "sft"}')
    code, problem, hint = fails(capsys, "lm", "--recipe", tmp_path / "r.json", "--out", tmp_path / "run")
    assert (code, problem) == (1, f"{tmp_path / 'r.json'} is a recipe for sft")
    assert hint == "use `rpe3d train sft`"


@pytest.mark.parametrize("argv", [["rl", "m", "--out", "o"], ["lm", "m"], ["lm", "m", "--out", "o", "--steps", "x"]])
def test_wrong_usage_exits_with_2(capsys, argv):
    assert fails(capsys, *argv)[0] == 2


def test_tensorboard_is_asked_for_only_where_it_is(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    argv = ("lm", "m", "--data", "d", "--context", "8k", "--tensorboard", "--out", tmp_path / "run")
    code, problem, hint = fails(capsys, *argv)
    assert (code, problem) == (1, "tensorboard is not installed")
    assert "pip install tensorboard" in hint


@pytest.mark.parametrize("module", ["peft", "accelerate"])
def test_a_missing_extra_says_how_to_install_it(capsys, monkeypatch, module, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    code, problem, hint = fails(capsys, "lm", "m", "--out", tmp_path / "run")
    assert (code, problem, hint) == (1, f"{module} is not installed", "pip install 'rpe3d[train]'")
