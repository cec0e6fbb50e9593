"""Copying and passkeys: what the trials are, and that a model which can do them is seen to."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tiny_lm
from rpe3d.config import ConfigError
from rpe3d.evaluate import Tokens, copy_nll, make_copy, make_passkey, passkey
from rpe3d.evaluate.tasks.retrieval import passage_of, passkey_found
from rpe3d.models import pieces


@pytest.mark.parametrize("first", [(), (0,)])
def test_a_copy_trial_is_a_passage_other_text_and_the_passage_again(first):
    text = [Tokens(name="a", ids=torch.arange(6000)), Tokens(name="b", ids=torch.arange(6000, 8000))]
    trial = make_copy(text, 4096, seed=3, first=first)
    assert len(trial) == 4096
    body = trial[len(first) :]
    assert tuple(trial[: len(first)].tolist()) == first
    assert torch.equal(body[:512], body[-512:])
    assert len(set(body[:-512].tolist())) == len(body) - 512  # every token is its place in the texts: none twice
    assert torch.equal(trial, make_copy(text, 4096, seed=3, first=first))
    assert not torch.equal(trial, make_copy(text, 4096, seed=4, first=first))


def test_the_passage_of_a_short_window_is_a_quarter_of_it():
    assert [passage_of(n) for n in (256, 1024, 2048, 65536)] == [64, 256, 512, 512]


def test_texts_that_are_too_short_for_a_copy_are_refused():
    text = [Tokens(name="a", ids=torch.arange(3584))]
    assert len(make_copy(text, 4096, seed=0)) == 4096
    with pytest.raises(ConfigError, match="too few for a copy test of 4097"):
        make_copy(text, 4097, seed=0)


def test_the_copy_loss_is_that_of_the_last_seven_eighths(model, texts):
    trials = torch.stack([make_copy(texts, 512, seed) for seed in (0, 1)])
    with torch.no_grad():
        logits = model(trials).logits
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), trials[:, 1:], reduction="none")
    assert copy_nll(model, trials) == pytest.approx(losses[:, -112:].mean(1).tolist(), rel=1e-5)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("depth", [0.0, 0.35, 1.0])
def test_a_passkey_prompt_and_its_answer_fill_the_length_exactly(bos, depth):
    tokenizer = tiny_lm.tokenizer(bos)
    first = (0,) if bos else ()
    trial = make_passkey(tokenizer, 1024, depth, seed=5, first=first)
    assert len(trial.prompt) + len(trial.answer) == 1024
    assert tuple(trial.prompt[: len(first)].tolist()) == first
    text = tokenizer.decode(trial.prompt[len(first) :])
    assert text.startswith("There is an important info hidden inside a lot of irrelevant text.")
    assert text.endswith("\nWhat is the pass key? The pass key is")
    line = f"The pass key is {trial.key}. Remember it. {trial.key} is the pass key."
    assert text.count(line) == 1
    assert tokenizer.decode(trial.answer) == f" {trial.key}"
    before = text.index(line) - text.index("\n") - 1
    after = len(text) - text.index(line) - len(line) - len("\n\nWhat is the pass key? The pass key is")
    assert before / (before + after) == pytest.approx(depth, abs=0.01)


def test_a_passkey_that_does_not_fit_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="does not fit into 200 tokens"):
        make_passkey(tokenizer, 200, 0.5, seed=0)


def test_the_answer_is_the_greedy_continuation(model, tokenizer):
    trial = make_passkey(tokenizer, 512, 0.5, seed=0)
    prompt = trial.prompt[None]
    expected = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=len(trial.answer),
        pad_token_id=0,
    )
    assert passkey(model, trial) == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(("right", "at_once"), [(0, 512), (1, 512), (3, 512), (5, 512), (3, 256), (5, 256)])
def test_one_forward_hears_the_greedy_answer_up_to_its_first_error(monkeypatch, model, tokenizer, right, at_once):
    """The model's own words are made the right answer for `right` tokens, and something else from there on.

    A long prompt is read in pieces before that forward.
    """
    monkeypatch.setattr(pieces, "AT_ONCE", at_once)
    monkeypatch.setattr(pieces, "PIECE", 100)
    trial = make_passkey(tokenizer, 512, 0.5, seed=0)
    trial = replace(trial, answer=[0] * 5)
    said = passkey(model, trial)  # which has tried the head
    answer = [token if i < right else (token + 1) % 257 for i, token in enumerate(said)]
    read = []
    hook = model.model.layers[0].register_forward_hook(lambda *call: read.append(call[-1].shape[1]))
    assert passkey_found(model, replace(trial, answer=answer)) == said[: right + 1]
    hook.remove()
    assert len(read) == (1 if at_once == 512 else 6)


def test_a_model_that_knows_the_key_is_heard_token_by_token(tokenizer):
    """A stand-in that answers from the prompt, one token a call, through its cache."""
    trial = make_passkey(tokenizer, 512, 0.5, seed=0)

    class Knows:
        device = torch.device("cpu")

        def __init__(self):
            self.__dict__["_rpe3d_head_in_pieces"] = True

        def __call__(self, tokens, past_key_values=0, **_):
            assert tokens.shape[1] == (1 if past_key_values else len(trial.prompt))
            logits = torch.zeros(1, 1, 257)
            logits[0, 0, trial.answer[past_key_values]] = 1
            return SimpleNamespace(logits=logits, past_key_values=past_key_values + 1)

    assert passkey(Knows(), trial) == trial.answer
