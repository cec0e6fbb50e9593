"""A prompt that is read in pieces is answered as one that is read at once, or it is read at once."""

from __future__ import annotations

import pytest
import torch

import rpe3d
from rpe3d import ConfigError
from rpe3d.geometry.registry import LAWS
from rpe3d.models.pieces import read, refusal
from tiny_models import make

SMALL = {"chunk": 8, "window": 16, "reach": 32}
GIVEN = {"3d-rpe": SMALL, "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Tiny models."""


def answers(model, ids, piece):
    """The logits of an answer to a prompt in pieces, and to the whole of it."""
    given = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    told = []
    cache = read(model, ids, piece, told.append)
    in_pieces = model.generate(ids, past_key_values=cache, **given)
    at_once = model.generate(ids, **given)
    return cache, told, torch.stack(in_pieces.logits), torch.stack(at_once.logits)


@pytest.mark.parametrize("name", LAWS)
def test_every_law_answers_alike_or_is_read_at_once(ids, name):
    model = rpe3d.extend(make(), name, context=256, **GIVEN.get(name, {}))
    cache, told, in_pieces, at_once = answers(model, ids, 50)
    if cache is not None:
        torch.testing.assert_close(in_pieces, at_once, atol=1e-4, rtol=0)
    assert (cache is None) == (name in ("dynamic", "longrope")) == (refusal(model) is not None)
    assert told == ([] if cache is None else [50, 100])


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3", "gpt_oss", "phi3"])
def test_families_with_windows_and_sinks_answer_alike(ids, family):
    model = make(family)
    if family != "gpt_oss":
        rpe3d.extend(model, context=256, **SMALL)
    for piece in (119, 60, 7):  # the last piece: one token, a whole one, and one
        cache, told, in_pieces, at_once = answers(model, ids, piece)
        assert cache is not None
        assert told[-1] == 119 // piece * piece
        torch.testing.assert_close(in_pieces, at_once, atol=2e-4, rtol=0)


def test_chosen_far_keys_are_chosen_alike(ids):
    model = rpe3d.extend(make(), context=256, **SMALL, far=3, block=4)
    assert rpe3d.law_of(model).chooses
    _, _, in_pieces, at_once = answers(model, ids, 30)
    torch.testing.assert_close(in_pieces, at_once, atol=1e-4, rtol=0)


def test_states_and_frequencies_of_the_model_itself_are_read_at_once(ids):
    """Qwen3.5 has layers with a state; a stock model with dynamic NTK turns every piece by other frequencies."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
              "linear_value_head_dim": 16, "head_dim": 32, "num_hidden_layers": 4}  # fmt: skip
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    for model, reason in (
        (make("qwen3_5_text", **linear), "layers cache something other"),
        (make(rope_parameters=scaling), "frequencies change"),
    ):
        assert reason in refusal(model)
        assert read(model, ids, 50) is None


@pytest.mark.parametrize(("left", "told"), [(1, [50, 100, 119]), (13, [50, 100, 107]), (70, [50]), (100, [20])])
def test_so_many_last_tokens_are_left_unread(ids, left, told):
    model = rpe3d.extend(make(), context=256, **SMALL)
    heard = []
    cache = read(model, ids, 50, heard.append, left=left)
    assert (cache.get_seq_length(), heard) == (120 - left, told)
    given = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    logits = [torch.stack(model.generate(ids, past_key_values=c, **given).logits) for c in (cache, None)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    assert read(model, ids, 50, left=120) is None


def test_a_prompt_of_one_piece_needs_no_cache_and_a_piece_has_a_token(ids):
    assert read(make(), ids, 120) is None
    with pytest.raises(ConfigError, match="piece"):
        read(make(), ids, 0)
