"""LongBench's prompts, byte for byte as upstream renders them, and what is no prediction or no data of it."""

from __future__ import annotations

import hashlib

import pytest

import tiny_lm
from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks import longbench
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.predictions import read_records
from rpe3d.evaluate.tasks.questions import load

# sha256 of the first two prompts of each task's mini file, made by upstream's own lines (THUDM/LongBench at 2e00731,
# pred.py) with a tokenizer of one token a byte and BOS, as llama2-7b-chat-4k: 3500 tokens.
UPSTREAM = {
    "narrativeqa": "3e37f6cf3c49a1d2",
    "qasper": "c2d476b068e8f0fa",
    "multifieldqa_en": "d8f339519edc7464",
    "hotpotqa": "8b0b69295432ea3a",
    "2wikimqa": "b6b2878939b7f880",
    "musique": "7b01f79268c843a4",
    "gov_report": "f630625585b9a187",
    "qmsum": "51522b5c4cd02e7c",
    "multi_news": "5869dc1634b8e2fe",
    "trec": "a0fac7dc1108df02",
    "triviaqa": "7d9fbff2bf29443b",
    "samsum": "0244c349f09ed29a",
    "passage_count": "ded161f8b4d21412",
    "passage_retrieval_en": "c1821bc1a69cad9d",
    "lcc": "3f7a20e275ec4cc4",
    "repobench-p": "0b30c36d24d5143f",
}
# The same of two made-up records, a short one and one that is cut, for all tasks.
MADE = {
    "narrativeqa": "3281e5520b8458ff",
    "qasper": "d58b76f36a43ea77",
    "multifieldqa_en": "27870f5967adcc0d",
    "multifieldqa_zh": "bc2a7f58cdd9c132",
    "hotpotqa": "db15045649a76168",
    "2wikimqa": "db15045649a76168",
    "musique": "db15045649a76168",
    "dureader": "deb46956eeabffd6",
    "gov_report": "3e7d0ae4875fa296",
    "qmsum": "eb1b12267d1ac2f0",
    "multi_news": "038b9d0ecac79c71",
    "vcsum": "e14372b4ebcef87d",
    "trec": "dbfef8ac800a183d",
    "triviaqa": "10465a8a923ca9ba",
    "samsum": "268ba487b2e1eaa4",
    "lsht": "db06cacc2de67af5",
    "passage_count": "ec323f04e2e3bdee",
    "passage_retrieval_en": "fc045296e407d91c",
    "passage_retrieval_zh": "e4de8aba092b6ca3",
    "lcc": "da616ddbe87e08da",
    "repobench-p": "81d69859a3370589",
}
RECORD = {"context": "C" * 50, "input": "Q", "answers": ["A"], "all_classes": None, "length": 50}


def digest(samples):
    return hashlib.sha256("\0".join(sample.prompts[0] for sample in samples).encode()).hexdigest()[:16]


@pytest.mark.parametrize("task", UPSTREAM)
def test_prompts_are_upstreams_to_the_byte(benchmarks, chat, task):
    records = load("longbench", task, benchmarks).records
    if task == "multi_news":  # the one task whose whole file may lie beside the mini
        records = read_records(benchmarks / "longbench" / "multi_news.mini.jsonl.xz")
    assert digest(longbench.samples(task, records, chat, 4096, limit=2)) == UPSTREAM[task]


@pytest.mark.parametrize("task", longbench.TASKS)
def test_prompts_of_made_up_records_are_upstreams_to_the_byte(chat, task):
    """Braces, and letters of two and three bytes that truncation cuts through."""
    records = [RECORD | {"context": "ä {word} 中。 " * n, "input": "Q?"} for n in (3, 700)]
    assert digest(longbench.samples(task, records, chat, 4096)) == MADE[task]


@pytest.mark.parametrize(("length", "most"), [(2048, 1500), (4096, 3500), (8192, 7500), (16384, 15500), (32768, 31500)])
def test_lengths_are_upstreams(length, most):
    """LongBench/config/model2maxlen.json, and by its rule for 2k."""
    assert longbench.longest(length) == most


def test_a_long_prompt_loses_its_middle_before_the_chat_comes_around_it(chat):
    """41 tokens are left of `half` = 20 and 20, BOS among them, and a letter that is cut in two is lost in decoding."""
    prompt = longbench.render("qmsum", RECORD | {"context": "ä" * 50}, chat, 41)
    whole = longbench.TASKS["qmsum"].prompt.format(context="ä" * 50, input="Q")
    assert prompt == f"[INST]{whole[:19]}{whole[-20:]}[/INST]"
    assert "[INST]" + whole + "[/INST]" == longbench.render("qmsum", RECORD | {"context": "ä" * 50}, chat, 4000)


@pytest.mark.parametrize("task", longbench.TASKS)
def test_few_shot_and_code_are_no_chats_and_for_the_authors_code_is(chat, task):
    plain = longbench.FEW_SHOT + longbench.CODE
    assert longbench.render(task, RECORD, chat, 4000).startswith("[INST]") == (task not in plain)
    assert longbench.render(task, RECORD, chat, 4000, authors=True).startswith("[INST]") == (
        task not in longbench.FEW_SHOT
    )


def test_only_samsum_stops_at_a_line_break(chat):
    ends = {task: longbench.samples(task, [RECORD], chat, 4096)[0].line_only for task in longbench.TASKS}
    assert [task for task, line_only in ends.items() if line_only] == ["samsum"]


def test_the_papers_tasks_are_sixteen_in_six_categories():
    assert len(longbench.DEFAULT) == 16
    assert len({longbench.TASKS[task].category for task in longbench.DEFAULT}) == 6


def test_white_space_and_typing_errors_of_the_prompts_are_kept():
    assert longbench.TASKS["passage_count"].prompt.endswith("The final answer is: ")
    assert longbench.TASKS["lcc"].prompt.endswith("Next line of code:\n")
    assert "asconcisely" in longbench.TASKS["narrativeqa"].prompt


@pytest.mark.parametrize(
    ("task", "record", "problem"),
    [
        ("qasper", {"answers": ["x"]}, "record 1 has no field 'pred', but 'answers'"),
        ("qasper", {"pred": None, "answers": ["x"]}, "'pred' of record 1 is not a string"),
        ("qasper", {"pred": "x", "answers": "x"}, "'answers' of record 1 is not a list"),
        ("trec", {"pred": "x", "answers": ["x"], "all_classes": None}, "trec needs the names of all classes"),
        ("passage_retrieval_en", {"pred": "1", "answers": ["x"]}, "'x' names no paragraph"),
    ],
)
def test_what_is_no_prediction_of_the_task_is_refused(task, record, problem):
    with pytest.raises(ConfigError, match=problem):
        longbench.score(task, [record])


def test_another_benchmarks_data_is_refused(chat):
    record = {"input": "document", "instructions": ["?"], "outputs": ["A"], "evaluation": "exam"}
    with pytest.raises(ConfigError, match=r"record 1 has no field 'context', but 'input', .*: pass LongBench's own"):
        longbench.samples("lcc", [record], chat, 4096)


def test_a_context_without_room_is_refused(chat):
    with pytest.raises(ConfigError, match="LongBench has no room in a context of 512"):
        longbench.samples("lcc", [RECORD], chat, 512)


def test_a_template_that_opens_with_bos_does_not_open_twice():
    tokenizer = tiny_lm.tokenizer(bos=True)
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:"
    chat = Chat(tokenizer=tokenizer, form="template")
    assert chat.wrap("hello", "be kind") == "<system>be kind<user>hello:"
    assert chat.encode(chat.wrap("hello")).count(tokenizer.bos_token_id) == 1


def test_a_template_that_can_think_is_told_not_to():
    """Qwen3's template closes the thoughts before they begin."""
    tokenizer = tiny_lm.tokenizer()
    tokenizer.chat_template = (
        "<user>{{ messages[0].content }}<assistant>"
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    )
    assert Chat(tokenizer=tokenizer, form="template").wrap("hello") == "<user>hello<assistant><think></think>"
