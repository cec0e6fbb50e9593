"""Engines for `serve.py`: models to serve, vLLM in a process of its own or behind HTTP, and what transformers says.

    python serve_peers.py engine OPTIONS    asks vLLM; questions on stdin, answers on stdout, a line of JSON each
    python serve_peers.py logs QUESTION     log-probabilities of an answer by transformers

This module starts no CUDA when it is imported: vLLM forks.
"""

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
import urllib.request
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu import free_memory

SHAPES: dict[str, dict[str, int]] = {
    # Layers, width, inner width, query heads, key heads, head size, vocabulary, pretrained positions.
    "tiny": {"l": 2, "w": 128, "i": 96, "h": 4, "g": 2, "d": 32, "v": 512, "p": 64},
    "1b": {"l": 16, "w": 2048, "i": 8192, "h": 32, "g": 8, "d": 64, "v": 32000, "p": 8192},
    "1.1b": {"l": 22, "w": 2048, "i": 5632, "h": 32, "g": 4, "d": 64, "v": 32000, "p": 8192},  # less cache for a token
    "8b": {"l": 32, "w": 4096, "i": 14336, "h": 32, "g": 8, "d": 128, "v": 32000, "p": 8192},
}
DUMMY = ("8b",)
"""Too large to be written: vLLM makes the weights, the same for every engine."""
BESIDE = 3.0
"""GiB of an engine beside its weights and cache: activations, captured graphs, CUDA itself."""
MARK = 2
"""The first token of a prompt that is taken as read (`filled`); no other prompt of the benchmark begins with it."""
CONNECTOR = {
    "kv_connector": "Filled",
    "kv_connector_module_path": "filled",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"startup_fill": True, "fill_mean": 0.0, "fill_std": 1.0, "any_summaries": True},
}
"""vLLM's option for a cache that is full of random keys."""


@dataclass
class Model:
    """A model to serve: for each peer the folder and what its config is overridden with."""

    called: str
    dtype: str
    vocabulary: int
    cuda: bool
    dummy: bool
    sources: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    laws: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def prepare(given: Namespace, folder: Path) -> Model:
    """Return the model with plain RoPE and under each law, all with the same context."""
    from transformers import AutoConfig

    from rpe3d.geometry import parse_laws
    from rpe3d.models.devices import has_cuda
    from rpe3d.serve.launch import prepare as served

    cuda, specs = has_cuda(), [spec for text in given.laws for spec in parse_laws(text)]
    if (kept := os.environ.get("SERVE_MODELS")) is not None and given.shape is not None:
        folder = Path(kept) / given.shape  # for the next run
    source = given.model if given.shape is None else str(_shaped(given.shape, folder))
    made = {spec.label: served(source, spec.name, given.context, dict(spec.parameters)) for spec in specs}
    first = next(iter(made.values()))
    config = AutoConfig.from_pretrained(first.source)
    model = Model(
        called=given.shape or config.model_type,
        dtype="bfloat16" if cuda else "float32",
        vocabulary=config.vocab_size,
        cuda=cuda,
        dummy=given.shape in DUMMY,
    )
    most = max(*given.batches, given.short if "short" in given.parts else 1)
    model.options = {"dtype": model.dtype, "max_model_len": given.context, "max_num_seqs": most, "seed": 0}
    if cuda:
        model.options["gpu_memory_utilization"] = round(0.8 / (1 + len(made)), 2)
    else:
        model.options |= {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 2**27}
    if model.dummy:
        model.options["load_format"] = "dummy"
    if given.cache is not None:  # no engine measures memory then, which others that start would change
        model.options["kv_cache_memory_bytes"] = int(given.cache * 2**30)
    if given.filled:
        model.options["kv_transfer_config"] = CONNECTOR
    for option in given.vllm:
        name, _, value = option.partition("=")
        try:
            model.options[name.replace("-", "_")] = json.loads(value or "true")
        except ValueError:
            model.options[name.replace("-", "_")] = value
    model.sources["rope"], model.overrides["rope"] = first.source, {"max_position_embeddings": given.context}
    for name, one in made.items():
        model.sources[name], model.overrides[name], model.laws[name] = one.source, one.overrides, one.law
    return model


def check_room(model: Model, cache: float | None) -> None:
    """Refuse engines that the GPU's free memory does not hold: one of them would fail minutes later."""
    from rpe3d.config import ConfigError

    if not model.cuda or cache is None:
        return
    free = free_memory()
    weights = sum(file.stat().st_size for file in Path(model.sources["rope"]).glob("*.safetensors")) / 2**30
    need = len(model.sources) * (cache + weights + BESIDE)
    if need > free:
        raise ConfigError(
            f"{len(model.sources)} engines need {need:.0f} GiB, and {free:.0f} GiB of the GPU are free",
            "lower --cache, name fewer --laws, or end other programs",
        )


def tokens_of(model: Model, text: Path | None) -> list[int]:
    """Return a text as tokens of the model; none without a text."""
    from transformers import AutoTokenizer

    from rpe3d.evaluate.texts import read_texts

    if text is None:
        return []
    tokenizer = AutoTokenizer.from_pretrained(model.sources["rope"])
    found: list[int] = tokenizer(read_texts([text])[0].content, verbose=False).input_ids
    return found


def _shaped(name: str, folder: Path) -> Path:
    """Write a model of random weights with a tokenizer whose words are numbers."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    s = SHAPES[name]
    if (folder / "config.json").exists():
        return folder
    config = LlamaConfig(
        hidden_size=s["w"], intermediate_size=s["i"], num_hidden_layers=s["l"], num_attention_heads=s["h"],
        num_key_value_heads=s["g"], head_dim=s["d"], vocab_size=s["v"], max_position_embeddings=s["p"],
        initializer_range=s["w"] ** -0.5, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    words = Tokenizer(models.WordLevel({str(i): i for i in range(s["v"])}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2").save_pretrained(folder)
    if name in DUMMY:
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        return folder
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if name == "tiny" else torch.bfloat16)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    return folder


class Offline:
    """vLLM's `LLM` in a process of its own."""

    def __init__(self, model: Model, name: str, log: Path) -> None:
        options = model.options | {"hf_overrides": model.overrides[name], "model": model.sources[name]}
        options |= {"skip_tokenizer_init": True, "disable_log_stats": False}  # which time every request
        self.log = log
        line = [sys.executable, "-W", "ignore", str(Path(__file__)), "engine", json.dumps(options)]
        with log.open("w") as words:
            self.process = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True, env=_quiet(),
                start_new_session=True,
            )  # fmt: skip
        self.pages, self.page = (int(number) for number in self._answer()["blocks"])

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("an engine ended:\n" + "\n".join(self.log.read_text().splitlines()[-30:]))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, prompts: list[list[int]], new: int, *, logs: bool = False) -> dict[str, Any]:
        """Return the seconds of the whole batch and, with logs, each answer as (token, log-probability).

        Also the seconds of decoding alone: from the last request's first token on.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "new": new, "logs": logs}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def blocks(self) -> int:
        return self.pages

    def room(self) -> int:
        return self.pages * self.page

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        _end(self.process)


class Http:
    """vLLM's server, asked by one client per prompt."""

    def __init__(self, model: Model, name: str, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]
        line = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--port", str(self.port)]
        line += ["--host", "127.0.0.1", "--model", model.sources[name], "--served-model-name", "m"]
        line += ["--hf-overrides", json.dumps(model.overrides[name])]
        for option, value in model.options.items():
            said = json.dumps(value) if isinstance(value, dict) else str(value)
            line += [f"--{option.replace('_', '-')}", *([] if value is True else [said])]
        self.log = log
        with log.open("w") as words:
            self.process = subprocess.Popen(
                line, stdout=words, stderr=subprocess.STDOUT, env=_quiet(), start_new_session=True
            )
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                break
            except OSError:
                if self.process.poll() is not None:
                    raise SystemExit("a server ended:\n" + "\n".join(log.read_text().splitlines()[-30:])) from None
                time.sleep(0.5)

    def _one(self, prompt: list[int], new: int, logs: bool) -> list[tuple[int, float]]:
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "logprobs": 1 if logs else None}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=900)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"a server said {answer.status}: {said[:500]!r}")
        (choice,) = json.loads(said)["choices"]
        numbers = choice["logprobs"]["token_logprobs"] if logs else [0.0] * len(choice["token_ids"])
        return list(zip(choice["token_ids"], numbers, strict=True))

    def ask(self, prompts: list[list[int]], new: int, *, logs: bool = False) -> dict[str, Any]:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = list(clients.map(lambda prompt: self._one(prompt, new, logs), prompts))
        return {"seconds": time.perf_counter() - start, "answers": answers}

    def _cache(self, name: str) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            found = re.search(rf'vllm:cache_config_info\{{[^}}]*\b{name}="(\d+)"', answer.read().decode())
        return int(found[1]) if found else 0

    def blocks(self) -> int:
        return self._cache("num_gpu_blocks")

    def room(self) -> int:
        return self.blocks() * self._cache("block_size")

    def stop(self) -> None:
        self.process.terminate()
        _end(self.process)


def _quiet() -> dict[str, str]:
    usual = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return usual | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} | os.environ


def _end(process: subprocess.Popen[Any]) -> None:
    """Wait for a process that was asked to end; then end it and all that it started."""
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def from_transformers(model: Model, name: str, prompt: list[int], answer: list[list[Any]]) -> tuple[float, float]:
    """Return how far an answer is from transformers in float32, and how far transformers is in the engine's type.

    The first is of log-probabilities, or of a token from the best one; the second says what rounding does.
    """
    question: dict[str, Any] = {"source": model.sources[name], "overrides": model.overrides[name], "prompt": prompt}
    question |= {"answer": [token for token, _ in answer], "dtype": model.dtype}
    line = [sys.executable, "-W", "ignore", str(Path(__file__)), "logs"]
    done = subprocess.run(line, input=json.dumps(question), capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise OSError(done.stderr[-3000:])
    rows = json.loads(done.stdout.splitlines()[-1])
    far = [max(abs(theirs - ours), best - theirs) for (_, ours), (theirs, best, _) in zip(answer, rows, strict=True)]
    return float(max(far)), max(abs(theirs - rounded) for theirs, _, rounded in rows)


def _logs() -> None:
    """Answer `from_transformers`: for each token its log-probability, the best one, and the first one, rounded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import rpe3d  # noqa: F401 (registers the rope type)

    question = json.load(sys.stdin)
    config = AutoConfig.from_pretrained(question["source"])
    for key, value in question["overrides"].items():
        setattr(config, key, value)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    answer = question["answer"]

    def logs(dtype: torch.dtype) -> torch.Tensor:
        made: Any = AutoModelForCausalLM.from_pretrained(question["source"], config=config, dtype=dtype)
        with torch.no_grad():
            ids = torch.tensor([question["prompt"] + answer], device=device)
            logits = made.eval().to(device)(ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
        found: torch.Tensor = logits.float().log_softmax(-1)
        return found

    true, dtype = logs(torch.float32), getattr(torch, question["dtype"])
    rounded = true if dtype == torch.float32 else logs(dtype)
    rows = zip(true, rounded, answer, strict=True)
    print(json.dumps([[float(row[t]), float(row.max()), float(other[t])] for row, other, t in rows]))


def _engine(options: dict[str, Any]) -> None:
    """Serve questions until stdin ends. vLLM prints; what it prints goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(**options)
    cache = llm.llm_engine.vllm_config.cache_config
    print(json.dumps({"blocks": [cache.num_gpu_blocks or 0, cache.block_size or 0]}), file=out, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        logs = 0 if question["logs"] else None
        greedy = SamplingParams(
            temperature=0, max_tokens=question["new"], ignore_eos=True, detokenize=False, logprobs=logs
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in question["prompts"]]
        start = time.perf_counter()
        found = llm.generate(prompts, greedy, use_tqdm=False)
        seconds = time.perf_counter() - start
        answers = []
        if question["logs"]:
            for output in found:
                one = output.outputs[0]
                rows = zip(one.token_ids, one.logprobs, strict=True)
                answers.append([(token, row[token].logprob) for token, row in rows])
        times = [one.metrics for one in found]
        decode = max(one.last_token_ts for one in times) - max(one.first_token_ts for one in times)
        print(json.dumps({"seconds": seconds, "decode": decode, "answers": answers}), file=out, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        _engine(json.loads(sys.argv[2]))
    else:
        _logs()
