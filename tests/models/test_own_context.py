"""Checkpoints that carry a long context of their own: what they say is read, and a law goes on from there."""

from __future__ import annotations

import math

import pytest
import torch

import rpe3d
from rpe3d import ConfigError
from rpe3d.evaluate.under import laws_of
from rpe3d.geometry import LawSpec
from rpe3d.models.extend import facts, pretrained_length
from rpe3d.models.load import described
from rpe3d.models.own_context import own_context
from tiny_models import make

DUAL = {"chunk_size": 64, "local_size": 16, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Tiny models."""


def qwen_1m(**given):
    """A config like Qwen2.5-7B-Instruct-1M's, a thousandth of its size."""
    return make("qwen2", dual_chunk_attention_config=DUAL | given, max_position_embeddings=256)


def positions(query, key, chunk_size, local_size):
    """Where vLLM's DualChunkRotaryEmbedding and its backend place a pair: q at q_t, qc_t or qc[-1], k at k_t."""
    chunk = chunk_size - local_size
    qc = (torch.arange(chunk) + chunk).clamp(max=chunk_size)
    apart = query // chunk - key // chunk
    m = query % chunk
    place = torch.where(apart == 0, m, torch.where(apart == 1, qc[m], qc[chunk - 1]))
    return (place - key % chunk).double()


def test_a_dual_chunk_config_is_the_law_it_names():
    """Pair by pair the relative positions of vLLM's code, which deployed Qwen2.5-1M."""
    model = qwen_1m()
    law = rpe3d.law_of(rpe3d.extend(model, "dca", context=256))
    query, key = torch.arange(256)[:, None], torch.arange(256)[None]
    causal = query >= key
    expected = positions(query, key, 64, 16)
    assert torch.equal(law.relative_position(query, key)[causal], expected[causal])
    assert (law.chunk, law.window, law.pretrained) == (48, 64, 64)


def test_its_temperature_is_the_deployed_one():
    """s(n) = 0.1 ln(n / original) + 1 (vLLM), for q and k of a step at n tokens; 1 without an original length."""
    law = rpe3d.law_of(rpe3d.extend(qwen_1m(), "dca", context=256))
    lengths = torch.tensor([1, 64, 65, 128, 256])
    expected = [1.0, 1.0, *(0.1 * math.log(n / 64) + 1 for n in (65, 128, 256))]
    assert law.temperature(lengths - 1).sqrt().tolist() == pytest.approx(expected, rel=1e-14)
    plain = rpe3d.law_of(rpe3d.extend(qwen_1m(original_max_position_embeddings=0), "dca", context=256))
    assert plain.temperature is None
    assert law.attention_factor == plain.attention_factor == 1


def test_a_text_has_the_same_temperature_at_once_and_step_by_step(ids):
    """And one within a chunk is the stock model's: nothing in it depends on how long it will be."""
    model, stock = qwen_1m(), qwen_1m()
    rpe3d.extend(model, "dca", context=256)
    text = torch.randint(3, model.config.vocab_size, (2, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(text).logits
        cache, rows = None, []
        for piece in (*text[:, :140].split(70, 1), *text[:, 140:].split(1, 1)):
            found = model(piece, past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            rows.append(found.logits)
        torch.testing.assert_close(torch.cat(rows, 1), whole, rtol=0, atol=1e-4)
        torch.testing.assert_close(model(text[:, :48]).logits, stock(text[:, :48]).logits, rtol=0, atol=1e-5)
        rpe3d.extend(model, "dca", context=256, growth=0)
        assert (model(text).logits[:, 64:] - whole[:, 64:]).abs().max() > 1e-3


def test_what_is_given_beats_the_config():
    law = rpe3d.law_of(rpe3d.extend(qwen_1m(), "dca", context=256, chunk=32, attention_factor=1.0))
    assert (law.chunk, law.window, law.attention_factor) == (32, 64, 1.0)
    written = rpe3d.law_of(rpe3d.extend(qwen_1m(), "dca:chunk=32", context=256, attention_factor=1.0))
    assert written == law  # as with a keyword: the config gives what the text does not


def test_other_laws_start_from_the_length_before_dual_chunk_attention():
    """1 M is reached by the law that the config names, 256 k is what was trained."""
    model = qwen_1m()
    assert pretrained_length(model) == 64
    assert rpe3d.law_of(rpe3d.extend(model, context=512)).pretrained == 64


def test_an_evaluation_reads_the_config_too():
    """`rpe3d eval MODEL --laws dca` measures the law that was deployed."""
    entry = LawSpec(label="dca", name="dca", parameters={})
    law = laws_of(qwen_1m(), [entry], [256])["dca", 256]
    assert (law.chunk, law.window) == (48, 64)


def test_a_loaded_model_is_restored_to_the_length_of_its_config(tmp_path, ids):
    """`max_position_embeddings` is not the length that the law counts from."""
    model = qwen_1m()
    with torch.no_grad():
        stock = model(ids).logits
        rpe3d.extend(model, "dca", context=256).save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        assert rpe3d.law_of(loaded) == rpe3d.law_of(model)
        rpe3d.restore(loaded)
        assert torch.equal(loaded(ids).logits, stock)
    assert loaded.config.max_position_embeddings == 256


def test_the_config_alone_tells_the_length_that_a_law_counts_from(tmp_path):
    """Commands refuse a law by its config before weights are read: from 64 positions on, not from 256."""
    model = qwen_1m()
    model.save_pretrained(tmp_path)
    assert described(str(tmp_path))["pretrained"] == facts(model)["pretrained"] == 64
    rpe3d.extend(model, "dca", context=128).save_pretrained(tmp_path)
    assert described(str(tmp_path))["pretrained"] == 64


def test_sizes_that_are_not_dual_chunk_attention_are_refused():
    with pytest.raises(ConfigError, match="local_size 40, more than half of chunk_size 64"):
        rpe3d.extend(qwen_1m(local_size=40), "dca", context=256)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (LLAMA3, "llama3, 32 to 256 positions"),
        (YARN, "yarn, 64 to 256 positions"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "linear, 64 to 256 positions"),
    ],
)
def test_a_scaled_base_counts_as_pretrained_on_its_scaled_length(ids, parameters, words):
    """3D-RPE over it is the scaled model itself up to window + chunk tokens."""
    model = make(rope_parameters=dict(parameters), max_position_embeddings=256)
    assert str(own_context(model.config)) == words
    assert facts(model)["pretrained"] == 256
    with torch.no_grad():
        stock = model(ids).logits
        rpe3d.extend(model, context=1024, chunk=8, window=128, reach=192)
        assert torch.equal(model(ids).logits, stock)
        rpe3d.restore(model)
        assert torch.equal(model(ids).logits, stock)
    assert model.config.max_position_embeddings == 256


def test_a_plain_model_carries_none():
    assert own_context(make().config) is None
