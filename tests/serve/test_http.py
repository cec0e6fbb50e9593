"""`rpe3d serve` over HTTP: right answers to many clients at once, and clear ones to clients that err."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-serve` has it")

from engines import CONTEXT, model, prompts
from servers import NEW, Server, tokens

import rpe3d

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")]
import tiny_lm
from soak import Client, Soak


@pytest.fixture(scope="module")
def stock():
    return model(law="3d-rpe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A stock model with a tokenizer: the law is for the server to give."""
    made = tmp_path_factory.mktemp("http")
    model().save_pretrained(made)
    tiny_lm.tokenizer().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def server(folder, stock, tmp_path_factory):
    """The law comes from a file, which says its context as well."""
    log = tmp_path_factory.mktemp("log") / "stderr"
    law = log.with_name("law.json")
    law.write_text(json.dumps(rpe3d.law_of(stock).to_dict()))
    options = [f"--vllm={option}" for option in ("dtype=float32", "enforce-eager", "max-num-seqs=64")]
    made = Server(folder, log, "--law", str(law), *options)
    assert "curl http://127.0.0.1" in log.read_text()
    yield made
    assert made.close() == 0
    assert "Traceback" not in log.read_text()


def greedy(stock, prompt):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        return stock.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[0, len(prompt) :].tolist()


def refused(call):
    with pytest.raises(urllib.error.HTTPError) as raised:
        call()
    return raised.value.code, raised.value.read().decode()


def test_clients_at_the_same_time_get_their_own_answers(server, stock):
    texts = prompts(1, 20, 25, 70, 150, 301, seed=5)
    with ThreadPoolExecutor(len(texts)) as clients:
        found = list(clients.map(server.ask, texts))
    assert [tokens(answer) for answer in found] == [greedy(stock, text) for text in texts]


def test_a_stream_is_the_whole_answer_in_pieces(server, stock):
    (text,) = prompts(100, seed=6)
    pieces = server.stream(text)
    assert len(pieces) > 1
    assert [token for piece in pieces for token in piece] == greedy(stock, text)


def test_a_client_that_leaves_costs_nothing_more(server, stock):
    (text,) = prompts(100, seed=7)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model": server.name, "prompt": text, "max_tokens": 400, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().read(20)
    connection.close()
    until = time.monotonic() + 30
    while server.running() and time.monotonic() < until:
        time.sleep(0.2)
    assert server.running() == 0
    assert tokens(server.ask(text)) == greedy(stock, text)


def test_a_prompt_beyond_the_context_is_a_400_that_says_so(server, stock):
    code, words = refused(lambda: server.ask(prompts(CONTEXT + 1)[0]))
    assert code == 400
    assert str(CONTEXT) in words
    (text,) = prompts(30, seed=9)
    assert tokens(server.ask(text)) == greedy(stock, text)


def test_metrics_name_the_law(server):
    """The chunk and the window are those that `rpe3d serve` chose for a model of 64 positions."""
    (line,) = re.findall(r"^rpe3d_law_info\{(.*)\} 1\.0$", Client(server.url, server.name).metrics(), re.MULTILINE)
    found = dict(re.findall(r'(\w+)="([^"]*)"', line))
    expected = {"law": "3d-rpe", "context": str(CONTEXT), "pretrained": "64", "chunk": "4", "window": "20"}
    assert found | expected == found


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'{"model": 1}', b"\xff\xfe"])
def test_what_is_no_request_is_a_400(server, body):
    code, _ = refused(lambda: server.post(body))
    assert code in (400, 422)


def test_two_hundred_requests_in_flight(server, stock):
    """No wrong answer, and memory stops growing: pages of the cache are in memory once they have been used."""
    texts = prompts(*range(1, 201), seed=8)
    sizes = []
    while len(sizes) < 3 or (len(sizes) < 6 and sizes[-1] - sizes[-2] >= 64 * 2**20):
        with ThreadPoolExecutor(200) as clients:
            found = list(clients.map(server.ask, texts))
        sizes.append(server.memory())
    for text, answer in list(zip(texts, found, strict=True))[::9]:
        assert tokens(answer) == greedy(stock, text)
    assert sizes[-1] - sizes[-2] < 64 * 2**20, [size >> 20 for size in sizes]
    assert Client(server.url, server.name).settled()


def test_clients_that_come_and_go_change_no_answer_and_leave_no_page_in_use(server, stock):
    """The short form of `benchmarks/soak.py`: forty clients, a fifth of whose requests are left in the middle."""
    client = Client(server.url, server.name)
    soak = Soak(client, prompts(1, 19, 24, 25, 64, 70, 150, 301, 400, seed=10), new=NEW, in_flight=40)
    assert soak.quiet == [greedy(stock, text) for text in soak.texts]
    report = soak.run(8)
    assert report.failures == []
    assert report.different == []
    assert report.finished > 40
    assert report.left > 0
    assert client.settled()


def children(process):
    """Return the processes that one has started, without Python's own helper."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            line = stat.with_name("cmdline").read_text()
        except OSError:
            continue
        if parent == process and "resource_tracker" not in line:
            found.append(int(stat.parent.name))
    return found


def test_a_full_cache_makes_requests_wait_and_a_killed_engine_ends_the_server(folder, stock, tmp_path):
    """Twelve texts of up to 190 tokens in a cache of 18 pages of 32: most wait, some are computed again."""
    log = tmp_path / "stderr"
    options = [f"--vllm={option}" for option in ("dtype=float32", "enforce-eager", "max-num-seqs=8", "block-size=32")]
    options += ["--vllm=num-gpu-blocks-override=18", "--vllm=no-enable-prefix-caching"]
    server = Server(folder, log, "--context", str(CONTEXT), *options)
    client = Client(server.url, server.name)
    texts = prompts(*range(90, 102), seed=11)
    with ThreadPoolExecutor(len(texts)) as clients:
        found = list(clients.map(lambda text: client.ask(text, 90), texts))
    assert client.metric("vllm:num_preemptions_total") > 0
    for text, answer in list(zip(texts, found, strict=True))[::3]:
        ids = torch.tensor([text])
        with torch.no_grad():
            truth = stock.generate(ids, max_new_tokens=90, do_sample=False, eos_token_id=None)
        assert answer == truth[0, len(text) :].tolist()
    assert client.settled()
    (vllm,) = children(server.process.pid)
    for engine in children(vllm):
        os.kill(engine, signal.SIGKILL)
    assert server.process.wait(timeout=120) != 0
    server.log.close()
    assert "error: vLLM exited by itself (exit code" in log.read_text()


def test_a_killed_worker_ends_the_server(folder, tmp_path):
    """The engine lives on at first: it has to find that out."""
    log = tmp_path / "stderr"
    server = Server(folder, log, "--context", str(CONTEXT), "--vllm=dtype=float32", "--vllm=enforce-eager")
    (vllm,) = children(server.process.pid)
    (engine,) = children(vllm)
    for worker in children(engine) or [engine]:  # vLLM's CPU build may run its worker within the engine
        os.kill(worker, signal.SIGKILL)
    assert server.process.wait(timeout=120) != 0
    server.log.close()
    assert "error: vLLM exited by itself (exit code" in log.read_text()


def test_a_refusal_of_the_engine_is_the_last_that_is_said(folder, tmp_path):
    """An override of the user's replaces the law, and vLLM would serve plain RoPE."""
    log = tmp_path / "stderr"
    override = '--vllm=hf-overrides={"max_position_embeddings": 512}'
    with pytest.raises(AssertionError):
        Server(folder, log, "--context", str(CONTEXT), "--vllm=enforce-eager", override)
    *_, error, hint = log.read_text().splitlines()
    assert error == "error: the model that vLLM builds is not under the law that `rpe3d serve` announced"
    assert hint.startswith("hint: leave out options that replace the model or its config")
