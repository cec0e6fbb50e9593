"""vLLM on a GPU under a law, as transformers answers in float32: `make test-serve-gpu` (vLLM's CUDA build is needed).

FlashAttention takes no float32, so weights are rounded to the engine's type first, for both. What rounding alone does
is measured, not chosen: transformers on the GPU in the engine's type, on the same tokens, against transformers in
float32 on the CPU. An engine may be four times as far off, a lost law is much further, and both are asserted.

Each engine is a process, several start side by side: `python tests/gpu/test_engines.py NAME FOLDER` runs one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")]

HERE = torch.cuda.device_count() > 0 and find_spec("vllm") is not None
pytestmark = pytest.mark.skipif(not HERE, reason="there is no GPU, or no vLLM")

PRETRAINED, CONTEXT, NEW, VOCABULARY = 512, 4096, 16, 512
LEAST = {"float32": 2e-4, "float16": 0.02, "bfloat16": 0.1}
"""Differences of a log-probability that are never called wrong, by type: a few roundings of a logit."""
OWN = {"chunk": 64, "window": 128, "reach": 256}
LAWS = {"3d-rpe": OWN, "dca": {}, "leaky-rerope": {}, "far": OWN | {"far": 8}}
ENGINES: dict[str, dict] = {
    "eager": {"head": 64, "dtype": "float16", "options": {"enforce_eager": True}},
    "graphs": {"head": 64, "dtype": "float16"},
    "graphs-bf16": {"head": 128, "dtype": "bfloat16"},
    "runner-1": {"head": 128, "dtype": "float16", "environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
    "apart": {"head": 64, "dtype": "float16", "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}},
    "dca": {"head": 128, "dtype": "float16", "law": "dca"},
    "no-kernel": {"head": 64, "dtype": "float16", "law": "leaky-rerope"},
    "chosen": {"head": 64, "dtype": "float16", "law": "far"},
}
CAPTURED = {"graphs", "graphs-bf16", "runner-1", "dca", "chosen"}
"""Engines that must capture whole steps."""
SIDE_BY_SIDE, SECONDS = int(os.environ.get("SERVE_ENGINES", "4")), float(os.environ.get("SERVE_SECONDS", "300"))
"""How many engines run at the same time, and how long one may take."""


def law_name(plan):
    name = plan.get("law", "3d-rpe")
    return ("3d-rpe" if name == "far" else name), LAWS[name]


def build(folder, plan):
    """Write a random model, rounded to the engine's type, with the law and without."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    import rpe3d

    width = 4 * plan["head"]
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=plan["head"], max_position_embeddings=PRETRAINED,
        initializer_range=width**-0.5, pad_token_id=0, bos_token_id=1, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config).eval()
    for parameter in made.parameters():
        parameter.data = parameter.data.to(getattr(torch, plan["dtype"])).float()
    made.save_pretrained(folder / "stock")
    name, parameters = law_name(plan)
    rpe3d.extend(made, name, context=CONTEXT, **parameters).save_pretrained(folder / "law")


def texts_for(edge):
    """Prompts of one token to the whole context, around the edge of plain RoPE, on both sides of every border."""
    edge = min(int(edge), CONTEXT // 2) if edge < CONTEXT else PRETRAINED
    around = {max(edge - NEW // 2, 2), edge, edge + 1, edge + 97}
    lengths = sorted({1, 17, PRETRAINED + 1, 1536, CONTEXT - NEW - 2} | around)
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def child(name, folder):
    """Run one engine, and write what it answered and what transformers says of it."""
    plan = ENGINES[name]
    usual = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    usual |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for variable, value in (usual | plan.get("environment", {})).items():
        os.environ[variable] = value
    import vllm  # noqa: F401 (before transformers asks CUDA whether it is there, which a fork does not survive)

    cuda = torch.cuda.device_count() > 0
    if not cuda:  # the same program, as far as a machine without a GPU can run it
        plan = plan | {"dtype": "float32", "options": {"enforce_eager": True, "block_size": 32}}
    build(folder, plan)
    from transformers import AutoConfig
    from vllm import LLM, SamplingParams

    from rpe3d.serve.checks import config_law

    law = config_law(AutoConfig.from_pretrained(folder / "law"))
    texts = texts_for(law.exact_up_to)
    options = {"dtype": plan["dtype"], "skip_tokenizer_init": True, "seed": 0, "max_num_batched_tokens": 512}
    options |= {"max_num_seqs": 16, "kv_cache_memory_bytes": 2**28, "gpu_memory_utilization": 0.15}
    started = time.perf_counter()
    llm = LLM(str(folder / "law"), **options | plan.get("options", {}))
    ready = time.perf_counter() - started

    def ask(given):
        greedy = SamplingParams(temperature=0, max_tokens=NEW, logprobs=2, detokenize=False, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": text} for text in given], greedy, use_tqdm=False)
        return [
            {
                "tokens": list(one.outputs[0].token_ids),
                "logs": [{token: entry.logprob for token, entry in row.items()} for row in one.outputs[0].logprobs],
                "cached": one.num_cached_tokens,
            }
            for one in found
        ]

    # One batch: pieces of long prompts beside the decoding of short ones. Again from the prefix cache; and alone.
    runs = {"first": ask(texts), "again": ask(texts), "alone": [ask([text])[0] for text in texts]}
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    from vllm.compilation.counter import compilation_counter

    info = {"ready": ready, "graphs": mode.name, "blocks": blocks, "cuda_was_started": torch.cuda.is_initialized()}
    info["captured"] = compilation_counter.num_cudagraph_captured
    llm.llm_engine.engine_core.shutdown()
    rows = [judge(folder, plan, text, [runs[run][i] for run in runs]) for i, text in enumerate(texts)]
    if law.chooses:  # rounding may change what is chosen at any length, and does not at all of them
        most = max(row["limit"] for row in rows)
        rows = [row | {"limit": most} if row["length"] > law.exact_up_to else row for row in rows]
    result = {"info": info, "rows": rows, "cached": [one["cached"] for one in runs["again"]]}
    (folder / "result.json").write_text(json.dumps(result))


def logs_of(folder, kind, device, row):
    """Return transformers' log-probabilities of every next token of a row."""
    from transformers import AutoModelForCausalLM

    import rpe3d  # noqa: F401 (registers the rope type)

    made = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, kind)).eval().to(device)
    with torch.no_grad():
        return made(torch.tensor([row], device=device)).logits[0].float().log_softmax(-1).cpu()


def judge(folder, plan, text, answers):
    """Compare the answers to one prompt with transformers: how far off, what rounding does, what the law is worth."""
    far, noise, worth = 0.0, 0.0, 0.0
    for answer in {json.dumps(answer["tokens"]): answer for answer in answers}.values():
        whole = text + answer["tokens"]
        part = slice(len(text) - 1, len(whole) - 1)
        true = logs_of(folder / "law", "float32", "cpu", whole)[part]
        same = answer["tokens"]
        for given in (one for one in answers if one["tokens"] == same):
            for row, token, known in zip(true, same, given["logs"], strict=True):
                off = max(abs(float(row[int(t)]) - value) for t, value in known.items())
                far = max(far, off, float(row.max() - row[token]))
        places = torch.tensor(same)[:, None]
        if torch.cuda.device_count():
            rounded = logs_of(folder / "law", plan["dtype"], "cuda", whole)[part]
            noise = max(noise, float((rounded - true).gather(1, places).abs().max()))
        plain = logs_of(folder / "stock", "float32", "cpu", whole)[part]
        worth = max(worth, float((plain - true).abs().max()))
    limit = max(4 * noise, LEAST[plan["dtype"]])
    return {"length": len(text), "far": far, "noise": noise, "limit": limit, "worth": worth}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run all engines, several at the same time, and return what each wrote."""
    work = Path(os.environ["SERVE_LOGS"]) if "SERVE_LOGS" in os.environ else tmp_path_factory.mktemp("engines")
    waiting, running, until = list(ENGINES), {}, {}
    while waiting or running:
        while waiting and len(running) < SIDE_BY_SIDE:
            name = waiting.pop(0)
            (work / name).mkdir(parents=True)
            log = (work / name / "log").open("w")
            line = [sys.executable, "-W", "ignore", str(Path(__file__)), name, str(work / name)]
            running[name] = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            until[name] = time.monotonic() + SECONDS
        for name, process in list(running.items()):
            if process.poll() is None and time.monotonic() > until[name]:
                os.killpg(process.pid, signal.SIGKILL)  # its engine as well
                process.wait()
            if process.poll() is not None:
                del running[name]
        time.sleep(0.2)
    found = {}
    for name in ENGINES:
        made = work / name / "result.json"
        found[name] = json.loads(made.read_text()) if made.exists() else (work / name / "log").read_text()[-4000:]
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_answers_as_transformers(results, name):
    """In one batch, again from the prefix cache, and alone; greedy tokens may differ where transformers' nearly tie."""
    found = results[name]
    assert isinstance(found, dict), found
    wrong = [row for row in found["rows"] if row["far"] > row["limit"]]
    assert not wrong, (wrong, found["info"])
    beyond = [row for row in found["rows"] if row["length"] > PRETRAINED]
    assert all(row["worth"] > 4 * row["limit"] for row in beyond), "the law changes too little to be seen"
    assert max(found["cached"]) >= CONTEXT // 2


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "apart"])  # which decides in its own process
def test_steps_are_captured_whole_where_a_kernel_takes_them(results, name):
    found = results[name]
    assert isinstance(found, dict), found
    whole = found["info"]["graphs"] in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL")
    assert whole == (name in CAPTURED), found["info"]
    assert found["info"]["captured"] > 0 or name not in CAPTURED, found["info"]


def test_an_engine_in_its_own_process_finds_cuda_untouched_here(results):
    found = results["apart"]
    assert isinstance(found, dict), found
    assert not found["info"]["cuda_was_started"]


def test_a_server_answers_names_its_law_and_gives_all_pages_back(tmp_path):
    """`rpe3d serve` with its defaults, asked by 32 clients at once, of which some leave in the middle."""
    import tiny_lm
    from soak import Client, Soak

    plan = ENGINES["graphs"]
    build(tmp_path, plan)
    source = tmp_path / "law"
    tiny_lm.tokenizer().save_pretrained(source)
    options = ["dtype=float16", "max-num-seqs=32", "kv-cache-memory-bytes=268435456", "gpu-memory-utilization=0.15"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    line = [sys.executable, "-m", "rpe3d", "serve", str(source), "--port", str(port)]
    line += [f"--vllm={option}" for option in options]
    with (tmp_path / "words").open("w") as words:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=words, text=True)
    try:
        url = process.stdout.readline().strip()
        assert url, (tmp_path / "words").read_text()[-3000:]
        client = Client(url, str(source))
        assert 'law="3d-rpe"' in client.metrics()
        texts = texts_for(192)
        soak = Soak(client, texts, new=NEW, in_flight=32)
        report = soak.run(20)
        assert report.failures == []
        assert report.finished > 32
        assert report.left > 0
        assert client.settled()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    # In another batch numbers round otherwise: an answer may differ where transformers nearly ties.
    answers = [(texts[i], tokens) for i, tokens in report.different] + list(zip(texts, soak.quiet, strict=True))
    for text, tokens in {json.dumps(pair): pair for pair in answers}.values():
        logs = logs_of(source, "float32", "cpu", text + tokens)[len(text) - 1 : -1]
        behind = logs.max(-1).values - logs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float(behind.max()) <= 2 * LEAST["float16"], len(text)


if __name__ == "__main__":
    child(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # what ends badly after the result does not matter
