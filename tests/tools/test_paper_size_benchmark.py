"""benchmarks/paper_size.py on a tiny shape: what it trains, that it resumes, its search, and its estimates."""

from __future__ import annotations

import csv
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from rpe3d.config import ConfigError
from rpe3d.train import Settings, read_recipe

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # PEFT 0.18 takes every Llama for one with tied embeddings.
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer"),
]
GIB = 2**30


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    made = import_module("paper_size")
    monkeypatch.setattr(made, "DEVICE", "cpu")
    return made


@pytest.fixture
def results(bench):
    return import_module("paper_size_results")


@pytest.fixture
def run(bench, monkeypatch, tmp_path):
    def made(*options, status=0):
        given = ["paper_size.py", "--out", tmp_path / "out", "--shape", "tiny", *options]
        monkeypatch.setattr(sys, "argv", list(map(str, given)))
        assert bench.main() == status
        path = tmp_path / "out" / "paper-size-cpu.csv"
        if not path.exists():
            return []
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    return made


def test_every_law_is_trained_for_a_step_of_eight_windows_and_never_twice(run, bench, monkeypatch, capsys):
    """Weights that are trained: LoRA of rank 8 on four projections, the embeddings, and the norms."""
    rows = run("--laws", "rope,3d-rpe-dual-chunk")
    cells = [(row["part"], row["law"], row["tokens"], row["context"]) for row in rows]
    lengths = {"32k": ("512", "512"), "chats": ("256", "256"), "100k": ("512", "1600")}
    assert cells == [(part, law, *lengths[part]) for part in lengths for law in ("rope", "3d-rpe-dual-chunk")]
    for row in rows:
        assert (row["status"], row["micro_steps"], row["method"]) == ("ok", "8", "lora-plus")
        seconds = 8 * float(row["micro_s"]) + float(row["update_s"])
        assert float(row["step_s"]) == pytest.approx(seconds, abs=2e-3)
        assert float(row["tokens_per_s"]) == pytest.approx(8 * int(row["tokens"]) / seconds, rel=0.01)
        assert int(row["trained"]) == 2 * 4 * 8 * (32 + 32) + 320 * 32 + 5 * 32
    assert "of rope" in capsys.readouterr().out
    monkeypatch.setattr(bench, "measured", None)
    assert run("--laws", "rope,3d-rpe-dual-chunk") == rows


def test_a_case_is_trained_as_its_recipe_says(bench):
    """All but the data, the model, and embeddings and norms, which the paper's text does not name."""
    shape = bench.SHAPES["llama-2-7b"]
    spec = next(spec for spec in bench.parse_laws(bench.laws_of(shape)) if spec.name == "3d-rpe-dual-chunk")
    recipes = {"32k": "table3-3d-rpe-llama2-7b-32k", "chats": "table1-3d-rpe-llama2-7b-chat-16k"}
    for name, recipe in (recipes | {"100k": "table3-3d-rpe-llama2-7b-100k"}).items():
        part = bench.PARTS[name]
        sizes = {"length": part.length * 4096, "context": part.context * 4096, "batch": 8, "steps": 1}
        mine = bench.Case(spec=spec, part=part, method="lora-plus", **sizes).settings().to_dict()
        theirs = Settings(**read_recipe(Path(recipe))).to_dict()
        other = {"model", "data", "split", "pack", "steps", "warmup", "method"}
        assert {k: v for k, v in mine.items() if k not in other} == {k: v for k, v in theirs.items() if k not in other}


def test_the_largest_window_is_searched_for_and_the_search_resumes(run, bench, monkeypatch, capsys):
    """Windows of up to 900 tokens fit; the grain is twice the pretrained length, 128."""
    asked = []

    def measured(case, *_):
        asked.append(case.length)
        if case.length > 900:
            raise torch.OutOfMemoryError("no room")
        took = dict.fromkeys(("micro_s", "step_s", "tokens_per_s", "micro_steps"), 1)
        return {"status": "ok", "peak_gib": 0, **took}

    monkeypatch.setattr(bench, "measured", measured)
    options = ("--parts", "largest", "--laws", "rope")

    class Short(bench.Clock):
        def check(self, seconds=0.0):
            if len(asked) == 2:
                raise import_module("limit").TimeUpError

    with monkeypatch.context() as patch:
        patch.setattr(bench, "Clock", Short)
        assert [row["status"] for row in run(*options, status=3)] == ["ok", "out of memory"]
    rows = run(*options)
    assert asked == [512, 1024, 768, 896]
    assert [row["tokens"] for row in rows] == [str(length) for length in asked]
    assert "largest window under rope: 896 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("most", [4096, 10**5, 10**6])
def test_a_search_finds_the_largest_that_fits_and_asks_for_none_twice(bench, most):
    for room in (0, 100, 1024, 1025, 5000, 65535, 65536, 10**7):
        asked = []
        found = bench.largest(lambda n: asked.append(n) or n <= room, 1024, 256, most)  # noqa: B023
        assert found == (min(room, most) // 256 * 256 if room >= 1024 else 0)
        assert len(asked) == len(set(asked))
        assert all(n <= most for n in asked)


def test_the_estimate_counts_operations(results, bench):
    """6 for each of Llama-2's 6.6 billion weights in matrices and token, and those of causal attention."""
    shape = bench.SHAPES["llama-2-7b"]
    weights, t = 6_607_077_376, 32768
    attention = 32 * (2 * t * t * 4096) * (1 + 1 + 2.5)
    assert results.minutes_of(shape, t, 8) == pytest.approx(8 * (6 * weights * t + attention) / 396e12 / 60)


def test_several_gpus_hold_a_part_of_the_weights_and_activations_of_their_own(results):
    """12 GiB frozen and 1 GiB of trained weights: of 50 GiB at the peak 34 are activations, on any number of GPUs."""
    row = {"frozen": str(12 * GIB), "trained": str(GIB // 4), "unit": str(GIB // 2), "peak_gib": "50.00"}
    row |= {"batch": "8", "micro_s": "6.0", "update_s": "0.4"}
    four, eight = results.fsdp(row, 4), results.fsdp(row, 8)
    assert four["divided_gib"] == pytest.approx((12 + 4) / 4)
    assert four["activations_gib"] == eight["activations_gib"] == pytest.approx(34)
    assert four["gib"] == pytest.approx(4 + 1 + 34)
    assert eight["gib"] == pytest.approx(2 + 1 + 34)
    gathered = 2 * (12.5 * GIB)  # forward and backward, in bf16
    assert four["exchange_s"] == pytest.approx(3 / 4 * (2 * gathered + GIB) / 300e9)
    assert eight["exchange_s"] == pytest.approx(7 / 8 * (gathered + GIB) / 300e9)
    assert four["step_s"] == pytest.approx(2 * 6.0 + 0.1 + four["exchange_s"])
    assert eight["step_s"] == pytest.approx(6.0 + 0.05 + eight["exchange_s"])


def test_what_is_not_known_is_refused(run, bench):
    with pytest.raises(ConfigError, match="part '33k' is not known"):
        run("--parts", "33k")
    with pytest.raises(ConfigError, match="shape 'huge' is not known"):
        run("--shape", "huge")
