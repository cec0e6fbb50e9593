"""`rpe3d tune`: what it says, the law file it writes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
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
    again = tmp_path / "again.json"
    assert run(folder, "--context", "1k", "--out", again, "--seed", "3", "--trials", "2", "--json", "-", "-q") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed.pop("schema"), printed.pop("kind")) == (1, "tune")
    assert printed == json.loads(again.read_text())
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
    assert list(weighed) == ["even", "anchored"]  # on a CPU, unless asked for more
    assert content["measured"]["picked"]["way"] == "anchored"
    said = " ".join(capsys.readouterr().out.split())
    assert "reach 128: half of the pretrained length" in said
    assert (
        "focus 1, fade 0.5, sinks 1: at 512 tokens text and repetitions cost 2.500 + 0.100 nats if all far keys "
        "fade (even), 2.500 + 0.090 if the first token does not fade (anchored); anchored is picked, since none "
        "costs less"
    ) in said


def costing(**costs):
    """A measurement in which repetitions cost as much under each way as is said here; the stock model copies all."""
    usual = copies_up_to(256)

    def measure(model, *_):
        law = rpe3d.law_of(model)
        way = None if law is None else "chosen" if law.chooses else "anchored" if law.sinks else "even"
        return [one if way is None else replace(one, again=costs[way]) for one in usual()]

    return measure


def test_a_chosen_far_field_is_picked_where_it_costs_least(folder, tmp_path, capsys, monkeypatch):
    """Asked for by --chosen: the file and the words name all three ways, and the law has the rule's blocks."""
    monkeypatch.setattr(effective, "measure_distances", costing(even=0.3, anchored=0.2, chosen=0.1))
    out = tmp_path / "law.json"
    assert run(folder, "--context", "1k", "--out", out, "--chosen", "--device", "cpu") == 0
    content = json.loads(out.read_text())
    measured = content.pop("measured")
    made = rpe3d.make_law(**content)
    assert (made.chunk, made.window, made.reach) == (64, 64, 128)
    assert (made.far, made.block, made.first) == (8, 16, 128)
    assert (made.focus, made.fade, made.sinks) == (0.0, 0.0, 0)
    assert {way: one["again"] for way, one in measured["weighed"].items()} == pytest.approx(
        {"even": 0.3, "anchored": 0.2, "chosen": 0.1}
    )
    assert measured["picked"] == {"way": "chosen", "criterion": "text + again is the lowest"}
    said = " ".join(capsys.readouterr().out.split())
    assert "far 8: blocks of 16 keys that a query sees; half of the reach, at least 8 blocks" in said
    assert (
        "focus 0, fade 0, sinks 0: at 512 tokens text and repetitions cost 2.500 + 0.300 nats if all far keys fade "
        "(even), 2.500 + 0.200 if the first token does not fade (anchored), 2.500 + 0.100 if a query chooses its far "
        "keys (chosen); chosen is picked, since none costs less"
    ) in said
    model = load(str(folder), device="cpu").model
    assert rpe3d.law_of(rpe3d.extend(model, out)) == made


@pytest.mark.parametrize(
    ("context", "way", "why"),
    [
        ("512", "anchored", "since none costs less"),
        ("1k", "chosen", "since it costs at most 0.01 more and gains with the length of a text"),
    ],
)
def test_of_ways_that_cost_the_same_the_earlier_is_picked_or_for_longer_texts_the_choice(
    context, way, why, folder, tmp_path, capsys, monkeypatch
):
    """Windows of 512 tokens were weighed."""
    monkeypatch.setattr(effective, "measure_distances", costing(even=0.3, anchored=0.2, chosen=0.205))
    out = tmp_path / "law.json"
    assert run(folder, "--context", context, "--out", out, "--chosen", "--device", "cpu") == 0
    content = json.loads(out.read_text())
    assert content["measured"]["picked"]["way"] == way
    assert ("within 0.01" in content["measured"]["picked"]["criterion"]) == ("far" in content) == (way == "chosen")
    assert f"{way} is picked, {why}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("device", "chosen", "ways"),
    [
        ("cpu", None, ["even", "anchored"]),
        ("cpu", True, ["even", "anchored", "chosen"]),
        ("cuda", None, ["even", "anchored", "chosen"]),
        ("cuda", False, ["even", "anchored"]),
        ("mps", None, ["even", "anchored"]),
    ],
)
def test_a_chosen_far_field_is_weighed_where_its_kernels_run_or_when_asked_for(
    folder, monkeypatch, device, chosen, ways
):
    """The kernels of `far` run on a GPU alone (docs/footguns.md); the model only says that it is on one here."""
    loaded = load(str(folder), device="cpu")
    monkeypatch.setattr(effective, "measure_distances", costing(even=0.3, anchored=0.2, chosen=0.1))
    monkeypatch.setitem(tune.__globals__, "about", lambda *_: {})  # it would ask the GPU for its name
    monkeypatch.setattr(type(loaded.model), "device", torch.device(device))
    tuned = tune(loaded.model, loaded.tokenizer, context=1024, chosen=chosen)
    assert list(tuned.weighed) == list(tuned.measured["weighed"]) == ways
    assert tuned.picked == ways[-1]
    assert tuned.law.chooses == (ways[-1] == "chosen")


def test_a_law_file_of_before_is_read_as_it_was(folder, tmp_path):
    """As 0.2 wrote it: two ways, and no word on which was picked."""
    one = {"length": 512, "seeds": [0, 1], "text": 2.5, "again": 0.1}
    about = {"name": "3d-rpe", "pretrained": 256, "context": 1024, "head_dim": 16}
    own = {"chunk": 64, "window": 64, "reach": 128, "focus": 1.0, "fade": 0.5, "sinks": 1}
    file = tmp_path / "before.json"
    measured = {"effective": 256, "weighed": {"even": one, "anchored": one}}
    file.write_text(json.dumps({**about, **own, "measured": measured}))
    assert law(str(file)).parameters == own
    model = load(str(folder), device="cpu").model
    assert rpe3d.law_of(rpe3d.extend(model, file)).own == own


@pytest.mark.parametrize("asked", ["--chosen", "--no-chosen"])
def test_a_context_that_the_model_uses_anyway_is_exact(folder, tmp_path, capsys, monkeypatch, asked):
    monkeypatch.setattr(effective, "measure_distances", copies_up_to(256))
    out = tmp_path / "law.json"
    assert run(folder, "--context", "256", "--out", out, asked, "--device", "cpu") == 0
    assert "all of it is exact RoPE" in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert content["measured"]["weighed"] == content["measured"]["picked"] == {}
    assert (content["window"], content["reach"], content["focus"], content["fade"]) == (192, 256, 0.0, 0.0)


def test_texts_that_are_too_short_for_more_leave_the_defaults(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(effective, "measure_distances", copies_up_to(256))
    text = tmp_path / "short.txt"
    text.write_text(("A text of a few words. " * 14)[:320])  # a byte is a token
    out = tmp_path / "law.json"
    assert run(folder, "--context", "1k", "--out", out, "--texts", text, "--device", "cpu") == 0
    assert "sinks 0: the defaults, since the texts are too short to try others" in " ".join(
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
    assert "the rule of thumb applies" in capsys.readouterr().out
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
        (["--context", "1k", "--out", "law"], "the law file law does not end in .json"),
        (["--context", "1k", "--out", "none/law.json"], "there is no folder none"),
        (["--context", "1k", "--trials", "0"], "trials is 0, outside [1, 2147483648]"),
        (
            ["--context", "1k", "--law", "dpe", "--chosen"],
            "--chosen is about the far field of 3d-rpe, and dpe has none",
        ),
        (
            ["--context", "1k", "--law", "dpe", "--seed", "1"],
            "--seed is about 3d-rpe: the questions of dpe have RULER's seed",
        ),
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
