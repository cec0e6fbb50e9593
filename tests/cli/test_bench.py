"""`rpe3d bench`: a row for every law and measure, and what it refuses."""

from __future__ import annotations

import json

import pytest
from refusal import refusal

import tiny_lm
from rpe3d.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("bench") / "model")


def test_every_law_has_a_rate_of_reading_and_one_of_writing(folder, tmp_path, capsys):
    out = tmp_path / "bench.json"
    command = ["bench", str(folder), "--laws", "3d-rpe,yarn", "--length", "300", "--new", "2", "--repeat", "2"]
    assert main([*command, "--device", "cpu", "--json", str(out)]) == 0
    content = json.loads(out.read_text())
    assert (content["schema"], content["kind"]) == (1, "bench")
    assert [(row["law"], row["what"]) for row in content["rows"]] == [
        (law, what) for law in ("3d-rpe", "yarn") for what in ("prefill", "decode")
    ]
    for row in content["rows"]:
        assert row["speed"] == pytest.approx(row["tokens_per_second"] / row["stock_tokens_per_second"], abs=0.01)
        assert row["length"] == 300
        assert row["mib"] is None  # no GPU, no peak
    assert "3d-rpe" in capsys.readouterr().out


def test_layers_that_the_model_lacks_are_refused_before_anything_is_measured(folder, monkeypatch, capsys):
    monkeypatch.setattr("rpe3d.evaluate.speed._one", lambda *_: pytest.fail("measured"))
    laws = "yarn,3d-rpe:chunk=16,window=32,reach=64,far=2,full=99"
    said = refusal(capsys, "bench", str(folder), "--laws", laws, "--length", "300", "--device", "cpu")
    assert said[:2] == (1, "the law names layer 99, but the model has layers 0 to 1")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--laws", "3d-rpe,3d-rpe"], "law '3d-rpe' is given twice"),
        (["--laws", "stock=3d-rpe"], "law 'stock' is given twice"),
        (["--length", "1"], "--length is 1"),
        (["--repeat", "0"], "--repeat is 0"),
        (["--laws", "3d"], "law '3d' is not known"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_model_is_looked_for(given, problem, capsys):
    code, said, hint = refusal(capsys, "bench", "/nowhere/at/all", "--device", "cpu", *given)
    assert code == 1
    assert said.startswith(problem)
    assert hint
