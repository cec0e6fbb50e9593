"""A document that is read once and asked gives what reading it again for every question would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import rpe3d
import tiny_lm
from rpe3d.config import ConfigError
from rpe3d.evaluate import default_texts, tokenize
from rpe3d.evaluate.likelihood import token_nll
from rpe3d.evaluate.tasks.document import NOTES, ask, make_document, read

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 1024


@pytest.fixture(scope="module")
def document():
    tokenizer = tiny_lm.tokenizer()
    return make_document(tokenizer, [tokenize(tokenizer, default_texts()[0])], LENGTH)


def test_notes_stand_where_they_are_said_to_and_there_is_room_for_a_question(document):
    text = tiny_lm.tokenizer().decode(document.tokens)
    for note, (depth, begins, key, ends) in zip(document.notes, NOTES, strict=True):
        line = f"\n\n{begins}{key}{ends}\n\n"
        assert text.count(line) == 1
        assert text.index(line) / len(text) == pytest.approx(depth, abs=0.2)
        assert tiny_lm.tokenizer().decode([*note.question, *note.answer]) == f"\n\n{begins}{key}"
        assert len(document.tokens) + len(note.question) + len(note.answer) <= LENGTH


def test_what_has_no_room_for_the_notes_is_refused():
    tokenizer = tiny_lm.tokenizer()
    with pytest.raises(ConfigError, match="a document of 100 tokens cannot be made from python-topics"):
        make_document(tokenizer, [tokenize(tokenizer, default_texts()[0])], 100)


@pytest.mark.parametrize("law", ["rope", "yarn", "dca", "3d-rpe"])
def test_losses_and_answers_are_those_of_whole_forwards(document, law):
    """The oracle reads document and question together, without a cache of ours, by transformers' `generate`."""
    model = rpe3d.extend(tiny_lm.model(), law, context=LENGTH)
    losses, cache = read(model, document.tokens)
    torch.testing.assert_close(losses.float(), token_nll(model, document.tokens[None])[0].cpu())
    for note in (*document.notes, document.notes[0]):  # the first again: a question leaves the cache as it was
        prompt = torch.cat([document.tokens, torch.tensor(note.question)])[None]
        many = len(note.answer)
        whole = model.generate(prompt, max_new_tokens=many, min_new_tokens=many, do_sample=False, pad_token_id=0)
        said = whole[0, prompt.shape[1] :].tolist()
        right = next((i for i, pair in enumerate(zip(said, note.answer, strict=True)) if pair[0] != pair[1]), many)
        assert ask(model, cache, note) == said[: right + 1]
        assert ask(model, cache, replace(note, answer=said)) == said  # what it would say is right, all of it
