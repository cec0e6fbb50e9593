"""vLLM against transformers under the same law: the same tokens, the same log-probabilities."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-serve` has it")

from engines import CONTEXT, answers, assert_as_transformers, engine, model, prompts

import rpe3d
from rpe3d.models.load import load

# 64 positions: 3D-RPE has chunks of 4 and a window of 20, so these are 1 token to three chunks beyond it, and the rest.
LENGTHS = (1, 2, 19, 20, 24, 25, 28, 33, 64, 65, 150, 301)
LAWS = {
    "rope": {},
    "linear": {},
    "ntk": {},
    "yarn": {},
    "cope": {},
    "logn": {},
    "3d-rpe": {"chunk": 16, "window": 32, "reach": 64, "focus": 0, "fade": 0},
    "3d-rpe-definition": {"phi_base": 1.5},
    "3d-rpe-dual-chunk": {"phi_base": 1.5},
    "dca": {},
    "self-extend": {},
    "rerope": {},
    "leaky-rerope": {},
    "streaming-llm": {},
    "string": {"attention_factor": 1.07},
    "dpe": {},
    "lampe": {},
}


def test_prompts_of_every_length_in_one_batch(served):
    """Longer prompts come in pieces of 64 tokens, beside the decoding of shorter ones."""
    stock, llm, _ = served
    texts = prompts(*LENGTHS)
    assert_as_transformers(stock, texts, answers(llm, texts, new=12))


def test_a_prefix_that_is_cached_changes_nothing(served):
    stock, llm, _ = served
    (text,) = prompts(200, seed=2)
    first = answers(llm, [text])
    both = [text, [*text[:130], 5, 6, 7]]
    again = answers(llm, both)
    assert [x.num_cached_tokens for x in (*first, *again)] == [0, 192, 128]
    assert_as_transformers(stock, both, again)
    assert again[0].outputs[0].token_ids == first[0].outputs[0].token_ids


def test_decoding_across_the_horizon(served):
    """The step from vLLM's kernel to ours, and on to the last token of the context."""
    stock, llm, _ = served
    texts = prompts(10, CONTEXT - 20, seed=3)
    assert_as_transformers(stock, texts, answers(llm, texts, new=20))


def test_a_short_prompt_is_the_stock_engine_s_bit_for_bit(served, tmp_path):
    """Fact 1 of the bounded form, on the engine. The last test that asks the shared one: it ends with any other."""
    model().save_pretrained(tmp_path)
    texts = prompts(1, 7, 12)
    ours, plain = answers(served[1], texts), answers(engine(tmp_path), texts)
    for a, b in zip(ours, plain, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].logprobs == b.outputs[0].logprobs


@pytest.mark.parametrize("name", LAWS)
def test_every_law(name, tmp_path):
    stock = model(law=name, **LAWS[name])
    stock.save_pretrained(tmp_path)
    texts = prompts(1, 30, 64, 65, 150, 301)
    assert_as_transformers(stock, texts, answers(engine(tmp_path), texts))


def test_far_keys_that_are_chosen(tmp_path):
    stock = model(law="3d-rpe", chunk=16, window=32, reach=64, far=3)
    stock.save_pretrained(tmp_path)
    texts = prompts(1, 65, 150, 301)
    assert_as_transformers(stock, texts, answers(engine(tmp_path), texts))


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_every_family(family, tmp_path):
    stock = model(family, law="3d-rpe")
    stock.save_pretrained(tmp_path)
    texts = prompts(*LENGTHS)
    assert_as_transformers(stock, texts, answers(engine(tmp_path), texts))


def test_the_default_model(tmp_path):
    """Real weights, to three chunks beyond the window, in pages of 64."""
    stock = load("default", dtype=torch.float32, device="cpu", with_tokenizer=False).model
    rpe3d.extend(stock, context=16384, chunk=64, window=192, reach=512, focus=1.0, fade=0.25).save_pretrained(tmp_path)
    llm = engine(tmp_path, block_size=64, max_num_batched_tokens=256, max_model_len=1024, kv_cache_memory_bytes=2**28)
    texts = prompts(1, 100, 256, 257, 450, seed=9)
    assert_as_transformers(stock, texts, answers(llm, texts, new=6))


def test_preempted_sequences_go_on_where_they_were(served):
    """Four texts of 160 tokens and more in a cache of 18 pages of 32: some must wait, and be computed again."""
    stock, _, folder = served
    llm = engine(folder, num_gpu_blocks_override=18, enable_prefix_caching=False, max_num_batched_tokens=512)
    texts = prompts(100, 101, 102, 103, seed=4)
    outputs = answers(llm, texts, new=90)
    preempted = [x.value for x in llm.get_metrics() if x.name == "vllm:num_preemptions"]
    assert sum(preempted) > 0
    assert_as_transformers(stock, texts, outputs)


def test_compiled(served):
    stock, _, folder = served
    texts = prompts(*LENGTHS)
    assert_as_transformers(stock, texts, answers(engine(folder, enforce_eager=False), texts))


def test_tensor_parallel_needs_nothing_special(served):
    command = [sys.executable, str(Path(__file__).with_name("two_ranks.py")), str(served[2])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


def test_half_precision_is_near(served):
    """The cache in bfloat16 is read as it is written: the first token's log-probability moves by rounding alone."""
    stock, _, folder = served
    texts = prompts(20, 70, 301)
    for text, output in zip(texts, answers(engine(folder, dtype="bfloat16"), texts, new=1), strict=True):
        with torch.no_grad():
            logs = stock(torch.tensor([text])).logits[0, -1].log_softmax(-1)
        for token, entry in output.outputs[0].logprobs[0].items():
            assert abs(float(logs[token]) - entry.logprob) < 0.25
