"""benchmarks/choosing.py on a tiny model: its ways beside the law, that none looks ahead, and what it writes."""

from __future__ import annotations

import csv
import random
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rpe3d import extend
from rpe3d.config import ConfigError
from rpe3d.geometry import make_law
from rpe3d.models import facts

TOKENS = 200
PREFIX = 960  # 6 far chunks of 128, and another one from 1024 on
PROBES = (90, 40, 70)  # tokens; the first and the last go beyond 1024
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


class Words:
    """A tokenizer of words, whatever they are."""

    bos_token_id = None

    def __call__(self, text, **_):
        return SimpleNamespace(input_ids=[1 + sum(map(ord, word)) % (TOKENS - 1) for word in text.split()])


def tiny(pretrained, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": TOKENS, "max_position_embeddings": pretrained, **SIZES, **HEADS}
    return LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()


def drawn(seed, count):
    return random.Random(seed).choices(range(TOKENS), k=count)


@pytest.fixture
def choosing(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return import_module("choosing")


@pytest.fixture
def law():
    """Chunks of 128, which every block divides, and a choice of 256 of the far keys."""
    return make_law("3d-rpe", context=2048, chunk=128, window=128, reach=512, focus=2, fade=0.25, **facts(tiny(512)))


@pytest.fixture
def study(choosing, law):
    made = choosing.Study(tiny(512), law)
    made.read(drawn(1, PREFIX))
    return made


def probes():
    return [drawn(2 + i, count) for i, count in enumerate(PROBES)]


def nats(study, way, some=None):
    return torch.cat([each for each, _ in study.nats(some or probes(), way)])


def test_all_keys_faded_is_the_law_itself(choosing, law, study):
    """The oracle is the extended model, which reads the prefix and a probe in one forward."""
    model = extend(tiny(512), law)
    for probe, (each, hit) in zip(probes(), study.nats(probes(), choosing.ALL), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([drawn(1, PREFIX) + probe])).logits[0, PREFIX:-1]
        want = torch.nn.functional.cross_entropy(logits, torch.tensor(probe[1:]), reduction="none")
        torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-4)
        assert torch.equal(hit, logits.argmax(-1) == torch.tensor(probe[1:]))


def test_the_way_that_ships_is_the_law_s_own_choice(choosing):
    """In a model of one layer, whose prefix is read alike whatever its queries choose."""
    own = {"chunk": 128, "window": 128, "reach": 512, "focus": 0, "fade": 0}
    dense = make_law("3d-rpe", context=2048, **own, **facts(tiny(512)))
    study = choosing.Study(tiny(512, num_hidden_layers=1), dense)
    study.read(drawn(1, PREFIX))
    model = extend(tiny(512, num_hidden_layers=1), "3d-rpe", context=2048, **own, far=16, block=16)
    for probe, (each, _) in zip(
        probes(), study.nats(probes(), choosing.WAYS["mean of 16 + aim 1.0 + lead 8 of 24 + first 128"]), strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([drawn(1, PREFIX) + probe])).logits[0, PREFIX:-1]
        want = torch.nn.functional.cross_entropy(logits, torch.tensor(probe[1:]), reduction="none")
        torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("all keys + faded", {"focus": 2, "fade": 0.25}),
        ("mean of 16 + aim 1.0 + lead 8 of 24 + first 128", {"far": 16}),
    ],
)
def test_a_prefix_read_under_a_way_is_read_as_the_law_reads_it(choosing, law, study, name, parameters):
    """In both layers, so what the prefix's own queries chose counts; the oracle is the extended model."""
    study.read(drawn(1, PREFIX), choosing.WAYS[name])
    model = extend(tiny(512), "3d-rpe", context=2048, chunk=128, window=128, reach=512, **parameters)
    for probe, (each, _) in zip(probes(), study.nats(probes(), choosing.WAYS[name]), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([drawn(1, PREFIX) + probe])).logits[0, PREFIX:-1]
        want = torch.nn.functional.cross_entropy(logits, torch.tensor(probe[1:]), reduction="none")
        torch.testing.assert_close(each, want, rtol=1e-4, atol=1e-4)


def test_as_many_blocks_as_there_are_is_every_key(choosing, study):
    """Bit for bit, whatever the way: the choice is made, and leaves nothing out."""
    every = {faded: nats(study, choosing.Way(faded=faded)) for faded in (False, True)}
    assert not torch.equal(every[False], every[True])
    for name, way in choosing.WAYS.items():
        if way.summary:
            assert torch.equal(nats(study, replace(way, keys=1000.0)), every[way.faded]), name


def test_ways_differ_from_every_key_and_from_each_other(choosing, study):
    """With fewer blocks than there are; a way without an effect would measure nothing."""
    some = {name: way for name, way in choosing.WAYS.items() if way.keys <= 1 and way.first in (0, 128)}
    seen = {name: tuple(nats(study, way).tolist()) for name, way in some.items()}  # of 16 blocks 32 keys are the most
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize(
    "name",
    [
        "mean of 16 + agree 8",
        "sub4 of 32 + pool 4",
        "mean of 16 + witness cosine 10",
        "sub4 of 32 + witness z 2",
        "mean of 16 + aim 1.0 + lead 8 of 24",
        "mean of 16 + aim 1.0 + part 0.25 alone + lead 8 of 24",
    ],
)
def test_no_token_depends_on_a_later_one(choosing, study, name):
    """Also not on another probe: with one replaced from token 30 on, all nats before and beside it are the same."""
    way = choosing.WAYS[name]
    before = [each for each, _ in study.nats(probes(), way)]
    changed = probes()
    changed[1][30:] = drawn(9, PROBES[1] - 30)
    after = [each for each, _ in study.nats(changed, way)]
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1][:29], after[1][:29])
    assert torch.equal(before[2], after[2])
    assert not torch.equal(before[1][30:], after[1][30:])


@pytest.fixture
def bench(choosing, monkeypatch, tmp_path):
    """Runs the benchmark on two texts in one folder; returns its rows."""
    monkeypatch.setattr(choosing, "load", lambda _: SimpleNamespace(model=tiny(2048), tokenizer=Words(), source="tiny"))
    texts = [tmp_path / f"{name}.txt" for name in "ab"]
    for seed, path in enumerate(texts):
        path.write_text(" ".join(map(str, drawn(seed, 3000))))

    def run(*options, texts=tuple(texts)):
        read = [word for path in texts or () for word in ("--text", path)]
        given = ["--model", "tiny", *read, "--out", tmp_path / "out", *options]
        monkeypatch.setattr(sys, "argv", ["choosing.py", *map(str, given)])
        choosing.main()
        with (tmp_path / "out" / "choosing-tiny.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    return run


def test_rows_stand_beside_the_law_and_add_up(bench, tmp_path, capsys):
    rows = bench("--length", "2k", "--only", "mean of 16")
    assert [row["way"] for row in rows] == ["all keys + faded", "mean of 16"]
    assert {(row["model"], row["length"], row["texts"], row["needles"]) for row in rows} == {("tiny", "2048", "2", "8")}
    assert {rows[0][f"{kind}_diff"] for kind in ("text", "copy", "needle")} == {"0.0"}
    law, mine = (float(row["text_nats"]) for row in rows)
    assert float(rows[1]["text_diff"]) == pytest.approx(mine - law, abs=2e-4)
    assert float(rows[1]["text_se"]) > 0
    assert str(tmp_path) not in rows[0]["recipe"]
    assert "mean of 16" in capsys.readouterr().out
    more = bench("--length", "2k", "--only", "bounds of 32")
    assert [row["way"] for row in more] == ["mean of 16", "all keys + faded", "bounds of 32"]
    assert more[0] == rows[1]


def test_a_passkey_is_the_prompt_of_a_comparison(choosing):
    from rpe3d.evaluate.tasks.retrieval import make_passkey

    trial = make_passkey(Words(), 700, 0.3, 5)
    prefix, [probe] = choosing.passkey_and_probe(Words(), 700, 0.3, 5)
    assert prefix + probe.ids == [*trial.prompt.tolist(), *trial.answer]
    assert probe.ids[probe.skip :] == trial.answer


def test_passkeys_are_counted_beside_texts_or_alone(bench):
    row = bench("--length", "2k", "--passkeys", "3", "--only", "mean of 16")[1]
    assert (row["texts"], row["passkeys_n"], row["prefix"]) == ("2", "3", "all keys + faded")
    assert float(row["passkey_se"]) > 0
    assert 0 <= int(row["passkeys"]) <= int(row["passkeys_told"]) <= 3
    through = bench("--length", "2k", "--passkeys", "3", "--only", "mean of 16", "--through")
    assert [one["prefix"] for one in through] == ["all keys + faded"] * 2 + ["each way"] * 2
    assert through[2]["passkey_nats"] == through[0]["passkey_nats"]
    assert through[3]["passkey_nats"] != through[1]["passkey_nats"]
    assert bench("--length", "2k", "--passkeys", "2", "--only", "all keys", texts=False)[-1]["text_nats"] == ""


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--length", "2k", "--only", "mean of 17"), "did you mean 'mean of 16'"),
        (("--length", "8k"), "a.txt has 3000 tokens"),
        (("--length", "512"), "no key of 512 tokens is far"),
    ],
)
def test_what_cannot_be_measured_is_refused(bench, options, problem):
    with pytest.raises(ConfigError, match=problem):
        bench(*options)


def test_nothing_to_read_is_refused(bench):
    with pytest.raises(ConfigError, match="nothing to read"):
        bench("--length", "2k", texts=False)
