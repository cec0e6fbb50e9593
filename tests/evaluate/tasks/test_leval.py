"""L-Eval: the prompts that its scripts make, and what is no prediction or no data of it. Scores: `test_golden`."""

from __future__ import annotations

import hashlib

import pytest

import tiny_lm
from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks import leval
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.questions import load

# sha256 of the first document's first three prompts for 16k, by the words of llama2-chat-test.py and vicuna-test.py
# (OpenLMLab/LEval at cd34b05), with a tokenizer of one token a byte and BOS.
UPSTREAM = {
    ("coursera", "llama2"): "5da1368a0f95dc5e",
    ("coursera", "vicuna"): "7ab7cc79606b6952",
    ("quality", "llama2"): "bf38406234f20a37",
    ("quality", "vicuna"): "ab90a36bc4693285",
    ("tpo", "llama2"): "68a50152c125b371",
    ("tpo", "vicuna"): "4e526f4ff50cfce4",
    ("gsm100", "llama2"): "f83549af20c63bb3",
    ("gsm100", "vicuna"): "43e9ef7bed7de374",
    ("sci_fi", "llama2"): "579400d8dafc76e2",
    ("sci_fi", "vicuna"): "50302daa5c288a0f",
}


# The same of made-up documents, for the two tasks whose data are not at hand.
CODE = "def f(x):\n    return {'a': x}\n" + "word " * 4000 + "print(f(1))"
MADE = {
    "codeU": [
        {"input": CODE, "instructions": ["What is the final output? {q}"], "outputs": ["[1]"], "evaluation": "exam"},
        {"input": "{{escaped}} only", "instructions": ["q"], "outputs": ["1"], "evaluation": "exam"},
    ],
    "topic_retrieval_longchat": [
        {
            "input": "USER: topic " * 3000,
            "instructions": ["first?", "second?", "third?"],
            "outputs": ["a", "b", "c"],
            "evaluation": "exam",
        }
    ],
}
MADE_UPSTREAM = {
    ("codeU", "llama2"): "341b98627d70cb91",
    ("codeU", "vicuna"): "8be5cece680e613a",
    ("topic_retrieval_longchat", "llama2"): "4108e6fbafb7728b",
    ("topic_retrieval_longchat", "vicuna"): "bad7dd14da366301",
}


def digest(samples):
    prompts = [prompt for sample in samples for prompt in sample.prompts]
    return hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("task", "form"), MADE_UPSTREAM)
def test_prompts_of_made_up_documents_are_upstreams_to_the_byte(task, form):
    chat = Chat(tokenizer=tiny_lm.tokenizer(bos=True), form=form)
    assert digest(leval.samples(task, MADE[task], chat, 16384)) == MADE_UPSTREAM[task, form]


@pytest.mark.parametrize(("task", "form"), UPSTREAM)
def test_prompts_are_upstreams_to_the_byte(benchmarks, task, form):
    chat = Chat(tokenizer=tiny_lm.tokenizer(bos=True), form=form)
    samples = leval.samples(task, load("leval", task, benchmarks).records[:1], chat, 16384, limit=3)
    assert digest(samples) == UPSTREAM[task, form]


def test_a_long_document_is_cut_by_words_and_code_keeps_its_end(words):
    text = " ".join(str(i) for i in range(2000))
    assert leval.truncated("coursera", text, words, 1000).split(" ") == [str(i) for i in range(1000)]
    assert leval.truncated("codeU", text, words, 1000).split(" ") == [str(i) for i in range(1000, 2000)]
    assert leval.truncated("coursera", "x" * 10, words, 1000) == "x" * 10


def test_a_document_with_braces_stays_as_it_is(chat):
    """Upstream formats the whole prompt, document and all, and takes it as it is where that fails."""
    assert leval.message("codeU", "{'a': 1}", "what?", chat)[0].endswith("{'a': 1}\n\nwhat?")
    assert leval.message("codeU", "{{a}}", "what?", chat)[0].endswith("{a}\n\nwhat?")
    assert leval.message("coursera", "{{a}}", "what?", chat)[0].count("{{a}}") == 1


def test_other_models_get_the_words_in_their_own_template():
    tokenizer = tiny_lm.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    chat = Chat(tokenizer=tokenizer, form="template")
    prompt, _ = leval.message("tpo", "DOC", "Q", chat)
    assert prompt.startswith("<system>Now you are given a very long document.")
    assert "<user>Document is as follows. DOC \nQuestion: Q." in prompt
    assert prompt.endswith("<assistant>Answer:")
    assert leval.message("gsm100", "DOC", "Q", chat)[0].endswith("<user>DOC\n\nQ<assistant>")


@pytest.mark.parametrize(
    "system",
    ["{{ raise_exception('System role not supported') }}", ""],
    ids=["refused, as by Gemma", "left out"],
)
def test_without_a_system_turn_its_words_open_the_users(system):
    tokenizer = tiny_lm.tokenizer()
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{% if m.role == 'system' %}}{system}{{% else %}}"
        "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}<assistant>"
    )
    chat = Chat(tokenizer=tokenizer, form="template")
    prompt, _ = leval.message("gsm100", "DOC", "Q", chat)
    assert prompt == f"<user>{leval.WORDS['system']['gsm100']}\n\nDOC\n\nQ<assistant>"


@pytest.mark.parametrize(
    ("task", "record", "problem"),
    [
        ("tpo", {"gt": "A", "evaluation": "exam"}, "record 1 has no field 'MODEL_pred', but 'gt', 'evaluation'"),
        ("tpo", {"gt": "A", "m_pred": "A"}, "record 1 has no field 'evaluation'"),
        ("tpo", {"gt": "", "m_pred": "A", "evaluation": "exam"}, "record 1 lacks an answer in 'gt', as tpo has it"),
        ("sci_fi", {"gt": "True", "m_pred": "A", "evaluation": "exam"}, r"lacks an answer and a \[fact"),
        ("tpo", {"gt": "A", "m_pred": "A", "evaluation": "rouge"}, "record 1 is of an open-ended task"),
    ],
)
def test_what_is_no_prediction_of_the_task_is_refused(task, record, problem):
    with pytest.raises(ConfigError, match=problem):
        leval.score(task, [record])


def test_another_benchmarks_data_is_refused(chat):
    with pytest.raises(ConfigError, match="record 1 has no field 'instructions', but 'input', 'context'"):
        leval.samples("tpo", [{"input": "Q", "context": "C"}], chat, 4096)
