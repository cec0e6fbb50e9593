"""`rpe3d tune`: what it says, the law file it writes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from refusal import refusal

import rpe3d
import tiny_lm
from rpe3d.cli import main
from rpe3d.cli.arguments import law
from rpe3d.evaluate import effective, tune
from rpe3d.evaluate.effective import Distance
from rpe3d.geometry.laws.bounded import FADE, FOCUS
from rpe3d.models.load import load

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("tune") / "model")


def run(*argv):
    return main(["tune", *map(str, argv)])


def fails(capsys, *argv):
    return refusal(capsys, "tune", *argv)


def copies_up_to(reach):
    """A measurement in which repetitions cost nothing up to a distance, and everything beyond."""
    steps = [32 * i for i in range(1, 9)]
    return lambda *_: [Distance(distance=d, first=2.0, again=0.1 if d <= reach else 2.0, text=2.5) for d in steps]


def test_the_law_file_holds_the_choice_and_its_evidence(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(effective, "measure_distances", copies_up_to(160))
    out = tmp_path / "law.json"
    assert run(folder, "--context", "1k", "--out", out, "--seed", "3", "--trials", "2", "--device", "cpu") == 0
    captured = capsys.readouterr()
    content = json.loads(out.read_text())
    measured = content.pop("measured")
    made = rpe3d.make_law(**content)
    assert (made.name, made.pretrained, made.context) == ("3d-rpe", 256, 1024)
    assert (made.chunk, made.window, made.reach) == (40, 80, 120)
    assert (measured["effective"], measured["seeds"]) == (160, [3, 4])
    assert measured["model"]["name"] == str(folder)
    assert measured["distances"][0] == {"distance": 32, "first": 2.0, "again": 0.1, "text": 2.5}
    assert "copies from up to 160 of its 256 positions" in captured.out
    assert "reach 120" in captured.out
    assert captured.err.splitlines()[-1].startswith(f"wrote {out}")
    given = law(str(out))
    assert (given.label, given.name, given.pretrained) == ("law", "3d-rpe", 256)
    assert given.parameters == {"chunk": 40, "window": 80, "reach": 120, "focus": FOCUS, "fade": FADE, "sinks": 0}


def test_the_first_token_keeps_its_weight_where_that_costs_less(folder, tmp_path, capsys, monkeypatch):
    usual = copies_up_to(256)

    def measure(model, *_):
        law = rpe3d.law_of(model)
        return [replace(one, again=one.again - 0.01 * law.sinks) if law else one for one in usual()]

    monkeypatch.setattr(effective, "measure_distances", measure)
    out = tmp_path / "law.json"
    assert run(folder, "--context", "1k", "--out", out, "--trials", "3", "--device", "cpu") == 0
    content = json.loads(out.read_text())
    assert (content["chunk"], content["window"], content["reach"]) == (64, 64, 128)
    assert (content["focus"], content["fade"], content["sinks"]) == (1.0, 0.5, 1)
    weighed = content["measured"]["weighed"]
    assert weighed["even"] == {"length": 512, "seeds": [0, 1], "text": 2.5, "again": pytest.approx(0.1)}
    assert weighed["anchored"]["again"] == pytest.approx(0.09)
    said = " ".join(capsys.readouterr().out.split())
    assert "reach 128: half of the pretrained length" in said
    assert "at 512 tokens text and repetitions cost 2.500 + 0.100 nats where all far keys fade, 2.500 + 0.090" in said


def test_a_context_that_the_model_uses_anyway_is_exact(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(effective, "measure_distances", copies_up_to(256))
    out = tmp_path / "law.json"
    assert run(folder, "--context", "256", "--out", out, "--device", "cpu") == 0
    assert "all of it is exact RoPE" in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert content["measured"]["weighed"] == {}
    assert (content["window"], content["reach"], content["focus"], content["fade"]) == (192, 256, 0.0, 0.0)


def test_texts_that_are_too_short_for_more_leave_the_defaults(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(effective, "measure_distances", copies_up_to(256))
    text = tmp_path / "short.txt"
    text.write_text(("A text of a few words. " * 14)[:320])  # a byte is a token
    out = tmp_path / "law.json"
    assert run(folder, "--context", "1k", "--out", out, "--texts", text, "--device", "cpu") == 0
    assert "sinks 0: the defaults, since the texts are too short to try another" in " ".join(
        capsys.readouterr().out.split()
    )
    assert json.loads(out.read_text())["measured"]["weighed"] == {}


def test_compare_takes_the_law_file(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(effective, "measure_distances", copies_up_to(128))
    out = tmp_path / "mine.json"
    assert run(folder, "--context", "1k", "--out", out, "--device", "cpu") == 0
    argv = ["--lengths", "512", "--windows", "1", "--measures", "ppl", "--device", "cpu"]
    file = tmp_path / "r.json"
    assert main(["compare", str(folder), "--laws", f"3d-rpe,{out}", *argv, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["law"] for row in rows] == ["3d-rpe", "mine"]
    assert rows[1]["parameters"] == {"chunk": 32, "window": 64, "reach": 96, "focus": FOCUS, "fade": FADE, "sinks": 0}


def test_a_model_that_copies_nothing_gets_the_rule_of_thumb_and_is_told_so(folder, tmp_path, capsys):
    """Random weights, measured for real."""
    out = tmp_path / "law.json"
    assert run(folder, "--context", "1k", "--out", out, "--trials", "1", "--device", "cpu") == 0
    assert "the rule of thumb stands" in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert content.pop("measured")["effective"] == 0
    assert (content["chunk"], content["window"], content["reach"]) == (16, 80, 128)


def test_a_law_file_is_replaced_only_when_asked(folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "law.json"
    out.write_text("mine")
    code, problem, hint = fails(capsys, folder, "--context", "1k", "--out", out)
    assert (code, problem, hint) == (1, f"{out} already exists", "pass another name to --out, or add --overwrite")
    assert out.read_text() == "mine"
    monkeypatch.setattr(effective, "measure_distances", copies_up_to(160))
    assert run(folder, "--context", "1k", "--out", out, "--overwrite", "--device", "cpu") == 0
    assert json.loads(out.read_text())["reach"] == 120


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--context", "1k", "--out", "law"], "the law file law is not called .json"),
        (["--context", "1k", "--out", "none/law.json"], "there is no folder none"),
        (["--context", "1k", "--trials", "0"], "trials is 0, outside [1, 2147483648]"),
        (["--context", "1k", "--texts", "none.txt"], "cannot read none.txt: No such file or directory"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_looked_for(capsys, argv, problem):
    code, said, _ = fails(capsys, "/nowhere/at/all", *argv)
    assert (code, said) == (1, problem)


def test_a_place_that_cannot_be_written_is_refused_before_the_work(folder, tmp_path, capsys):
    (tmp_path / "law.json").mkdir()
    code, problem, _ = fails(capsys, folder, "--context", "1k", "--out", tmp_path / "law.json", "--overwrite")
    assert (code, problem) == (1, f"{tmp_path / 'law.json'} is not a regular file")


def test_python_has_the_same_route(folder, tmp_path, monkeypatch):
    """`tune` in Python gives the law of the verb, which `extend` takes, and writes the same file."""
    assert run(folder, "--context", "1k", "--out", tmp_path / "verb.json", "--trials", "1", "--device", "cpu") == 0
    loaded = load(str(folder), device="cpu")
    tuned = tune(loaded.model, loaded.tokenizer, context=1024, trials=1)
    written = json.loads(tuned.write(tmp_path / "law.json").read_text())
    verb = json.loads((tmp_path / "verb.json").read_text())
    unlike = {"command", "model"}
    for content in (written, verb):
        content["measured"] = {name: value for name, value in content["measured"].items() if name not in unlike}
    assert written == verb
    assert rpe3d.law_of(loaded.model) is None
    rpe3d.extend(loaded.model, tmp_path / "law.json")
    assert rpe3d.law_of(loaded.model) == tuned.law


def test_a_context_below_the_pretrained_length_is_refused_before_measuring(folder, tmp_path, capsys):
    code, problem, _ = fails(capsys, folder, "--context", "128", "--out", tmp_path / "law.json", "--device", "cpu")
    assert (code, problem) == (1, "context is 128, below the pretrained length 256")
    assert list(tmp_path.iterdir()) == []
