"""LongPPL: the published formula, the same key tokens for every law, and key tokens that outlive an interruption."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import pytest
import torch

import rpe3d
import tiny_lm
from launched import forked
from rpe3d.cli import main
from rpe3d.config import ConfigError
from rpe3d.evaluate import Settings, Text, Tokens, compare
from rpe3d.evaluate import keys as key_tokens
from rpe3d.evaluate.findings import findings
from rpe3d.evaluate.keys import reads_all
from rpe3d.evaluate.paired import paired
from rpe3d.evaluate.report import write_report
from rpe3d.evaluate.tasks.longppl import truncated_nll, truncation
from rpe3d.evaluate.tasks.perplexity import Window, whole_windows

LENGTH, SHORT, STEP = 512, 128, 32  # of a model of 256 positions


@pytest.fixture(scope="module")
def written():
    """A confident model, and texts that it wrote itself under 3D-RPE: the only texts a random model finds likely."""
    model = tiny_lm.model().double()
    with torch.no_grad():
        model.lm_head.weight *= 1.5
        rpe3d.extend(model, "3d-rpe", context=LENGTH)
        tokens = torch.randint(1, 257, (4, 8), generator=torch.Generator().manual_seed(0))
        draw, cache, seen = torch.Generator().manual_seed(1), None, tokens
        while tokens.shape[1] < LENGTH:
            out = model(seen, past_key_values=cache, use_cache=True)
            cache, seen = out.past_key_values, torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=draw)
            tokens = torch.cat([tokens, seen], dim=1)
        rpe3d.restore(model)
    return model, [Tokens(name=str(i), ids=ids) for i, ids in enumerate(tokens)]


@pytest.fixture
def measured(written, tokenizer, monkeypatch):
    """Return a comparison on those texts, whose names stand for their tokens."""
    model, texts = written
    known = {text.name: text for text in texts}
    monkeypatch.setattr(import_module("rpe3d.evaluate.compare"), "tokenize", lambda _, text: known[text.name])
    given = [Text(name=name, content=name) for name in known]

    def run(*laws, lengths=(LENGTH,), measures=("longppl",), windows=4, **options):
        settings = Settings(laws=laws, lengths=lengths, measures=measures, windows=windows)
        return compare(model, tokenizer, settings, texts=given, **options)

    return run


def losses(model, tokens):
    """Cross entropies of all tokens but the first, as PyTorch has them."""
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(tokens[None]).logits[0, :-1], tokens[1:], reduction="none")


def published(full, model, tokens):
    """The key tokens of arXiv 2410.23771 one by one: LSD > 2 and LCL > -2, with upstream's truncated contexts."""
    keys = []
    for start in range(0, len(tokens) - SHORT, STEP):
        short = losses(model, tokens[start : start + SHORT + STEP])
        for position in range(start + SHORT, min(start + SHORT + STEP, len(tokens))):
            likelihood = -full[position - 1]
            if likelihood + short[position - start - 1] > 2 and likelihood > -2:
                keys.append(position)
    return keys


def test_one_law_alone_gives_the_published_formula(written, measured):
    model, texts = written
    results = measured("3d-rpe")
    (row,) = results["rows"]
    rpe3d.extend(model, "3d-rpe", context=LENGTH)
    full = [losses(model, text.ids) for text in texts]
    rpe3d.restore(model)
    found = [published(of, model, text.ids) for text, of in zip(texts, full, strict=True)]
    assert [window["keys"] for window in results["keys"]["512"]["windows"]] == found
    picked = torch.cat([of[torch.tensor(keys) - 1] for of, keys in zip(full, found, strict=True)])
    assert row["key_tokens"] == len(picked) >= 30
    assert row["long_ppl"] == pytest.approx(math.exp(picked.mean()), rel=1e-5)
    assert [window["n"] for window in row["key_windows"]] == [len(keys) for keys in found]


def test_every_law_has_the_same_key_tokens_which_are_those_of_any(measured):
    alone = {law: measured(law)["keys"]["512"]["windows"] for law in ("3d-rpe", "rerope")}
    results = measured("3d-rpe", "rerope", "streaming-llm")
    assert results["keys"]["512"]["by"]["laws"] == ["3d-rpe", "rerope"]
    for i, window in enumerate(results["keys"]["512"]["windows"]):
        assert window["keys"] == sorted({*alone["3d-rpe"][i]["keys"], *alone["rerope"][i]["keys"]})
    assert len({row["key_tokens"] for row in results["rows"]}) == 1


def test_a_law_that_reads_no_far_text_has_a_higher_longppl(measured):
    ours, streaming = measured("3d-rpe", "streaming-llm")["rows"]
    assert streaming["long_ppl"] > 2 * ours["long_ppl"]


def test_only_a_window_alone_does_not_read_the_whole_text():
    made = {law: rpe3d.make_law(law, pretrained=256, context=1024, head_dim=16) for law in rpe3d.laws()}
    assert [law for law in made if not reads_all(made[law])] == ["streaming-llm"]


def test_truncated_contexts_are_upstreams_or_within_the_pretrained_length():
    """PKU-ML/LongPPL, `compute_longppl`: trunc_len=4096, sliding_window=1024."""
    assert [(cut.short, cut.step) for cut in map(truncation, (131072, 8192, 2048, 256))] == [
        (4096, 1024), (4096, 1024), (1024, 256), (128, 32)
    ]  # fmt: skip


def test_truncated_contexts_open_with_bos(written):
    model, texts = written
    window = Window(text="0", start=0, ids=texts[0].ids[:299], first=(0,), scored=299)
    found = truncated_nll(model, window, truncation(256), batch=2)
    assert len(found) == 300 - SHORT
    piece = torch.cat([torch.tensor([0]), window.tokens[STEP + 1 : SHORT + 2 * STEP]])
    torch.testing.assert_close(found[STEP : 2 * STEP].double(), losses(model, piece)[-STEP:], rtol=1e-5, atol=1e-5)


def test_a_stopped_run_keeps_its_key_tokens(measured, monkeypatch, tmp_path):
    file, laws = tmp_path / "r.json", ("3d-rpe", "rerope", "streaming-llm")
    whole = measured(*laws)
    module = import_module("rpe3d.evaluate.compare")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "measure_row", stop)
        with pytest.raises(KeyboardInterrupt):
            measured(*laws, file=file)
    assert json.loads(file.read_text())["keys"] == whole["keys"]
    monkeypatch.setattr(key_tokens, "find", stop)
    resumed = measured(*laws, file=file)
    for key in ("long_ppl", "key_tokens", "key_windows"):
        assert [row[key] for row in resumed["rows"]] == [row[key] for row in whole["rows"]]


def test_a_file_of_key_tokens_serves_other_laws(measured, monkeypatch, tmp_path):
    file = tmp_path / "keys.json"
    first = measured("3d-rpe", keys=file)
    monkeypatch.setattr(key_tokens, "find", None)
    (row,) = measured("streaming-llm", keys=file, file=tmp_path / "r.json")["rows"]
    assert row["key_tokens"] == first["rows"][0]["key_tokens"]
    content = json.loads(file.read_text())
    content["keys"]["512"]["windows"][0]["keys"].pop()
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"r\.json holds results of other key"):
        measured("streaming-llm", keys=file, file=tmp_path / "r.json")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kind": "compare"}, "exists but does not hold key tokens"),
        ({"tokenizer": "x"}, "holds key tokens of another tokenizer"),
        ({"texts": {}}, "holds key tokens of other texts"),
        ({"keys": None}, "is damaged: its key tokens are not as they were written"),
        ({"keys": {"512": {}}}, "is damaged"),
        ({"keys": {"long": {}}}, "is damaged"),
    ],
)
def test_a_file_of_other_key_tokens_is_refused(measured, tmp_path, change, problem):
    file = tmp_path / "keys.json"
    measured("rope", keys=file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=problem):
        measured("rope", keys=file)


SPANS = [[3, 4], [250, 262], [400, 430], [431, 431], [900, 925], [940, 955]]


@pytest.fixture
def others(tokenizer, tmp_path):
    """A text with letters of two bytes, and key tokens in it that a model with another tokenizer has found."""
    text = Text(name="words", content=" ".join(f"wörd {i * i} ünd" for i in range(100)))
    about = {"model": "evaluator", "weights": "x", "laws": ["rope"]}
    found = {"by": about, "alpha": 2.0, "beta": 2.0, "short": 4096, "step": 1024, "left_out": [], "windows": []}
    keys = {"2048": found | {"spans": {"words": [[0, 9999]]}}, "32768": found | {"spans": {"words": SPANS}}}
    content = {"schema": 1, "kind": "keys", "tokenizer": "another", "texts": {"words": text.sha256}, "keys": keys}
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(content))
    return text, file, content


def test_key_tokens_of_another_tokenizer_are_those_within_its_spans(others, model, tokenizer, tmp_path):
    """As `cal_overlap` of PKU-ML/LongPPL: a token counts if all of its characters lie in a span of key tokens."""
    text, file, content = others
    settings = Settings(laws=["rope", "streaming-llm"], lengths=[LENGTH], measures=["longppl"], windows=2)
    results = compare(model, tokenizer, settings, texts=[text], keys=file, file=tmp_path / "r.json")
    found = results["keys"]["512"]
    assert found["by"] == {"model": "evaluator", "weights": "x", "laws": ["rope"], "length": 32768}
    at = [i for i, letter in enumerate(text.content) for _ in letter.encode()]  # a token for each byte
    for window in found["windows"]:
        inside = [any(a <= at[window["start"] + n] < b for a, b in SPANS) for n in range(LENGTH)]
        assert window["keys"] == [n for n in range(SHORT, LENGTH) if inside[n]]
    assert sum(len(window["keys"]) for window in found["windows"]) == results["rows"][0]["key_tokens"] >= 30
    ids = torch.tensor(tokenizer(text.content).input_ids)
    full = [(losses(model, ids[one["start"] :][:LENGTH]), one["keys"]) for one in found["windows"]]
    picked = torch.cat([of[torch.tensor(keys) - 1] for of, keys in full if keys])
    assert results["rows"][0]["long_ppl"] == pytest.approx(math.exp(picked.mean()), rel=1e-4)
    assert json.loads(file.read_text()) == content


def test_in_windows_that_overlap_a_token_is_key_once_with_the_most_text_before_it(others, model, tokenizer):
    text, file, _ = others
    settings = Settings(laws=["rope"], lengths=[LENGTH], measures=["longppl"], windows=6)
    found = compare(model, tokenizer, settings, texts=[text], keys=file)["keys"]["512"]
    at = [i for i, letter in enumerate(text.content) for _ in letter.encode()]
    starts = [window["start"] for window in found["windows"]]
    assert starts[1] < starts[0] + LENGTH
    inside = [n for n, letter in enumerate(at) if any(a <= letter < b for a, b in SPANS)]
    counted = [n for n in inside if any(SHORT <= n - start < LENGTH for start in starts)]
    assert [window["keys"] for window in found["windows"]] == [
        [n - start for n in counted if start == min(one for one in starts if n < one + LENGTH)] for start in starts
    ]


@pytest.mark.parametrize(
    "damage", [{"windows": [{}]}, {"windows": None}, {"spans": []}, {"spans": {"words": [[5]]}}, {"by": {}}]
)
def test_damaged_key_tokens_are_refused_in_a_sentence(others, model, tokenizer, damage):
    text, file, content = others
    content["keys"]["32768"] |= damage
    file.write_text(json.dumps(content))
    settings = Settings(laws=["rope"], lengths=[LENGTH], measures=["longppl"], windows=2)
    with pytest.raises(ConfigError, match="is damaged: its key tokens are not as they were written"):
        compare(model, tokenizer, settings, texts=[text], keys=file)


def test_without_offsets_key_tokens_of_another_tokenizer_are_refused(others, model, tokenizer, monkeypatch):
    text, file, content = others
    settings = Settings(laws=["rope"], lengths=[LENGTH], measures=["longppl"], windows=2)
    with monkeypatch.context() as patched:
        patched.setattr(key_tokens.spans, "offsets", lambda *_: None)
        with pytest.raises(ConfigError, match="holds key tokens of another tokenizer"):
            compare(model, tokenizer, settings, texts=[text], keys=file)
    for found in content["keys"].values():
        del found["spans"]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="holds key tokens of another tokenizer"):
        compare(model, tokenizer, settings, texts=[text], keys=file)


def test_spans_are_of_tokens_in_a_row_and_hold_whole_tokens():
    """Against a loop over tokens and spans, on random ones; tokens of one letter may share it, or have none."""
    draw = random.Random(0)
    for _ in range(200):
        edges = sorted(draw.choices(range(60), k=draw.randint(2, 30)))
        at = torch.tensor(list(pairwise(edges)))
        tokens = sorted(draw.sample(range(len(at)), draw.randint(0, len(at))))
        made = key_tokens.spans.joined(at, tokens)
        assert all(a[1] < b[0] for a, b in pairwise(made))
        letters = {x for token in tokens for x in range(*at[token].tolist())}
        assert {x for a, b in made for x in range(a, b)} == letters
        other = torch.tensor(list(pairwise(sorted(draw.choices(range(60), k=20)))))
        found = key_tokens.spans.within(other, [span for span in made if span[0] < span[1]])
        truth = [a < b and any(x <= a and b <= y for x, y in made) for a, b in other.tolist()]
        assert found.tolist() == truth


BESIDE = 128


@pytest.fixture(scope="module", params=[False, True], ids=["no BOS", "BOS"])
def neutral(request, tmp_path_factory):
    """A model, texts whose windows of 256 it wrote itself under stock RoPE, and a file of its key tokens there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer, draw = tiny_lm.tokenizer(request.param), torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=95, **tiny_lm.SIZES)).double().eval()  # letters of one byte
    noise = torch.randint(1, 95, (3, 2 * BESIDE), generator=draw)
    first = torch.zeros(3, int(request.param), dtype=torch.long)
    with torch.no_grad():
        model.lm_head.weight *= 3
        tokens, cache, seen = noise[:, :8], None, torch.cat([first, noise[:, :8]], dim=1)
        while tokens.shape[1] < 256:
            out = model(seen, past_key_values=cache, use_cache=True)
            likely = out.logits[:, -1].softmax(-1)[:, 1:]  # no <s>
            cache, seen = out.past_key_values, 1 + torch.multinomial(likely, 1, generator=draw)
            tokens = torch.cat([tokens, seen], dim=1)
    tokens = torch.cat([noise[:, :BESIDE], tokens, noise[:, BESIDE:]], dim=1)
    texts = [Text(name=str(i), content=tokenizer.decode(ids)) for i, ids in enumerate(tokens)]
    file = tmp_path_factory.mktemp("neutral") / "keys.json"
    settings = Settings(laws=["rope"], lengths=[256], measures=["longppl"], windows=3)
    found = compare(model, tokenizer, settings, texts=texts, keys=file, name="tiny")["keys"]["256"]
    return model, tokenizer, texts, file, found


@pytest.fixture
def at_512(neutral):
    """Return a comparison on those texts, whose windows of 512 tokens hold those of 256 in their middle."""
    model, tokenizer, texts, file, _ = neutral
    settings = Settings(laws=["3d-rpe", "dca"], lengths=[LENGTH], measures=["longppl"], windows=3)

    def run(keys=file, fixed_keys=True, **options):
        return compare(model, tokenizer, settings, texts=texts, keys=keys, fixed_keys=fixed_keys, **options)

    return run


def test_fixed_keys_are_those_of_the_shorter_windows_whatever_is_compared(neutral, at_512, monkeypatch):
    """What `--fixed-keys` is for: a model's own key tokens under stock RoPE, in which no compared law has a say."""
    model, tokenizer, texts, file, shorter = neutral
    before = file.read_bytes()
    monkeypatch.setattr(key_tokens, "find", None)
    results = at_512()
    found = results["keys"]["512"]
    assert list(results["keys"]) == ["512"]
    assert found["by"] == shorter["by"] | {"length": 256}
    expected = [[BESIDE + n for n in window["keys"]] for window in shorter["windows"]]
    assert [window["keys"] for window in found["windows"]] == expected
    first, _ = results["rows"]
    assert [row["key_tokens"] for row in results["rows"]] == [sum(map(len, expected))] * 2
    assert first["key_tokens"] >= 30
    rpe3d.extend(model, "3d-rpe", context=LENGTH)
    full = [losses(model, torch.tensor(tokenizer(text.content).input_ids[:LENGTH])) for text in texts]
    rpe3d.restore(model)
    picked = torch.cat([of[torch.tensor(keys) - 1] for of, keys in zip(full, expected, strict=True)])
    assert first["long_ppl"] == pytest.approx(math.exp(picked.mean()), rel=1e-5)
    assert "found by tiny under rope in windows of 256 tokens, against" in " ".join(findings(results))
    assert results["settings"]["fixed_keys"] is True
    assert file.read_bytes() == before


def test_fixed_keys_may_be_of_more_texts_than_are_compared(neutral, at_512):
    """A larger model is compared on fewer texts. A text of which the file knows nothing is refused."""
    model, tokenizer, texts, file, _ = neutral
    every = at_512()["keys"]["512"]["windows"]
    settings = Settings(laws=["dca"], lengths=[LENGTH], measures=["longppl"], windows=2)
    found = compare(model, tokenizer, settings, texts=texts[1:], keys=file, fixed_keys=True)["keys"]["512"]["windows"]
    assert found == every[1:]
    other = [*texts[1:], replace(texts[0], content=texts[0].content[::-1])]
    with pytest.raises(ConfigError, match="holds key tokens of other texts"):
        compare(model, tokenizer, settings, texts=other, keys=file, fixed_keys=True)


def test_without_fixed_keys_a_missing_length_is_found_anew(neutral, at_512, tmp_path):
    """As before the option: under the compared laws, and added to the file."""
    file = tmp_path / "keys.json"
    file.write_bytes(neutral[3].read_bytes())
    results = at_512(keys=file, fixed_keys=False)
    assert results["keys"]["512"]["by"]["laws"] == ["3d-rpe", "dca"]
    assert list(json.loads(file.read_text())["keys"]) == ["256", "512"]
    assert "fixed_keys" not in results["settings"]


@pytest.mark.parametrize("first", [False, True])
def test_fixed_keys_are_a_setting_that_a_resumed_run_must_share(neutral, at_512, tmp_path, first):
    """Rows on other key tokens would stand side by side; a run is resumed by the same command."""
    keys, file = tmp_path / "keys.json", tmp_path / "r.json"
    keys.write_bytes(neutral[3].read_bytes())
    results = at_512(keys=keys, fixed_keys=first, file=file)
    with pytest.raises(ConfigError, match=r"r\.json holds results of other settings"):
        at_512(keys=keys, fixed_keys=not first, file=file)
    assert json.loads(file.read_text()) == results
    assert at_512(keys=keys, fixed_keys=first, file=file)["rows"] == results["rows"]


@pytest.mark.parametrize("change", [{}, {"tokenizer": "another"}])
def test_fixed_keys_in_longer_windows_or_elsewhere_leave_windows_without_any(others, model, tokenizer, change):
    """Key tokens of 32k serve windows of 512, for any tokenizer; none counts that is not in a window."""
    text, file, content = others
    mine = compare(model, tokenizer, Settings(laws=["rope"], lengths=[256], measures=["ppl"]), texts=[text])
    content["tokenizer"] = mine["model"]["fingerprint"]["tokenizer"]
    settings = Settings(laws=["rope"], lengths=[LENGTH], measures=["longppl"], windows=2)
    sizes, row = [], {}
    for spans in (SPANS, [[0, 100], [400, 430]], [[0, 100]]):
        content["keys"]["32768"]["spans"] = {"words": spans}
        file.write_text(json.dumps(content | change))
        results = compare(model, tokenizer, settings, texts=[text], keys=file, fixed_keys=True)
        assert results["keys"]["512"]["by"]["length"] == 32768
        sizes.append([len(window["keys"]) for window in results["keys"]["512"]["windows"]])
        (row,) = results["rows"]
        assert row["key_tokens"] == sum(sizes[-1])
    assert all(sizes[0])
    assert sizes[1][0] >= 30
    assert sizes[1][1] == 0
    assert sizes[2] == [0, 0]
    assert (row["status"], row["long_ppl"]) == ("ok", None)


def test_fixed_keys_that_are_nowhere_are_refused(others, model, tokenizer, tmp_path):
    """Nothing is found in their place, and a file that does not exist is not written."""
    text, file, content = others
    settings, none = Settings(laws=["rope"], lengths=[LENGTH], measures=["longppl"], windows=2), tmp_path / "none.json"
    with pytest.raises(ConfigError, match="--fixed-keys is given without --keys: add --keys FILE"):
        compare(model, tokenizer, settings, texts=[text], fixed_keys=True)
    with pytest.raises(ConfigError, match=r"none\.json does not exist, and --fixed-keys finds no key tokens"):
        compare(model, tokenizer, settings, texts=[text], keys=none, fixed_keys=True)
    assert not none.exists()
    found = content["keys"].pop("32768")
    bare = {name: part for name, part in found.items() if name != "spans"}
    for keys in ({}, {"32768": bare}, {"2048": found, "32768": found | {"spans": {"words": []}}}):
        file.write_text(json.dumps(content | {"keys": keys}))
        with pytest.raises(ConfigError, match=r"keys\.json marks no characters as key in its longest windows"):
            compare(model, tokenizer, settings, texts=[text], keys=file, fixed_keys=True)


def test_windows_lie_within_longer_ones_and_one_of_a_text_in_the_middle(fuzz):
    """As docs/guides/compare.md says of fixed keys: for any lengths, if every text is long enough for the longer."""
    draw = random.Random(0)
    for _ in range(100 * fuzz):
        short, long = sorted(draw.sample(range(2, 300), 2))
        sizes = [draw.randint(long, 900) for _ in range(draw.randint(1, 3))]
        texts = [Tokens(name=str(i), ids=torch.arange(n)) for i, n in enumerate(sizes)]
        count, first = draw.randint(1, 9), draw.choice([(), (0,)])
        pairs = zip(*(whole_windows(texts, length, count, first) for length in (short, long)), strict=True)
        for inner, outer in pairs:
            before = inner.start - outer.start
            assert inner.text == outer.text
            assert 0 <= before <= long - short
            if count <= len(texts):
                assert abs(2 * before - (long - short)) <= 1


def test_what_cannot_be_measured_is_refused(measured, tmp_path):
    with pytest.raises(ConfigError, match="none of streaming-llm reads the whole text"):
        measured("streaming-llm")
    measured("rope", keys=tmp_path / "keys.json")
    with pytest.raises(ConfigError, match="the key tokens at 512 come from other windows"):
        measured("rope", keys=tmp_path / "keys.json", windows=3)
    with pytest.raises(ConfigError, match="there is no folder"):
        measured("rope", keys=tmp_path / "none" / "keys.json")
    with pytest.raises(ConfigError, match="no text is as long as a window of 1024 tokens"):
        measured("rope", lengths=[1024])


def test_windows_without_far_context_are_refused(tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=257, **tiny_lm.SIZES | {"max_position_embeddings": 1024})).eval()
    settings = Settings(laws=["rope"], lengths=[512], measures=["longppl"])
    with pytest.raises(ConfigError, match="longer than the truncated context of 512 tokens, got 512"):
        compare(model, tokenizer, settings, texts=[Text(name="a", content="a" * 600)])


def test_too_few_key_tokens_have_no_number(model, tokenizer, tmp_path):
    """A random model finds no token of a text likely."""
    text = [Text(name="words", content=" ".join(f"word {i * i} and" for i in range(100)))]
    settings = Settings(laws=["rope", "dca"], lengths=[512], measures=["ppl", "longppl"], windows=1)
    results = compare(model, tokenizer, settings, texts=text)
    for row in results["rows"]:
        assert (row["status"], row["long_ppl"]) == ("ok", None)
        assert row["key_tokens"] < 30
    assert "LongPPL at 512 has no number" in " ".join(findings(results))
    assert "long_nll" not in paired(results, "rope")[0]
    write_report(results, tmp_path)


def test_the_report_names_what_found_the_key_tokens(measured, tmp_path):
    results = measured("3d-rpe", "streaming-llm", measures=("ppl", "longppl"))
    write_report(results, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "perplexity of the key tokens" in page
    assert "against a context of 128 tokens with stock RoPE" in page
    header, first, _ = (tmp_path / "table.csv").read_text().splitlines()
    cells = dict(zip(header.split(","), first.split(","), strict=True))
    assert float(cells["long_ppl"]) == results["rows"][0]["long_ppl"]
    assert int(cells["key_tokens"]) == results["rows"][0]["key_tokens"]


def test_differences_weigh_windows_by_their_key_tokens(measured):
    """As a ratio of sums; the interval of windows with equal numbers is the plain one."""
    results = measured("3d-rpe", "streaming-llm")
    ours, streaming = results["rows"]
    (found,) = paired(results, "3d-rpe")
    assert found["long_nll"].mean == pytest.approx(math.log(streaming["long_ppl"] / ours["long_ppl"]))
    assert found["long_nll"].clear
    for row in results["rows"]:
        row["key_windows"] = [window | {"n": 20} for window in row["key_windows"]]
        row["windows"] = [window | {"tail_nll": 0.0} for window in row["key_windows"]]
    (equal,) = paired(results, "3d-rpe")
    assert (equal["long_nll"].low, equal["long_nll"].high) == pytest.approx((equal["nll"].low, equal["nll"].high))


def test_a_law_that_runs_out_of_memory_is_left_out_and_tried_again(measured, monkeypatch):
    whole = key_tokens.whole_nll

    def full(model, windows, batch):
        if rpe3d.law_of(model).name == "rerope":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(model, windows, batch)

    monkeypatch.setattr(key_tokens, "whole_nll", full)
    results = measured("3d-rpe", "rerope")
    assert results["keys"]["512"]["left_out"] == ["rerope"]
    assert [row["status"] for row in results["rows"]] == ["ok", "ok"]
    assert results["rows"][1]["long_ppl"] is not None


def test_progress_ends_at_the_whole_work(measured):
    seen = []
    measured("3d-rpe", "streaming-llm", measures=("ppl", "longppl"), progress=lambda *step: seen.append(step))
    done = [step[1] for step in seen]
    assert done == sorted(done)
    assert seen[-1][1] == pytest.approx(seen[-1][2])


def test_two_processes_find_the_key_tokens_of_one(tmp_path):
    folder = tiny_lm.save(tmp_path / "model")
    verb = ["compare", folder, "--laws", "rope,3d-rpe,streaming-llm", "--lengths", "512", "--device", "cpu"]
    verb += ["--measures", "longppl", "--windows", "3", "--json"]
    argv = {n: [*verb, tmp_path / f"{n}.json", "--keys", tmp_path / f"{n}.keys"] for n in (1, 2)}
    assert main([*map(str, argv[1])]) == 0
    ((codes, said),) = forked((2, *argv[2]))
    assert codes == [0, 0], said
    found = []
    for count in argv:
        results = json.loads((tmp_path / f"{count}.json").read_text())
        kept = json.loads((tmp_path / f"{count}.keys").read_text())["keys"]
        spans = kept["512"].pop("spans")
        assert kept == results["keys"]
        found.append((results["keys"], spans, [row["key_windows"] for row in results["rows"]]))
    assert found[0] == found[1]
