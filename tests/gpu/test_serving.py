"""`rpe3d serve` on a GPU over HTTP, as transformers answers in float32: `make test-serve-gpu`.

All tests share one server, with the defaults of `rpe3d serve`: its engine in its own process, full CUDA graphs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from test_engines import CONTEXT, ENGINES, HERE, LEAST, NEW, PRETRAINED, build, loaded, logs_of, random_texts, texts_for

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")]

pytestmark = pytest.mark.skipif(not HERE, reason="there is no GPU, or no vLLM")

PLAN, EDGE = "graphs", 192
OPTIONS = ("dtype=float16", "max-num-seqs=32", "kv-cache-memory-bytes=268435456", "gpu-memory-utilization=0.05")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
WORDS = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model without its law and with it, the latter with a tokenizer that knows how to chat: one token a byte."""
    import tiny_lm

    made = tmp_path_factory.mktemp("server")
    assert build(made, ENGINES[PLAN]).exact_up_to == EDGE
    tokenizer = tiny_lm.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made / "law")
    return made


@pytest.fixture(scope="module")
def server(folder):
    from servers import Server

    made = Server(folder / "law", folder / "words", *(f"--vllm={option}" for option in OPTIONS))
    yield made
    assert made.close() == 0


def assert_as_transformers(folder, text, tokens):
    """Every token is transformers' greedy choice, or as likely but for what rounding does."""
    assert len(tokens) == NEW
    logs = logs_of(loaded(folder, PLAN, "law"), text + tokens)[len(text) - 1 : -1]
    behind = logs.max(-1).values - logs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float(behind.max()) <= 2 * LEAST["float16"], f"a prompt of {len(text)} tokens"


def assert_the_law_is_seen(folder, text, tokens):
    """Without the law, transformers would have said otherwise."""
    logs = logs_of(loaded(folder, PLAN), text + tokens)[len(text) - 1 : -1]
    behind = logs.max(-1).values - logs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float(behind.max()) > 8 * LEAST["float16"]


def test_a_server_answers_names_its_law_and_gives_all_pages_back(server, folder):
    """`rpe3d serve` with its defaults, asked by 32 clients at once, of which some leave in the middle."""
    from soak import Client, Soak

    client = Client(server.url, server.name)
    assert 'law="3d-rpe"' in client.metrics()
    texts = texts_for(EDGE)
    soak = Soak(client, texts, new=NEW, in_flight=32)
    report = soak.run(20)
    assert report.failures == []
    assert report.finished > 32
    assert report.left > 0
    assert client.settled()
    # In another batch numbers round otherwise: an answer may differ where transformers nearly ties.
    answers = [(texts[i], tokens) for i, tokens in report.different] + list(zip(texts, soak.quiet, strict=True))
    for text, tokens in {json.dumps(pair): pair for pair in answers}.values():
        assert_as_transformers(folder, text, tokens)


@pytest.mark.parametrize("times", [1, 10, 60])
def test_a_chat_is_answered_as_transformers_answers_its_template(server, folder, times):
    """Within plain RoPE, beyond its edge, and beyond what the model was pretrained on."""
    from transformers import AutoTokenizer

    answer = server.chat(WORDS * times, max_tokens=NEW)
    messages = [{"role": "user", "content": WORDS * times}]
    words = AutoTokenizer.from_pretrained(folder / "law").apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert words == f"user: {WORDS * times}\nassistant: "
    text = AutoTokenizer.from_pretrained(folder / "law")(words)["input_ids"]
    assert answer["prompt_token_ids"] == text
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] == NEW
    assert_as_transformers(folder, text, choice["token_ids"])
    if len(text) > PRETRAINED:
        assert_the_law_is_seen(folder, text, choice["token_ids"])


@pytest.mark.parametrize("length", [20, EDGE + 1, 3000])
def test_a_stream_is_the_whole_answer_in_pieces(server, folder, length):
    """The answer before has filled the prefix cache, so both compute the same."""
    from servers import tokens

    text = random_texts([length, length])[1]
    server.ask(text, max_tokens=NEW)
    whole = tokens(server.ask(text, max_tokens=NEW))
    pieces = server.stream(text, max_tokens=NEW)
    assert len(pieces) > 1
    assert [token for piece in pieces for token in piece] == whole
    assert_as_transformers(folder, text, whole)


def test_a_text_of_the_whole_context_is_read_to_its_end(server, folder):
    """Words that the server tokenizes: twenty times the edge of plain RoPE, and eight times the pretrained length."""
    from servers import tokens
    from transformers import AutoTokenizer

    words = (WORDS * 100)[: CONTEXT - NEW]
    answer = server.ask(words, max_tokens=NEW)
    text = AutoTokenizer.from_pretrained(folder / "law")(words)["input_ids"]
    assert len(text) == CONTEXT - NEW
    assert answer["usage"]["prompt_tokens"] == len(text)
    assert answer["choices"][0]["prompt_token_ids"] == text
    assert_as_transformers(folder, text, tokens(answer))
    assert_the_law_is_seen(folder, text, tokens(answer))
