"""RULER's samples are upstream's to the byte, fit into their length, and can be solved."""

from __future__ import annotations

import hashlib
import sys

import pytest

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks import ruler, ruler_build
from rpe3d.evaluate.tasks.chat import Chat

ESSAY = " ".join(f"Sentence {i} is about number {i * i}." for i in range(300))
# sha256 of two samples with their answers, by hsiehjackson/RULER at e40fae1 with the word lists of wonderwords 3.0.1, a
# tokenizer of one token a word, ESSAY for its essays, and the end of a sentence where `ruler_build` has it.
UPSTREAM = {
    "niah_single_1": "c29fdb0d63c2ae87",
    "niah_single_2": "d4caef70bbd72698",
    "niah_single_3": "2f6071c3b0c9eca2",
    "niah_multikey_1": "ab6f09ed441d0d02",
    "niah_multikey_2": "5c6d9933ad960e1b",
    "niah_multikey_3": "4a0b8c904bbe4579",
    "niah_multivalue": "391188b95012719e",
    "niah_multiquery": "931bc1d92b733f1e",
    "vt": "1cf2e4a268cd7e1e",
    "cwe": "efd4e04086a487a4",
    "fwe": "6ade0d7ff5009517",
}
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")


@pytest.mark.parametrize("task", ruler.DEFAULT)
def test_samples_are_upstreams_to_the_byte(words, task):
    samples = ruler.samples(task, words, 1024 if task in ESSAYS else 4096, 2, ESSAY)
    parts = [part for sample in samples for part in (sample.prompts[0], *sample.gold["outputs"])]
    assert hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16] == UPSTREAM[task]


@pytest.mark.parametrize("length", [4096, 8192, 16384])
@pytest.mark.parametrize("task", ruler.DEFAULT)
def test_samples_fill_their_length_and_a_perfect_model_scores_100_an_empty_one_0(words, task, length):
    samples = ruler.samples(task, words, length, 2, ESSAY)
    room = ruler_build.CONFIG["families"][ruler_build.CONFIG["tasks"][task]["family"]]["max_new"]
    for sample in samples:
        tokens = len(sample.prompts[0].split())
        assert 0.6 * length < tokens <= (length if task == "fwe" else length - room)
        if task != "vt":  # whose answers are the variables themselves
            assert all(answer in sample.prompts[0] for answer in sample.gold["outputs"])
    perfect = [ruler.record(sample, [", ".join(sample.gold["outputs"])]) for sample in samples]
    assert ruler.score(task, perfect).score == 100.0
    assert ruler.score(task, [ruler.record(sample, [""]) for sample in samples]).score == 0.0


def test_the_answer_begins_after_the_chat(words):
    chat = Chat(tokenizer=words.tokenizer, form="llama2")
    (sample,) = ruler.samples("niah_single_1", chat, 1024, 1, ESSAY)
    assert sample.prompts[0].startswith("[INST] A special magic number is hidden")
    assert "[/INST] The special magic number for " in sample.prompts[0]
    assert sample.prompts[0].endswith(" mentioned in the provided text is")


def test_a_models_own_template_is_left_alone(words):
    """Upstream's plural-to-singular runs over the chat's words, too: "You is a helpful assistant"."""
    words.tokenizer.chat_template = "set"
    words.tokenizer.bos_token = None
    words.tokenizer.apply_chat_template = lambda turns, **_: f"You are kind. {turns[0]['content']} {{x}}:"
    chat = Chat(tokenizer=words.tokenizer, form="template")
    (sample,) = ruler.samples("niah_single_1", chat, 1024, 1, ESSAY)
    assert sample.prompts[0].startswith("You are kind. A special magic number is hidden")
    assert " {x}: The special magic number for " in sample.prompts[0]


def test_a_template_may_trim_what_it_is_given(words):
    """Llama 3's and Gemma's do."""
    words.tokenizer.chat_template = "set"
    words.tokenizer.bos_token = None
    words.tokenizer.apply_chat_template = lambda turns, **_: f"<user>{turns[0]['content'].strip()}<model>"
    chat = Chat(tokenizer=words.tokenizer, form="template")
    (sample,) = ruler.samples("niah_single_1", chat, 1024, 1, ESSAY)
    assert sample.prompts[0].startswith("<user>A special magic number is hidden")
    assert "<model> The special magic number for " in sample.prompts[0]


@pytest.mark.parametrize("task", ruler.DEFAULT)
def test_a_length_without_room_for_the_task_is_refused(words, task):
    """The last of them went on for ever."""
    with pytest.raises(ConfigError, match="does not fit into"):
        ruler.samples(task, words, 20, 1, ESSAY)


def test_keys_are_the_sorted_pairs_of_words():
    adjectives, nouns = ["well", "wet", "well-made", "we"], ["x", "made-up", "b", "b"]
    keys = ruler_build.Compounds(adjectives, nouns)
    assert [keys[i] for i in range(len(keys))] == sorted({f"{a}-{n}" for a in adjectives for n in nouns})


def test_questions_count_where_any_answer_is_named_and_the_rest_by_share():
    record = {"pred": "It is PARIS", "outputs": ["paris", "Lyon"]}
    assert ruler.score("qa_1", [record]).score == 100.0
    assert ruler.score("niah_multivalue", [record]).score == 50.0


def test_what_does_not_fit_or_cannot_be_made_is_refused(words, monkeypatch):
    with pytest.raises(ConfigError, match="does not fit into 256 tokens"):
        ruler.samples("cwe", words, 256, 1, ESSAY)
    with pytest.raises(ConfigError, match="ruler:qa_1 needs data sets"):
        ruler.samples("qa_1", words, 4096, 1, ESSAY)
    with pytest.raises(ConfigError, match="record 1 has no field 'outputs'"):
        ruler.score("vt", [{"pred": "x"}])
    ruler_build.word_lists.cache_clear()
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    monkeypatch.setitem(sys.modules, "wonderwords.assets", None)
    with pytest.raises(ConfigError, match=r"pip install 'rpe3d\[eval\]'"):
        ruler_build.word_lists()
