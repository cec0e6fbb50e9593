"""benchmarks/pretrain.py on a tiny model: what it measures beside oracles, that it resumes, and what it refuses."""

from __future__ import annotations

import csv
import random
import sys
import tarfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rpe3d import extend
from rpe3d.config import ConfigError
from rpe3d.models import facts

LENGTH = 64
STEPS = 6
TRAINING = ("--size", "tiny", "--tokens", str(4 * LENGTH * STEPS), "--learning-rate", "0.03", "--save-every", "2")


@pytest.fixture
def pretrain(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    made = import_module("pretrain")
    monkeypatch.setattr(made, "DEVICE", "cpu")
    return made


@pytest.fixture
def measures(pretrain):
    return import_module("pretrain_measures")


@pytest.fixture
def results(pretrain):
    return import_module("pretrain_results")


@pytest.fixture
def texts(tmp_path):
    """Twelve texts of words that follow one another, long enough for four times the trained length."""
    folder = tmp_path / "texts"
    folder.mkdir()
    words = ["".join(random.Random(i).choices("abcdefgh", k=4)) for i in range(40)]
    for seed in range(12):
        (folder / f"{seed:02}.txt").write_text(" ".join(random.Random(seed).choices(words, k=400)))
    return folder


@pytest.fixture
def bench(pretrain, results, monkeypatch, texts, tmp_path):
    """Runs the benchmark into a folder, up to twice the trained length; returns its rows without their origin."""
    monkeypatch.setattr(pretrain, "TIMES", (1, 2))

    def run(out, *options, data=texts, drawn=False, status=0):
        if not drawn:
            monkeypatch.setattr(pretrain, "draw", lambda *_: None)
        given = ["pretrain.py", "--data", data, "--out", tmp_path / out, *TRAINING, *options]
        monkeypatch.setattr(sys, "argv", list(map(str, given)))
        assert pretrain.main() == status
        monkeypatch.setattr(pretrain, "draw", results.draw)
        if not (tmp_path / out / "pretrain-cpu.csv").exists():
            return []
        with (tmp_path / out / "pretrain-cpu.csv").open(newline="") as file:
            return [{key: row[key] for key in results.NUMBERS} for row in csv.DictReader(file)]

    return run


class Copier:
    """A model that is sure of the token that stands `distance` before the next one, and of nothing else."""

    device = torch.device("cpu")
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=5000))

    def __init__(self, distance):
        self.distance = distance

    def __call__(self, tokens, **_):
        logits = torch.zeros(*tokens.shape, 5000)
        known = torch.arange(tokens.shape[1]) + 1 - self.distance
        seen = known >= 0
        logits[:, seen] = logits[:, seen].scatter(-1, tokens[:, known[seen], None], 50.0)
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("distance", [4, 32, 124])
def test_a_copy_is_measured_at_the_distance_that_is_said(measures, distance):
    """The oracle looks a fixed number of tokens back: it knows the copies at that distance, and no others."""
    windows = torch.randperm(5000)[: 6 * 128].view(6, 128)  # no token stands twice
    numbers = measures.copying(Copier(distance), windows, trained=LENGTH)
    assert [n.at for n in numbers if n.measure == "copy_loss"] == [4, 8, 16, 32, 64, 124]
    assert {n.at for n in numbers if n.value < 1e-6} == {distance}
    assert all(n.value > 5 for n in numbers if n.at != distance)


def rough(pretrain, seed=0):
    """A tiny model whose weights are large enough for attention to differ from key to key."""
    model = pretrain.new_model(pretrain.SIZES["tiny"], LENGTH, seed).eval()
    for weight in model.parameters():
        weight.data.mul_(12 if weight.dim() > 1 else 1)
    return model


def test_attention_by_distance_is_that_of_transformers(pretrain, measures):
    """The oracle is eager attention, which returns its weights."""
    model = rough(pretrain)
    windows = torch.randint(320, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    found = measures.attention(model, windows)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(model(windows, output_attentions=True).attentions).double().mean((0, 1, 2))
    block, half = 4, LENGTH // 2  # 16 dimensions of a head for 64 tokens
    edges = [0, 4, 8, 16, 32, 64]
    assert [n.at for n in found] == edges[:-1]
    for number, first, last in zip(found, edges, edges[1:], strict=False):
        pairs = [
            weights[q, q - d] for q in range(half + block - 1, LENGTH, block) for d in range(first, last) if q - d >= 0
        ]
        assert number.value == pytest.approx(torch.stack(pairs).mean().item(), rel=1e-4)
    assert len({round(n.value, 5) for n in found}) > 1


def test_attention_by_distance_is_of_the_law(pretrain, measures):
    """Bounded 3D-RPE is RoPE in a window that no chunk leaves, and not beyond: so are its weights."""
    windows = torch.randint(320, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    stock = rough(pretrain)
    near, far = (extend(rough(pretrain), "3d-rpe", context=LENGTH, chunk=4, window=w, reach=w + 4) for w in (60, 16))
    values = [[n.value for n in measures.attention(model, windows)] for model in (stock, near, far)]
    assert values[1] == pytest.approx(values[0], rel=1e-4)
    assert values[2] != pytest.approx(values[0], rel=1e-2)


def test_a_run_that_was_stopped_resumes_to_the_same_numbers(pretrain, bench, monkeypatch, tmp_path):
    """Stopped between two checkpoints, and once more between two measurements."""
    options = ("--laws", "3d-rpe-definition", "--seeds", "0")
    whole = bench("whole", *options)

    def stop_in(module, name, call):
        count, real = iter(range(100)), getattr(module, name)

        def stopping(*given, **more):
            if next(count) == call:
                raise KeyboardInterrupt
            return real(*given, **more)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, stopping)
            with pytest.raises(KeyboardInterrupt):
                bench("stopped", *options)

    stop_in(torch.nn.utils, "clip_grad_norm_", 3)
    stop_in(pretrain, "measured", 2)
    steps = []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: steps.append(1))
    assert bench("stopped", *options) == whole
    assert not steps
    files = [(tmp_path / out / "pretrain-cpu.csv").read_bytes() for out in ("whole", "stopped")]
    assert files[0] == files[1]


def test_a_run_that_is_out_of_time_shows_what_there_is_and_resumes(pretrain, bench, monkeypatch, tmp_path):
    """Out of time at its first checkpoint, after its last, and between two measurements."""
    options = ("--laws", "3d-rpe-definition", "--seeds", "0")
    whole = bench("whole", *options)
    real, steps = torch.nn.utils.clip_grad_norm_, []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *given: steps.append(1) or real(*given))
    left = []

    class Limited(pretrain.Clock):
        """Has time for so many looks at it."""

        def over(self, seconds=0.0):
            assert seconds == pretrain.MARGIN
            left[0] -= 1
            return left[0] < 0

    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "Clock", Limited)
        for looks, made, rows in ((1, 2, 0), (3, 6, 0), (2, 6, 1)):
            left[:] = [looks]
            found = bench("out", *options, "--minutes", "1", drawn=True, status=3)
            assert len(steps) == made
            assert len({(row["applied"], row["length"]) for row in found}) == rows
            assert (tmp_path / "out" / "pretrain-cpu.png").exists() == bool(rows)
    assert bench("out", *options, "--minutes", "60") == whole
    assert len(steps) == STEPS


def test_laws_learn_different_things_from_the_same_start(bench, tmp_path):
    """The models of a seed differ in their law alone; parts add up, and another seed differs."""
    phased = ("3d-rpe-definition", "3d-rpe-dual-chunk")
    bench("out", "--laws", ",".join(phased), "--seeds", "0")
    bench("out", "--laws", "3d-rpe", "--seeds", "0")
    rows = bench("out", "--laws", phased[0], "--seeds", "0,1", drawn=True)
    models = {(row["law"], row["seed"]) for row in rows}
    assert models == {*((law, "0") for law in (*phased, "3d-rpe")), (phased[0], "1")}
    assert (tmp_path / "out" / "pretrain-cpu.png").read_bytes()[:4] == b"\x89PNG"
    ends = [r["value"] for r in rows if r["measure"] == "train_loss" and int(r["at"]) == STEPS]
    assert len(set(ends)) == 4
    for length in (LENGTH, 2 * LENGTH):
        tails = [r["value"] for r in rows if r["measure"] == "tail_loss" and int(r["length"]) == length]
        assert len(set(tails)) == len(tails) == (4 if length == LENGTH else 7)


def test_rope_is_also_measured_under_train_free_laws(pretrain):
    """The setting of the paper's Table 4; the law itself comes first, at the trained length."""
    [rope] = pretrain.parse_laws("rope")
    found = pretrain.cells(rope, LENGTH)
    assert found[:3] == [(rope, LENGTH), (rope, 2 * LENGTH), (rope, 4 * LENGTH)]
    known = facts(pretrain.new_model(pretrain.SIZES["tiny"], LENGTH, 0))
    laws = [spec.at(length, known) for spec, length in found[3:]]
    assert {law.name for law in laws} == {"linear", "ntk", "yarn", "dca", "3d-rpe", *pretrain.PHASED}
    for name in pretrain.PHASED:
        assert [law.interpolate for law in laws if law.name == name] == [False, False, True, True]


def test_a_default_run_is_estimated_below_three_minutes(pretrain):
    """6 N T operations, and those of causal attention, at 316 TFLOP/s."""
    shape = pretrain.SIZES["small"]
    weights = 8192 * 512 + 8 * (4 * 512**2 + 3 * 512 * 1408 + 2 * 512) + 512
    assert 20e6 < weights < 50e6
    minutes = pretrain.estimate(shape, weights, shape.length, shape.tokens)
    assert minutes == pytest.approx(6 * (weights + 8 * 512 * 1024) * 1e8 / 316e12 / 60)
    assert minutes < 3


def test_an_archive_is_read_as_its_folder(pretrain, texts, tmp_path):
    path = tmp_path / "texts.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        archive.add(texts, arcname="texts")
    assert list(pretrain.documents(path).values()) == list(pretrain.documents(texts).values())


def test_texts_that_cannot_be_used_are_refused(bench, texts, tmp_path):
    broken = tmp_path / "broken.tar.xz"
    broken.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="cannot read texts from"):
        bench("out", data=broken)
    for file in texts.iterdir():
        file.write_text("too short")
    with pytest.raises(ConfigError, match="and 128 are needed"):
        bench("out")
    for file in sorted(texts.iterdir())[1:]:
        file.unlink()
    with pytest.raises(ConfigError, match="holds 1 texts"):
        bench("out")
    assert not (tmp_path / "out").exists()


def test_parts_that_ran_in_folders_of_their_own_are_one_run(bench, tmp_path):
    """With one tokenizer, which the first has trained: rows are those of one folder, and nothing runs twice."""
    whole = bench("whole", "--laws", "rope,3d-rpe", "--seeds", "0")
    tokenizer = tmp_path / "whole" / "tokenizer.json"
    for law in ("rope", "3d-rpe"):
        bench(law, "--laws", law, "--seeds", "0", "--tokenizer", tokenizer)
    parts = ["--parts", tmp_path / "rope", tmp_path / "3d-rpe"]
    joined = bench("joined", "--laws", "rope,3d-rpe", "--seeds", "0", "--tokenizer", tokenizer, *parts)
    assert joined == whole
    assert not list((tmp_path / "joined").glob("*/state.safetensors"))
    assert bench("joined", "--laws", "rope,3d-rpe", "--seeds", "0", *parts) == whole


def test_parts_of_another_run_are_refused_and_nothing_is_lost(bench, tmp_path):
    bench("one", "--laws", "rope", "--seeds", "0")
    bench("two", "--laws", "rope", "--seeds", "0", "--batch", "2")
    kept = {path: path.read_bytes() for path in (tmp_path / "one").glob("*.json")}
    other = tmp_path / "other.json"
    other.write_text((tmp_path / "one" / "tokenizer.json").read_text() + " ")
    for options, problem in (
        (["--parts", tmp_path / "two"], "holds no part of this run"),
        (["--tokenizer", other], "holds another tokenizer"),
        (["--tokenizer", tmp_path / "none.json"], "cannot read"),
    ):
        with pytest.raises(ConfigError, match=problem):
            bench("one", "--laws", "rope", "--seeds", "0", *options)
    assert kept == {path: path.read_bytes() for path in (tmp_path / "one").glob("*.json")}


def test_another_run_in_the_same_folder_is_refused(bench):
    bench("out", "--laws", "3d-rpe-definition", "--seeds", "0")
    with pytest.raises(ConfigError, match="differs in tokens"):
        bench("out", "--laws", "3d-rpe-definition", "--seeds", "0", "--tokens", "256")
