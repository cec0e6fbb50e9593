"""Rows: every law measured on the same things, whatever happens in between."""

from __future__ import annotations

import json
import math
from statistics import mean

import pytest
import torch

import rpe3d
import tiny_lm
from launched import forked
from rpe3d.cli import main
from rpe3d.config import ConfigError
from rpe3d.evaluate import Settings, Text, compare, perplexity, tokenize
from rpe3d.evaluate.row import NOT_FINITE, OUT_OF_MEMORY
from rpe3d.evaluate.tasks import probes
from rpe3d.geometry import LawSpec

SMALL = {"windows": 2, "copies": 2, "passkeys": 2}
TIMES = ("seconds", "tokens_per_second")


@pytest.fixture
def text():
    return [Text(name="words", content=" ".join(f"word {i * i} and" for i in range(400)))]


def untimed(results):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in results["rows"]]


def test_every_law_gives_whole_rows_and_leaves_the_model_stock(model, tokenizer, text):
    """All of them; at and beyond the pretrained length of 256."""
    before = model(torch.arange(1, 200)[None]).logits
    results = compare(model, tokenizer, Settings(laws=list(rpe3d.laws()), lengths=[256, 512], **SMALL), texts=text)
    assert [(r["law"], r["length"]) for r in results["rows"]] == [(n, t) for n in rpe3d.laws() for t in (256, 512)]
    assert torch.equal(model(torch.arange(1, 200)[None]).logits, before)
    for r in results["rows"]:
        assert r["status"] == "ok"
        assert r["context"] == max(r["length"], 256)
        nlls = [w["nll"] for w in r["windows"]]
        assert r["ppl"] == pytest.approx(math.exp(mean(nlls)))
        assert r["tail_ppl"] == pytest.approx(math.exp(mean(w["tail_nll"] for w in r["windows"])))
        assert r["copy_nll"] == mean(c["nll"] for c in r["copies"])
        assert (r["passkey"], r["passkey_n"]) == (sum(p["correct"] for p in r["passkeys"]), 2)
        assert [p["depth"] for p in r["passkeys"]] == [0.25, 0.75]
        assert r["tokens"] == 6 * r["length"]
        assert r["tokens_per_second"] > 0
        law = rpe3d.make_law(
            r["name"], **{k: results["model"][k] for k in ("pretrained", "head_dim", "rope_theta")},
            context=r["context"], **r["parameters"],
        )  # fmt: skip
        assert law.own == r["parameters"]
    for kind, keys in (("windows", ("text", "start")), ("copies", ("seed",)), ("passkeys", ("depth", "key"))):
        trials = {json.dumps([[x[k] for k in keys] for x in r[kind]]) for r in results["rows"] if r["length"] == 512}
        assert len(trials) == 1  # the same for every law


def test_a_row_is_measured_under_its_law(model, tokenizer, text):
    parameters = {"chunk": 8, "window": 16, "reach": 64, "focus": 0.5, "fade": 0.25, "sinks": 1}
    entry = LawSpec(label="mine", name="3d-rpe", parameters=parameters)
    settings = Settings(laws=["rope", entry], lengths=[512], measures=["ppl"], windows=2)
    stock, ours = compare(model, tokenizer, settings, texts=text)["rows"]
    tokens = [tokenize(tokenizer, text[0])]
    assert stock["ppl"] == pytest.approx(perplexity(model, tokens, 512, windows=2), rel=1e-6)
    rpe3d.extend(model, "3d-rpe", context=512, **parameters)
    assert ours["ppl"] == pytest.approx(perplexity(model, tokens, 512, windows=2), rel=1e-6)
    assert abs(ours["ppl"] - stock["ppl"]) > 1
    assert (ours["law"], ours["name"], ours["parameters"]) == ("mine", "3d-rpe", parameters)
    assert (ours["copy_nll"], ours["passkey"], ours["passkey_n"], ours["copies"]) == (None, None, None, [])


def test_an_extended_model_is_compared_as_its_stock_self(model, tokenizer, text):
    settings = Settings(laws=["rope"], lengths=[512], measures=["ppl"], windows=1)
    expected = untimed(compare(model, tokenizer, settings, texts=text))
    rpe3d.extend(model, "dca", context=1024)
    assert untimed(compare(model, tokenizer, settings, texts=text)) == expected


def test_a_batch_changes_nothing_but_the_rounding(model, tokenizer, text):
    given = {"laws": ["dca"], "lengths": [512], "windows": 3, "copies": 3, "passkeys": 1}
    one, two = (compare(model, tokenizer, Settings(**given, batch=n), texts=text) for n in (1, 2))
    for key in ("ppl", "tail_ppl", "copy_nll"):
        assert one["rows"][0][key] == pytest.approx(two["rows"][0][key], rel=1e-5)


def test_running_out_of_memory_is_a_row_and_the_next_goes_on(model, tokenizer, text, monkeypatch, tmp_path):
    file = tmp_path / "r.json"
    settings = Settings(laws=["rope", "dca"], lengths=[512, 256], **SMALL)
    score = probes.score

    def full(model, windows, length):
        if length == 512 and rpe3d.law_of(model) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(model, windows, length)

    monkeypatch.setattr(probes, "score", full)
    results = compare(model, tokenizer, settings, texts=text, file=file)
    assert [r["status"] for r in results["rows"]] == ["ok", "ok", OUT_OF_MEMORY, "ok"]
    assert results["rows"][2]["ppl"] is results["rows"][2]["copy_nll"] is None
    assert rpe3d.law_of(model) is None
    monkeypatch.undo()
    again = compare(model, tokenizer, settings, texts=text, file=file)  # and is tried again
    assert [r["status"] for r in again["rows"]] == ["ok"] * 4
    assert again["rows"][0] == results["rows"][0]


def test_later_rows_outlive_a_stop_among_earlier_ones(model, tokenizer, text, monkeypatch, tmp_path):
    file = tmp_path / "r.json"
    settings = Settings(laws=["rope", "dca"], lengths=[512, 256], measures=["ppl"], windows=1)
    score = probes.score

    def too_long(model, windows, length):
        if length == 512:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(model, windows, length)

    monkeypatch.setattr(probes, "score", too_long)
    compare(model, tokenizer, settings, texts=text, file=file)

    def once(model, windows, length):
        monkeypatch.setattr(probes, "score", stop)
        return score(model, windows, length)

    def stop(model, windows, length):
        raise KeyboardInterrupt

    monkeypatch.setattr(probes, "score", once)
    with pytest.raises(KeyboardInterrupt):
        compare(model, tokenizer, settings, texts=text, file=file)
    kept = [(r["law"], r["length"]) for r in json.loads(file.read_text())["rows"]]
    assert kept == [("rope", 512), ("rope", 256), ("dca", 256)]


def test_a_likelihood_that_is_no_number_is_a_row_that_says_so(model, tokenizer, text):
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    settings = Settings(laws=["rope"], lengths=[256], measures=["ppl", "copy"])
    (only,) = compare(model, tokenizer, settings, texts=text)["rows"]
    assert (only["status"], only["ppl"]) == (NOT_FINITE, None)


def test_a_law_that_cannot_reach_a_length_is_skipped_there(model, tokenizer, text):
    """Self-Extend with groups of 2 and 16 tokens of window shows 263 of 512 tokens, and has seen 256."""
    entry = LawSpec(label="narrow", name="self-extend", parameters={"group": 2, "window": 16})
    settings = Settings(laws=[entry], lengths=[256, 512], measures=["ppl"], windows=1)
    short, long = compare(model, tokenizer, settings, texts=text)["rows"]
    assert short["status"] == "ok"
    assert long["status"].startswith("skipped: group 2 with window 16 shows position")
    with pytest.raises(ConfigError, match="group 2 with window 16"):
        compare(model, tokenizer, Settings(laws=[entry], lengths=[512]), texts=text)


def test_progress_ends_at_the_whole_work(model, tokenizer, text):
    seen = []
    settings = Settings(laws=["rope", "dca"], lengths=[256, 512], **SMALL)
    compare(model, tokenizer, settings, texts=text, progress=lambda *step: seen.append(step))
    done = [step[1] for step in seen]
    assert done == sorted(done)
    assert seen[-1] == ("dca at 512", pytest.approx(seen[-1][2]), seen[0][2])


def test_a_length_beyond_the_text_is_refused_before_anything_is_measured(model, tokenizer, text, tmp_path):
    with pytest.raises(ConfigError, match="no text is as long as a window of 65536 tokens"):
        compare(model, tokenizer, Settings(laws=["rope"], lengths=[65536]), texts=text, file=tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_write_the_rows_of_one(tmp_path):
    """To the last bit; and a refusal of the one that writes is everybody's."""
    folder = tiny_lm.save(tmp_path / "model")
    verb = ["compare", folder, "--laws", "rope,3d-rpe", "--lengths", "256,512", "--device", "cpu"]
    verb += ["--windows", "3", "--copies", "2", "--passkeys", "3", "--json"]
    assert main([*map(str, verb), str(tmp_path / "1.json")]) == 0
    refused = (2, *verb, tmp_path / "2.json", "--seed", "1")
    (codes, said), (refusals, words) = forked((2, *verb, tmp_path / "2.json"), refused)
    assert codes == [0, 0], said
    one, two = (json.loads((tmp_path / f"{count}.json").read_text()) for count in (1, 2))
    assert untimed(one) == untimed(two)
    assert refusals == [1, 1]
    assert all("holds results of other settings" in each for each in words), words
