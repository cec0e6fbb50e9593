"""`rpe3d serve` as a user starts it, and requests to it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

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
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # the engine in a process of its own, as usual
        self.log = log.open("w")
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=self.log, env=environment, text=True)
        self.url = self.process.stdout.readline().strip()
        assert self.url == f"http://127.0.0.1:{self.port}/v1", log.read_text()[-3000:]
        self.name = str(folder)

    def ask(self, prompt, **options):
        """The answer to a completion request."""
        return self.post(json.dumps(self.body(prompt) | options).encode())

    def chat(self, words, **options):
        """The answer to a message of a user."""
        body = self.body() | {"messages": [{"role": "user", "content": words}]}
        return self.post(json.dumps(body | options).encode(), "chat/completions")

    def stream(self, prompt, **options):
        """The tokens of a completion, in the pieces that they come in."""
        request = self.request(json.dumps(self.body(prompt) | {"stream": True} | options).encode())
        with urllib.request.urlopen(request, timeout=300) as answer:
            lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line)["choices"][0]["token_ids"] or [] for line in lines[:-1]]

    def body(self, prompt=None):
        usual = {"model": self.name, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return usual if prompt is None else usual | {"prompt": prompt}

    def request(self, body, path="completions"):
        return urllib.request.Request(f"{self.url}/{path}", data=body, headers={"Content-Type": "application/json"})

    def post(self, body, path="completions"):
        with urllib.request.urlopen(self.request(body, path), timeout=300) as answer:
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


def tokens(answer):
    return answer["choices"][0]["token_ids"]
