"""`rpe3d serve` over HTTP: right answers to many clients at once, and clear ones to clients that err."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
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

import rpe3d

sys.path.append(str(Path(__file__).parents[1]))
import tiny_lm

NEW = 6


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


class Server:
    """The verb as a user starts it."""

    def __init__(self, folder, log, *options):
        self.port = free_port()
        line = [sys.executable, "-m", "rpe3d", "serve", str(folder), "--port", str(self.port), *options]
        environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # the engine in a process of its own, as usual
        self.log = log.open("w")
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=self.log, env=environment, text=True)
        self.url = self.process.stdout.readline().strip()
        assert self.url == f"http://127.0.0.1:{self.port}/v1", log.read_text()[-3000:]
        self.name = str(folder)

    def ask(self, prompt, **options):
        """The answer to a completion request."""
        body = {"model": self.name, "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True} | options  # fmt: skip
        return self.post(json.dumps(body).encode())

    def post(self, body):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/completions", data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def running(self):
        """Requests that the engine is still at."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)", answer.read().decode(), re.M)
        return sum(map(float, found))

    def memory(self):
        """Resident bytes of the server and all its processes."""
        children = {self.process.pid}
        for stat in Path("/proc").glob("[0-9]*/stat"):  # a parent has a smaller number, nearly always
            try:
                pid, rest = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(rest[1]) in children:
                children.add(pid)
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in children)

    def close(self):
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(timeout=60)
        self.log.close()
        return code


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


def tokens(answer):
    return answer["choices"][0]["token_ids"]


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
    body = {"model": server.name, "prompt": text, "max_tokens": NEW, "temperature": 0, "stream": True,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/completions", data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    pieces = [json.loads(line)["choices"][0]["token_ids"] or [] for line in lines[:-1]]
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


def test_a_prompt_beyond_the_context_is_a_400_that_says_so(server):
    code, words = refused(lambda: server.ask(prompts(CONTEXT + 1)[0]))
    assert code == 400
    assert str(CONTEXT) in words


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'{"model": 1}', b"\xff\xfe"])
def test_what_is_no_request_is_a_400(server, body):
    code, _ = refused(lambda: server.post(body))
    assert code in (400, 422)


def test_two_hundred_requests_in_flight(server, stock):
    """No wrong answer, and the second two hundred take no more memory than the first."""
    texts = prompts(*range(1, 201), seed=8)
    sizes = []
    for _ in range(3):
        with ThreadPoolExecutor(200) as clients:
            found = list(clients.map(server.ask, texts))
        sizes.append(server.memory())
    for text, answer in list(zip(texts, found, strict=True))[::9]:
        assert tokens(answer) == greedy(stock, text)
    assert sizes[2] - sizes[1] < 64 * 2**20, [size >> 20 for size in sizes]
