"""benchmarks/needles.py on a tiny model: where needles lie, questions on a cache, what it writes."""

from __future__ import annotations

import csv
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import tiny_lm
from rpe3d import extend
from rpe3d.config import ConfigError
from rpe3d.geometry import parse_laws

pytestmark = pytest.mark.usefixtures("one_thread")
LAW = "3d-rpe:chunk=16,window=32,reach=64,far=2,block=4"
OTHER = "3d-rpe:chunk=32,window=32,reach=128,focus=0,fade=0"
LENGTH = 1500


@pytest.fixture
def needles(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return import_module("needles")


@pytest.fixture
def reader(needles):
    return needles.Reader(tiny_lm.model(), tiny_lm.tokenizer(), 2048)


def test_needles_lie_where_they_are_said_to_in_a_text_of_the_length(needles, reader):
    ids = reader.hide("lorem ipsum " * 200, LENGTH)
    text = reader.tokenizer.decode(ids[0])
    assert ids.shape == (1, LENGTH)
    hidden = sum(len(needle.sentence) + 2 for needle in needles.NEEDLES)
    before = 0
    for needle in needles.NEEDLES:  # a token for each byte
        assert text.index(needle.sentence) == int(needle.depth * (LENGTH - hidden)) + before + 1
        before += len(needle.sentence) + 2
    with pytest.raises(ConfigError, match="are needed"):
        reader.hide("lorem ipsum", LENGTH)


@torch.inference_mode()
def test_questions_after_a_cache_are_those_after_the_text(needles, reader):
    """Read and asked under one law it is one forward; a question leaves nothing behind; another law asks otherwise."""
    (law,), (other,) = parse_laws(LAW), parse_laws(OTHER)
    ids = reader.hide("lorem ipsum " * 200, LENGTH)
    reader.under(law)
    reader.read(ids, lambda done: None)
    assert reader.cache.get_seq_length() == LENGTH
    found = [reader.loss(needle)[0] for needle in needles.NEEDLES]
    answer = reader.answer()
    assert [reader.loss(needle)[0] for needle in needles.NEEDLES] == pytest.approx(found, rel=1e-6)

    model = extend(tiny_lm.model(), context=2048, **law.parameters)
    for needle, loss in zip(needles.NEEDLES, found, strict=True):
        more = torch.tensor([reader.tokens(f"{needle.question} {needle.digits}")])
        logits = model(torch.cat([ids, more], 1)).logits[0, -len(needle.digits) - 1 : -1]
        truth = torch.nn.functional.cross_entropy(logits, more[0, -len(needle.digits) :])
        assert loss == pytest.approx(truth.item(), rel=1e-4)
    asked = torch.cat([ids, torch.tensor([reader.tokens(needles.PASSKEY.question)])], 1)
    made = model.generate(asked, max_new_tokens=needles.ANSWER, do_sample=False, pad_token_id=0)
    assert answer == reader.tokenizer.decode(made[0, asked.shape[1] :], skip_special_tokens=True)
    reader.under(other)
    assert reader.loss(needles.PASSKEY)[0] != pytest.approx(found[1], rel=1e-3)


def test_a_row_for_each_law_that_asks(needles, tmp_path, monkeypatch):
    folder = tiny_lm.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("lorem ipsum " * 200)
    argv = ["--model", str(folder), "--text", str(tmp_path / "text.txt"), "--length", str(LENGTH), "--context", "2k"]
    argv += ["--out", str(tmp_path), "--read", LAW]
    monkeypatch.setattr(sys, "argv", ["needles.py", *argv, "--ask", f"{LAW},{OTHER}"])
    assert needles.main() == 0
    (path,) = tmp_path.glob("needles-*.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["ask"], row["read"], row["of"]) for row in rows] == [(LAW, LAW, "6"), (OTHER, LAW, "6")]
    monkeypatch.setattr(sys, "argv", ["needles.py", *argv, "--ask", "yarn"])
    with pytest.raises(ConfigError, match="yarn is not a 3d-rpe"):
        needles.main()
