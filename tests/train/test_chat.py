"""Conversations: the template's text, the answers' labels, and what does not fit."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from rpe3d.config import ConfigError
from rpe3d.train.chat import Chats, messages_of, tokenized
from rpe3d.train.corpus import open_corpus
from rpe3d.train.samples import IGNORED

TALK = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "sun"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "moon"},
]


def test_only_answers_are_learned_each_with_its_end(tokenizer):
    ids, labels = tokenized(tokenizer, "it", TALK)
    assert tokenizer.decode(ids) == "[user]one?\n[assistant]sun\n[user]two?\n[assistant]moon\n"
    assert tokenizer.decode([label for label in labels if label != IGNORED]) == "sun\nmoon\n"
    assert all(label in (token, IGNORED) for token, label in zip(ids, labels, strict=True))


def test_alpaca_records_become_a_question_and_an_answer():
    record = {"instruction": "Sum up.", "input": "A text.", "output": "So."}
    question, answer = messages_of("it", record)
    assert question == {"role": "user", "content": "Sum up.\n\nA text."}
    assert answer == {"role": "assistant", "content": "So."}
    assert messages_of("it", record | {"input": None})[0]["content"] == "Sum up."


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({}, "line 7 is not a conversation: it has no fields"),
        ({"text": "x"}, "line 7 is not a conversation: it has text"),
        ({"messages": [{"role": "user"}]}, "line 7 has a message without role or content"),
        ({"messages": TALK[:1]}, "line 7 has no answer"),
    ],
)
def test_what_is_no_conversation_is_named(record, problem):
    with pytest.raises(ConfigError, match=problem):
        messages_of("line 7", record)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    """Some templates drop the reasoning of earlier answers: labels by position would then be wrong."""
    import tiny_lm

    other = tiny_lm.tokenizer()
    other.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    with pytest.raises(ConfigError, match="changes what comes before answer 1 of it"):
        tokenized(other, "it", TALK)


def test_a_template_that_raises_names_the_record(tokenizer):
    import tiny_lm

    other = tiny_lm.tokenizer()
    other.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match=r"it does not fit the chat template \(roles must alternate"):
        tokenized(other, "it", TALK)
    with pytest.raises(ConfigError, match="no chat template"):
        Chats([], tiny_lm.tokenizer(), length=10, seed=0, place={})


def test_long_conversations_are_left_out_and_counted_and_a_place_leads_on(tokenizer, chats):
    corpus = open_corpus([str(chats)])
    given = {"length": 70, "seed": 1}
    made = Chats(corpus, tokenizer, **given, place={})
    samples = list(islice(made, 20))
    assert all(len(sample.ids) <= 70 for sample in samples)
    assert samples[-1].after["epoch"] >= 1
    assert made.left_out > 0
    for at in range(19):
        place = json.loads(json.dumps(samples[at].after))
        assert next(iter(Chats(corpus, tokenizer, **given, place=place))) == samples[at + 1]
    with pytest.raises(ConfigError, match="no conversation has at most 5 tokens"):
        next(iter(Chats(corpus, tokenizer, length=5, seed=0, place={})))
