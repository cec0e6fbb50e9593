"""Needles in prose: where they and their answers stand, and what the answers cost."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import tiny_lm
from rpe3d.evaluate import Tokens
from rpe3d.evaluate.likelihood import token_nll
from rpe3d.evaluate.needles import MOST, make_hidden, needles_nll

TEXT = [
    Tokens(name="a", ids=torch.full((9000,), ord("a"))),
    Tokens(name="b", ids=torch.full((9000,), ord("b"))),
]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_lm.tokenizer()


def said(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("first", [(), (1,)])
def test_every_question_is_answered_by_its_needle_which_stands_once_before(tokenizer, first):
    """RULER's words; needles at even depths, questions in another order at the end."""
    trial = make_hidden(TEXT, tokenizer, 12000, seed=3, first=first)
    assert trial.tokens.shape == (12000,)
    assert tuple(trial.tokens[: len(first)].tolist()) == first
    whole = said(tokenizer, trial.tokens.tolist())
    begin = whole.index("\nWhat is the special magic number")
    assert len(trial.answers) == MOST
    asked, told = [], []
    for answer in trial.answers:
        number = said(tokenizer, trial.tokens[answer.start : answer.stop].tolist()).strip()
        assert len(number) == 7
        before = said(tokenizer, trial.tokens[answer.start - 60 : answer.start].tolist())
        word = before.split("special magic number for ")[-1].removesuffix(" is:")
        needle = f"\nOne of the special magic numbers for {word} is: {number}.\n"
        assert whole.count(needle) == 1
        asked.append(word)
        told.append(whole.index(needle))
    assert max(told) < begin
    places = sorted(told)
    gaps = [b - a for a, b in pairwise(places)]
    assert max(gaps) < 1.2 * min(gaps)
    assert told != places  # in another order
    assert trial.answers[-1].stop == 12000
    again = make_hidden(TEXT, tokenizer, 12000, seed=3, first=first)
    assert torch.equal(trial.tokens, again.tokens)
    assert not torch.equal(trial.tokens, make_hidden(TEXT, tokenizer, 12000, seed=4, first=first).tokens)


def test_a_short_window_has_fewer_needles_and_a_shorter_one_none(tokenizer):
    fewer = make_hidden(TEXT, tokenizer, 3000, seed=0)
    assert 2 <= len(fewer.answers) < MOST
    questions = sum(answer.stop - answer.start for answer in fewer.answers)
    assert questions < 3000 / 4
    assert make_hidden(TEXT, tokenizer, 800, seed=0) is None


def test_the_loss_is_that_of_the_answers_tokens_alone(model, tokenizer):
    text = [Tokens(name="a", ids=torch.randint(2, 250, (9000,), generator=torch.Generator().manual_seed(0)))]
    told = []
    found = needles_nll(model, text, tokenizer, 3000, [0, 1], (), lambda *step: told.append(step))
    expected = []
    for seed in (0, 1):
        trial = make_hidden(text, tokenizer, 3000, seed)
        losses = torch.nn.functional.pad(token_nll(model, trial.tokens[None])[0].double(), (1, 0))
        expected.append(sum(float(losses[list(answer)].mean()) for answer in trial.answers) / len(trial.answers))
    assert found == pytest.approx(sum(expected) / 2, rel=1e-5)
    assert told[0] == ("needles 1 of 2", 0, 2)
    assert told[-1] == ("done", 2, 2)
    assert needles_nll(model, text, tokenizer, 800, [0], (), lambda *_: None) is None
