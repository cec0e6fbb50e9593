"""benchmarks/peers.py on a tiny model: it stops when its minutes are over, and goes on where it stopped."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tiny_lm
from rpe3d.evaluate import detection
from rpe3d.evaluate.tasks.sample import Sample
from rpe3d.geometry import LAWS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return import_module("peers")


def run(peers, monkeypatch, folder, out, minutes, *more):
    given = [
        "--model",
        folder,
        "--lengths",
        "512",
        "--windows",
        "1",
        "--copies",
        "1",
        "--passkeys",
        "1",
        "--device",
        "cpu",
    ]
    command = ["peers.py", *given, "--minutes", minutes, "--out", out, *more]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    return peers.main()


def test_a_run_that_is_out_of_time_goes_on_and_measures_no_row_twice(peers, monkeypatch, tmp_path, capsys):
    folder, out = tiny_lm.save(tmp_path / "model"), tmp_path / "out"
    laws = ["--laws", "rope,lampe,logn", "--measures", "ppl,copy"]
    ticks = iter(range(1, 10_000))
    monkeypatch.setattr(peers.time, "monotonic", lambda: next(ticks))
    assert run(peers, monkeypatch, folder, out, 4 / 60, *laws) == 3
    assert "of 3 rows; run it again" in capsys.readouterr().out
    first = json.loads((out / "compare.json").read_text())["rows"]
    assert 0 < len(first) < 3
    assert run(peers, monkeypatch, folder, out, 60, *laws) == 0
    rows = json.loads((out / "compare.json").read_text())["rows"]
    assert [row["law"] for row in rows] == ["rope", "lampe", "logn"]
    assert rows[: len(first)] == first


def test_scales_that_were_detected_once_are_those_of_dpe(peers, monkeypatch, tmp_path):
    folder, out = tiny_lm.save(tmp_path / "model"), tmp_path / "out"
    asked = [Sample(prompts=("x" * 300,), max_new=2, gold={"outputs": ["a"], "length": 302})]
    monkeypatch.setattr(detection, "questions", lambda *_: asked)
    monkeypatch.setattr(detection, "GROUPS", 1)
    given = ["--laws", "dpe", "--measures", "ppl", "--detect", "1"]
    assert run(peers, monkeypatch, folder, out, 60, *given) == 0
    scales = json.loads((out / "dpe.json").read_text())["scales"]
    (row,) = json.loads((out / "compare.json").read_text())["rows"]
    assert (row["law"], row["parameters"]["scales"]) == ("dpe", scales)
    monkeypatch.setattr(detection, "detect", None)
    assert run(peers, monkeypatch, folder, out, 60, *given) == 0


def test_every_law_but_the_forms_for_training_is_measured(peers):
    names = {name.partition(":")[0] for name in peers.LAWS.split(",")}
    assert names == set(LAWS) - {"3d-rpe-definition", "3d-rpe-dual-chunk"}
