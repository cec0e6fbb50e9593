"""benchmarks/finetune.py, the whole way on a tiny model: what it writes, and that a second call does no work twice."""

from __future__ import annotations

import csv
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from rpe3d import evaluate
from rpe3d.config import ConfigError
from rpe3d.train import merge
from rpe3d.train.trainer import LawTrainer

# PEFT 0.18 takes every Llama for one with tied embeddings.
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer")
FREE = {"3d-rpe", "3d-rpe-definition", "3d-rpe-dual-chunk", "linear", "yarn"}


@pytest.fixture
def finetune(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    module = import_module("finetune")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    return module


@pytest.fixture
def bench(finetune, monkeypatch, model_folder, texts, tmp_path):
    """Runs the benchmark in one folder; returns its rows."""
    text = tmp_path / "text.txt"
    text.write_text("moon and sun " * 400)

    def run(*options, out="out", status=0):
        given = ["--model", model_folder, "--data", texts, "--texts", text, "--out", tmp_path / out]
        given += ["--context", "512", "--steps", "2", "--lengths", "512,1k", *options]
        monkeypatch.setattr(sys, "argv", ["finetune.py", *map(str, given)])
        assert finetune.main() == status
        return rows_of(tmp_path / out / "finetune-cpu.csv")

    return run


def rows_of(path):
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_way_is_trained_on_as_many_tokens_and_stands_beside_its_law(bench, tmp_path, model_folder, capsys):
    rows = bench()
    trained, free = ([row for row in rows if (row["steps"] == "2") is learned] for learned in (True, False))
    assert {row["law"] for row in trained} == FREE | {"linear-s2"}
    assert {row["law"] for row in free} == FREE
    assert {row["tokens"] for row in trained} == {str(2 * 2 * 512)}
    assert {(row["length"], row["context"]) for row in rows} == {("512", "512"), ("1024", "1024")}
    assert len(rows) == 2 * 11
    before = {(row["law"], row["length"]): row["ppl"] for row in free}
    assert all(row["ppl"] != before[row["law"], row["length"]] for row in trained if row["law"] in FREE)
    assert {row["passkeys"] for row in rows} == {"10"}
    assert str(model_folder) not in rows[0]["recipe"]
    assert (tmp_path / "out" / "finetune-cpu.png").stat().st_size > 10_000
    assert {row["law"] for row in rows_of(tmp_path / "out" / "finetune-loss-cpu.csv")} == FREE | {"linear-s2"}
    printed = capsys.readouterr().out
    assert "3d-rpe-dual-chunk: 2 steps of 1024 tokens" in printed
    assert "tail ppl" in printed


def test_a_trained_row_is_what_compare_says_of_the_merged_model(bench, tmp_path):
    """At the context itself, where compare's law is the adapter's."""
    trained, _ = bench("--only", "3d-rpe", "--lengths", "512", "--learning-rate", "0.01")
    merged = merge(tmp_path / "out" / "3d-rpe" / "adapter", dtype=torch.float32)
    settings = evaluate.Settings(laws=["3d-rpe"], lengths=[512])
    texts = evaluate.read_texts([tmp_path / "text.txt"])
    (row,) = evaluate.compare(merged.model, merged.tokenizer, settings, texts=texts)["rows"]
    for name in ("ppl", "tail_ppl", "copy_nll", "passkey"):
        assert float(trained[name]) == pytest.approx(row[name], rel=1e-4), name


def test_a_second_call_does_what_is_missing(bench, finetune, monkeypatch):
    first = bench("--only", "yarn", "--lengths", "512")
    assert [(row["steps"], row["length"]) for row in first] == [("2", "512"), ("0", "512")]
    forwards = []
    monkeypatch.setattr(finetune, "measure_row", lambda *a: forwards.append(a[2]) or measured(*a))
    measured = import_module("rpe3d.evaluate.row").measure_row
    assert bench("--only", "yarn", "--lengths", "512") == first
    assert not forwards
    rows = bench("--only", "yarn")
    assert forwards == [1024, 1024]
    assert rows[:2] == first
    with pytest.raises(ConfigError, match="differs in steps"):
        bench("--only", "yarn", "--steps", "3")


def test_a_run_that_is_out_of_time_or_interrupted_ends_with_the_same_rows(bench, finetune, monkeypatch, tmp_path):
    """Out of time in training and in measuring, interrupted in a step; then carried on without its adapters."""
    options = ("--only", "yarn", "--lengths", "512", "--learning-rate", "0.01", "--steps", "3")
    whole = bench(*options, out="whole")

    def limited(minutes, checks):
        """A clock with time for one step, if `minutes` are few, and for so many pieces of work."""
        count = iter(range(checks))

        class Limited(finetune.Clock):
            left = minutes

            def check(self, *_):
                if next(count, None) is None:
                    raise finetune.TimeUpError

        return Limited

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finetune, "Clock", limited(1e-9, 10**6))
        assert bench(*options, status=3) == []
        curve = rows_of(tmp_path / "out" / "finetune-loss-cpu.csv")
        assert [(row["law"], row["step"], row["of"]) for row in curve] == [("yarn", "1", "3")]
        assert (tmp_path / "out" / "finetune-loss-cpu.png").exists()
        patch.setattr(LawTrainer, "check_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench(*options)
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "Clock", limited(60, 3))
        assert bench(*options, status=3) == []
    rows = bench(*options, "--minutes", "60")
    timeless = [[{k: v for k, v in row.items() if k != "s_per_step"} for row in x] for x in (rows, whole)]
    assert timeless[0] == timeless[1]
    curves = [rows_of(tmp_path / out / "finetune-loss-cpu.csv") for out in ("out", "whole")]
    assert [row["step"] for row in curves[0]] == ["1", "2", "3"]
    assert [row["loss"] for row in curves[0]] == [row["loss"] for row in curves[1]]
    shutil.rmtree(tmp_path / "out" / "yarn")
    monkeypatch.setattr(LawTrainer, "training_step", interrupted)
    assert bench(*options, "--minutes", "60") == rows


def test_a_curve_is_of_means_of_parts_and_ends_where_the_run_is(finetune):
    results = import_module("finetune_results")
    points = results.curve([float(i) for i in range(7)], 12, points=4)
    assert points == [
        {"step": 3, "loss": "1.00000", "n": 3},
        {"step": 6, "loss": "4.00000", "n": 3},
        {"step": 7, "loss": "6.00000", "n": 1},
    ]


def test_pose_reads_as_many_tokens_and_is_measured_at_its_own_length(bench):
    rows = bench("--only", "3d-rpe-pose", "--lengths", "512")
    assert [(row["steps"], row["length"]) for row in rows] == [(s, n) for s in "20" for n in ("512", "1600")]
    assert {row["context"] for row in rows} == {"1600"}
    assert {row["tokens"] for row in rows} == {"0", str(2 * 2 * 512)}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--only", "3d-rpe,yarm"), "did you mean 'yarn'"),
        (("--steps", "0"), "steps is 0"),
        (("--lengths", "1M"), "no text is as long"),
        (("--context", "128"), "below the pretrained length"),
        (("--data", "nowhere"), "there is no file or folder nowhere"),
    ],
)
def test_what_is_wrong_is_said_and_leaves_nothing_behind(bench, tmp_path, options, problem):
    with pytest.raises(ConfigError, match=problem):
        bench(*options)
    assert not (tmp_path / "out").exists()
