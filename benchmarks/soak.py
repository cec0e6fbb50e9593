"""A server under load for minutes: no wrong token, no page that is not given back, no memory that grows.

    python benchmarks/soak.py MODEL --context 64k --minutes 30 --in-flight 200
    python benchmarks/soak.py FOLDER --minutes 1 --in-flight 20 --vllm dtype=float32 --vllm enforce-eager   # on a CPU

Starts `rpe3d serve` and asks every prompt once, alone. Then clients ask them again and again, all at the same time;
some leave in the middle of an answer. Every answer is held to the one that was given alone: the same tokens in float32,
in fp16 or bf16 all but those that part where two tokens nearly tied (`--tie 0.1`), and a share (`--differing`). At the
end no request runs and no page is in use.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

LEAVING = 0.2  # share of the requests whose client leaves


class Client:
    """Asks a server at `http://HOST:PORT/v1` for completions of tokens."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.address, self.model = (parts.hostname, parts.port), model

    def _request(self, method: str, path: str, body: object = None) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(*self.address, timeout=900)
        connection.request(
            method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
        )
        return connection

    def _body(self, prompt: list[int], new: int, *, stream: bool) -> dict[str, object]:
        return {"model": self.model, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, "stream": stream}  # fmt: skip

    def ask(self, prompt: list[int], new: int) -> list[int]:
        """Return the tokens of a greedy answer."""
        connection = self._request("POST", "/v1/completions", self._body(prompt, new, stream=False))
        answer = connection.getresponse()
        said = answer.read()
        connection.close()
        if answer.status != 200:
            raise OSError(f"the server said {answer.status}: {said[:300]!r}")
        tokens: list[int] = json.loads(said)["choices"][0]["token_ids"]
        return tokens

    def ties(self, prompt: list[int], new: int, within: float) -> tuple[list[int], list[set[int]]]:
        """Return the tokens of a greedy answer, and for each those that are nearly as likely, in log-probability."""
        body = self._body(prompt, new, stream=False) | {"logprobs": 5, "return_tokens_as_token_ids": True}
        connection = self._request("POST", "/v1/completions", body)
        answer = connection.getresponse()
        said = answer.read()
        connection.close()
        if answer.status != 200:
            raise OSError(f"the server said {answer.status}: {said[:300]!r}")
        choice = json.loads(said)["choices"][0]
        near = [
            {int(token.partition(":")[2]) for token, log in row.items() if log >= max(row.values()) - within}
            for row in choice["logprobs"]["top_logprobs"]
        ]
        return choice["token_ids"], near

    def leave(self, prompt: list[int], new: int) -> None:
        """Ask, read the beginning of the answer, and go."""
        connection = self._request("POST", "/v1/completions", self._body(prompt, new, stream=True))
        connection.getresponse().read(20)
        connection.close()

    def _get(self, path: str) -> str:
        connection = self._request("GET", path)
        said = connection.getresponse().read().decode()
        connection.close()
        return said

    def metrics(self) -> str:
        return self._get("/metrics")

    def root(self) -> str:
        """Return where the server has the model from: its name may be `default`, or a GGUF file's."""
        return str(json.loads(self._get("/v1/models"))["data"][0]["root"])

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)", self.metrics(), re.MULTILINE)
        if not found:
            raise OSError(f"the server publishes no {name}")
        return sum(map(float, found))

    def busy(self) -> list[float]:
        """Return requests that run, requests that wait, and the share of pages in use."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return [self.metric(name) for name in names]

    def settled(self, seconds: float = 60) -> bool:
        """Wait until nothing runs, waits or holds a page; False if something still does at the end."""
        until = time.monotonic() + seconds
        while any(self.busy()):
            if time.monotonic() > until:
                return False
            time.sleep(0.2)
        return True


@dataclass
class Report:
    """What clients saw."""

    finished: int = 0
    left: int = 0
    tied: int = 0
    """Answers that part from the quiet one where that nearly tied."""
    different: list[tuple[int, list[int]]] = field(default_factory=list)
    """Which prompt, and the tokens that are not those of its quiet answer."""
    failures: list[str] = field(default_factory=list)


class Soak:
    """Prompts, their answers in a quiet server, and clients that ask for them all at once."""

    def __init__(
        self, client: Client, texts: list[list[int]], *, new: int, in_flight: int, tie: float | None = None
    ) -> None:
        self.client, self.texts, self.new, self.in_flight = client, texts, new, in_flight
        asked = [(client.ask(text, new), []) if tie is None else client.ties(text, new, tie) for text in texts]
        self.quiet, self.near = [tokens for tokens, _ in asked], [near for _, near in asked]

    def tied(self, i: int, tokens: list[int]) -> bool:
        """Say whether an answer parts from the quiet one at a token that was nearly as likely there."""
        at = next((at for at, (a, b) in enumerate(zip(tokens, self.quiet[i], strict=False)) if a != b), None)
        return at is not None and at < len(self.near[i]) and tokens[at] in self.near[i][at]

    def run(self, seconds: float) -> Report:
        """Ask for so long, and wait for the last answers."""
        report, lock, until = Report(), threading.Lock(), time.monotonic() + seconds

        def ask(seed: int) -> None:
            generator = random.Random(seed)
            while time.monotonic() < until and not report.failures:
                i = generator.randrange(len(self.texts))
                try:
                    if generator.random() < LEAVING:
                        self.client.leave(self.texts[i], self.new)
                        with lock:
                            report.left += 1
                        continue
                    tokens = self.client.ask(self.texts[i], self.new)
                except (OSError, http.client.HTTPException) as error:
                    report.failures.append(f"{type(error).__name__}: {error}")
                    return
                with lock:
                    report.finished += 1
                    if tokens != self.quiet[i]:
                        if self.tied(i, tokens):
                            report.tied += 1
                        else:
                            report.different.append((i, tokens))

        clients = [threading.Thread(target=ask, args=(seed,)) for seed in range(self.in_flight)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        return report


def prompts(longest: int, vocabulary: int, count: int = 40) -> list[list[int]]:
    """Return prompts of one token to the longest, spread evenly on a logarithmic scale."""
    generator = random.Random(0)
    lengths = [max(1, round(longest ** (i / (count - 1)))) for i in range(count)]
    return [[generator.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def memory(process: int) -> int:
    """Return the resident bytes of a process and all that it started (Linux)."""
    known = {process}
    for stat in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda path: int(path.parent.name)):
        try:
            rest = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(rest[1]) in known:
            known.add(int(stat.parent.name))
    return sum(int(Path(f"/proc/{one}/statm").read_text().split()[1]) * 4096 for one in known)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="a checkpoint of `rpe3d extend`; or a stock model, with --context")
    add("--context", help="as of `rpe3d serve`")
    add("--law", help="as of `rpe3d serve`")
    add("--minutes", type=float, default=10)
    add("--in-flight", type=int, default=200)
    add("--new", type=int, default=32, help="tokens of an answer")
    add("--longest", type=int, help="tokens of the longest prompt; default a quarter of the context")
    add("--differing", type=float, default=0.0, help="share of answers that may differ from the quiet one")
    add("--tie", type=float, help="what two tokens' log-probabilities may differ by, to part there is no error")
    add("--seconds", type=float, help="instead of --minutes")
    add("--port", type=int, default=8123)
    add("--vllm", action="append", default=[], help="as of `rpe3d serve`")
    given = parser.parse_args()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background: the server ends by it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    line = [sys.executable, "-m", "rpe3d", "serve", given.model, "--port", str(given.port)]
    for option in ("context", "law"):
        line += [f"--{option}", getattr(given, option)] if getattr(given, option) else []
    line += [part for option in given.vllm for part in ("--vllm", option)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            return process.wait() or 1
        client = Client(url, given.model)
        found = re.search(r'rpe3d_law_info\{[^}]*context="(\d+)"', client.metrics())
        assert found is not None
        longest = given.longest or int(found[1]) // 4
        from transformers import AutoConfig

        soak = Soak(client, prompts(longest, AutoConfig.from_pretrained(client.root()).vocab_size), new=given.new,
                    in_flight=given.in_flight, tie=given.tie)  # fmt: skip
        sizes = []
        fine = True
        for part in range(4):
            report = soak.run(given.minutes * 15 if given.seconds is None else given.seconds / 4)
            settled = client.settled()
            sizes.append(memory(process.pid))
            off = len(report.different) / max(report.finished, 1)
            fine &= settled and not report.failures and report.finished > 0 and off <= given.differing
            print(
                f"quarter {part + 1}: {report.finished} answers, {len(report.different)} other than alone,"
                f" {report.tied} parted at a tie,"
                f" {report.left} clients left, pages {'given back' if settled else 'NOT GIVEN BACK'},"
                f" {sizes[-1] >> 20} MiB",
                *report.failures[:3],
                flush=True,
            )
        grown = (sizes[-1] - sizes[0]) / sizes[0]
        print(f"{'fine' if fine and grown < 0.1 else 'NOT FINE'}: memory grew by {grown:.1%} over three quarters")
        return 0 if fine and grown < 0.1 else 1
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


if __name__ == "__main__":
    sys.exit(main())
