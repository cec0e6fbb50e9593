"""LongBench v2: upstream's prompts to the byte and scores to the digit, and the likelihood of four choices."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

import tiny_lm
from rpe3d.config import ConfigError
from rpe3d.evaluate.likelihood import token_nll
from rpe3d.evaluate.tasks import longbench_v2
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.choices import log_likelihoods
from rpe3d.evaluate.tasks.questions import find

GOLDEN = json.loads((Path(__file__).parent / "golden" / "longbench-v2.json").read_text(encoding="utf-8"))
GOLDEN = GOLDEN["tasks"]["generation"]
RECORD = {
    "_id": "0", "domain": "Single-Document QA", "sub_domain": "s", "difficulty": "easy", "length": "short",
    "question": " What {is} $DOC$ ä? ", "choice_A": "one ", "choice_B": " two", "choice_C": "three", "choice_D": "四",
    "answer": "B", "context": "  ä {word} 中。 " * 3,
}  # fmt: skip


@pytest.fixture
def plain():
    return Chat(tokenizer=tiny_lm.tokenizer(bos=True), form="none")


def test_prompts_are_upstreams_to_the_byte(plain):
    """What get_pred of THUDM/LongBench at 2e00731, pred.py, sends: one record as it is, one that is cut at 3750."""
    records = [RECORD, RECORD | {"context": "  ä {word} 中。 " * 700}]
    prompts = [sample.prompts[0] for sample in longbench_v2.samples("generation", records, plain, 4096)]
    assert hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16] == "df7c72d2dc166043"


def test_the_context_of_upstreams_models_leaves_120_000_tokens():
    """config/model2maxlen.json, for models of 128k."""
    assert [longbench_v2.longest(length) for length in (131072, 8192, 4096)] == [120_000, 7_500, 3_750]


@pytest.mark.parametrize("form", ["none", "vicuna"])
@pytest.mark.parametrize("length", [1024, 1536, 2048])
def test_a_prompt_and_its_answer_fit_into_a_short_context(form, length):
    """There upstream's share for the answer, 8 in 128, is less than the 128 tokens that it generates."""
    chat = Chat(tokenizer=tiny_lm.tokenizer(bos=True), form=form)
    (sample,) = longbench_v2.samples("generation", [RECORD | {"context": "word " * 700}], chat, length)
    assert len(chat.encode(sample.prompts[0])) + sample.max_new <= length


def test_the_slice_scores_what_upstreams_scripts_give(plain):
    for one in GOLDEN["records"]:
        (sample,) = longbench_v2.samples("generation", [RECORD | {"answer": one["answer"]}], plain, 4096)
        made = longbench_v2.record(sample, [one["response"]])
        assert (made["pred"], made["judge"]) == (one["pred"], one["judge"]), one
    found = longbench_v2.score("generation", GOLDEN["records"])
    parts = {name: score for kind in ("difficulty", "length") for name, (score, _) in found.parts[kind].items()}
    assert (found.score, parts) == (GOLDEN["score"], GOLDEN["parts"])
    assert found.parts["domain"] == {"Multi-Document QA": (40.0, 5), "Code Repository Understanding": (50.0, 2)}


@pytest.mark.parametrize(("form", "end"), [("none", '".\n\n'), ("llama2", '".[/INST] '), ("template", '".<model>')])
def test_choices_begin_where_the_answer_does(form, end):
    tokenizer = tiny_lm.tokenizer()
    tokenizer.chat_template = "<user>{{ messages[0].content }}<model>"
    (sample,) = longbench_v2.samples("choices", [RECORD], Chat(tokenizer=tokenizer, form=form), 4096)
    assert sample.prompts[0].endswith(end)
    assert sample.choices == tuple(f"The correct answer is ({letter})" for letter in "ABCD")
    answers = [longbench_v2.record(sample, [choice])["pred"] for choice in sample.choices]
    assert answers == ["A", "B", "C", "D"]


def test_likelihoods_are_those_of_the_tokens_in_which_choices_differ(plain):
    model = tiny_lm.model()
    choices = [f"The correct answer is ({letter})" for letter in "ABCD"]
    found = log_likelihoods(model, plain, "Which?", choices)
    for choice, likely in zip(choices, found, strict=True):
        read = torch.tensor([plain.encode("Which?" + choice)[:-1]])  # all of them end with the bracket
        assert likely == pytest.approx(-float(token_nll(model, read, 1)), abs=1e-5)


@pytest.mark.parametrize("choices", [("one", "two", "three"), ("ab", "abc"), ("xa", "xab", "yab")])
def test_choices_of_several_tokens_count_with_all_that_differ(plain, choices):
    """Against whole answers: what all of them begin with changes all likelihoods by the same amount."""
    model = tiny_lm.model()
    found = log_likelihoods(model, plain, "Which? ", choices)
    start = len(plain.encode("Which? "))
    rows = [plain.encode("Which? " + choice) for choice in choices]
    whole = [-float(token_nll(model, torch.tensor([row]), len(row) - start).sum()) for row in rows]
    assert [one - found[0] for one in found] == pytest.approx([one - whole[0] for one in whole], abs=1e-4)


def test_a_model_without_finite_likelihoods_is_refused(plain):
    model = tiny_lm.model()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ConfigError, match="the likelihood of a choice is not finite"):
        log_likelihoods(model, plain, "Which?", ["A", "B"])


def test_data_are_upstreams_json_or_lines(tmp_path):
    place = tmp_path / "longbench-v2"
    place.mkdir()
    (place / "data.jsonl").write_text(json.dumps(RECORD) + "\n", encoding="utf-8")
    assert find(("longbench-v2", "choices"), tmp_path, None).records == [RECORD]
    (place / "data.json").write_text(json.dumps([RECORD, RECORD]), encoding="utf-8")
    assert len(find(("longbench-v2", "generation"), tmp_path, None).records) == 2
    for raw, problem in (("{}", "is not a list of records"), ("[", "is not JSON")):
        (place / "data.json").write_text(raw)
        with pytest.raises(ConfigError, match=problem):
            find(("longbench-v2", "choices"), tmp_path, None)
    with pytest.raises(ConfigError, match=r"has no questions of longbench-v2:choices; .*: get `data.json`"):
        find(("longbench-v2", "choices"), place, None)


def test_what_is_no_question_or_no_prediction_is_refused(plain):
    with pytest.raises(ConfigError, match="record 1 has no field 'question'"):
        longbench_v2.samples("choices", [{"context": "c"}], plain, 4096)
    with pytest.raises(ConfigError, match="LongBench v2 has no room in a context of 512"):
        longbench_v2.samples("choices", [RECORD], plain, 512)
    with pytest.raises(ConfigError, match="'judge' of record 1 is not true or false"):
        longbench_v2.score("choices", [{"judge": "yes", "difficulty": "easy", "length": "short"}])
