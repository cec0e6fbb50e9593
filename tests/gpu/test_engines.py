"""vLLM on a GPU under a law, as transformers answers in float32: `make test-serve-gpu` (vLLM's CUDA build is needed).

FlashAttention takes no float32, so weights are rounded to the engine's type first, for both. What rounding alone does
is measured, not chosen: transformers on the GPU in the engine's type, on the same tokens, against transformers in
float32 on the CPU. An engine may be four times as far off, a lost law is much further, and both are asserted.

Each engine is a process, several start side by side: `python tests/gpu/test_engines.py NAME FOLDER` runs one.
`test_serving.py` has the same over HTTP.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import pytest
import torch

sys.path += [str(Path(__file__).parents[1] / "serve")]  # tiny models and adapters

HERE = torch.cuda.device_count() > 0 and find_spec("vllm") is not None
pytestmark = pytest.mark.skipif(not HERE, reason="there is no GPU, or no vLLM")

PRETRAINED, CONTEXT, NEW, VOCABULARY = 512, 4096, 16, 512
LEAST = {"float32": 2e-4, "float16": 0.02, "bfloat16": 0.1}
"""Differences of a log-probability that are never called wrong, by type: a few roundings of a logit."""
OWN = {"chunk": 64, "window": 128, "reach": 256}
LAWS = {"3d-rpe": OWN, "dca": {}, "leaky-rerope": {}, "far": OWN | {"far": 8}}
GEMMA = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 96,
    "query_pre_attn_scalar": 16, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
PHI = {
    "original_max_position_embeddings": 256, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": [1.0] * 24,
        "long_factor": [1 + n / 8 for n in range(24)], "original_max_position_embeddings": 256,
    },
}  # fmt: skip
QWEN_1M = {
    "dual_chunk_attention_config": {"chunk_size": 256, "local_size": 64, "original_max_position_embeddings": 256},
    "max_position_embeddings": CONTEXT,
}
FULL = {"max_model_len": 2048, "enable_prefix_caching": False, "disable_log_stats": False}
"""Options of engines whose cache becomes full."""
ENGINES: dict[str, dict] = {
    "eager": {"head": 64, "dtype": "float16", "options": {"enforce_eager": True}},
    "graphs": {"head": 64, "dtype": "float16"},
    "graphs-bf16": {"head": 128, "dtype": "bfloat16"},
    "runner-1": {"head": 128, "dtype": "float16", "environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}},
    "apart": {"head": 64, "dtype": "float16", "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}},
    "dca": {"head": 128, "dtype": "float16", "law": "dca"},
    "no-kernel": {"head": 64, "dtype": "float16", "law": "leaky-rerope"},
    "chosen": {"head": 64, "dtype": "float16", "law": "far"},
    "mistral": {"family": "mistral", "head": 128, "dtype": "float16"},
    "qwen2": {"family": "qwen2", "head": 64, "dtype": "bfloat16"},
    "qwen3": {"family": "qwen3", "head": 128, "dtype": "bfloat16"},
    "gemma3": {"family": "gemma3_text", "head": 64, "dtype": "bfloat16", "config": GEMMA, "comes": "given"},
    "gemma3-one-cache": {
        "family": "gemma3_text", "head": 64, "dtype": "bfloat16", "config": GEMMA, "law": "dca",
        "options": {"disable_hybrid_kv_cache_manager": True},
    },
    "phi3": {"family": "phi3", "head": 64, "dtype": "float16", "config": PHI, "comes": "given"},
    "qwen2.5-1m": {
        "family": "qwen2", "head": 128, "dtype": "float16", "law": "dca", "config": QWEN_1M, "comes": "named",
    },
    "preempted": {"head": 64, "dtype": "float16", "room": 3328, "options": FULL},
    "preempted-chosen": {"head": 64, "dtype": "float16", "law": "far", "room": 3328, "options": FULL},
    "adapter": {
        "head": 64, "dtype": "float16", "adapter": True,
        # A second place for adapters stays empty: on a CPU, vLLM gives the last one to requests without an adapter.
        "options": {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2},
    },
}  # fmt: skip
"""What is served, and how. `comes` says where the law is: in the checkpoint (saved), in what `rpe3d serve` tells vLLM
(given), or in the model's own config (named). `room` is the size of a cache, in tokens.
"""
OUTSIDE = {"eager", "no-kernel", "apart"}
"""Engines that capture no whole steps, or decide it in their own process."""
PREEMPTED = [name for name in ENGINES if "room" in ENGINES[name]]
SIDE_BY_SIDE, SECONDS = int(os.environ.get("SERVE_ENGINES", "4")), float(os.environ.get("SERVE_SECONDS", "300"))
"""How many engines run at the same time, and how long one may take."""
HALTED = 2.0
"""Seconds between two looks at the engines, beyond which these tests were halted: no engine's time runs meanwhile."""


def law_name(plan):
    name = plan.get("law", "3d-rpe")
    return ("3d-rpe" if name == "far" else name), LAWS[name]


def build(folder, plan):
    """Write a random model, rounded to the engine's type, without the law and with it; return the law."""
    from engines import model, train

    import rpe3d
    from rpe3d.models.adapters import save_adapter

    width = 4 * plan["head"]
    size = {
        "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 3,
        "head_dim": plan["head"], "max_position_embeddings": PRETRAINED, "initializer_range": width**-0.5,
    }  # fmt: skip
    made = model(plan.get("family", "llama"), config=size | plan.get("config", {}))
    if "family" in plan:  # biases and norms are what families differ in, and start as zeros and ones
        for parameter in (one for one in made.parameters() if one.ndim == 1):
            parameter.data += torch.randn_like(parameter) / 8
    rounded(made, plan).save_pretrained(folder / "stock")
    name, parameters = law_name(plan)
    rpe3d.extend(made, name, context=CONTEXT, **parameters)
    if plan.get("comes", "saved") == "saved":
        made.save_pretrained(folder / "law")
    law = rpe3d.law_of(made)
    if plan.get("adapter"):
        save_adapter(rounded(train(made), plan), folder / "adapter")
    return law


def rounded(made, plan):
    """Round a model's weights to the type of an engine."""
    for parameter in made.parameters():
        parameter.data = parameter.data.to(getattr(torch, plan["dtype"])).float()
    return made


def served(folder, plan):
    """Return the model that an engine is told to serve, and what it is told of its law."""
    from rpe3d.serve.launch import prepare

    comes = plan.get("comes", "saved")
    if comes != "given":
        return str(folder / ("law" if comes == "saved" else "stock")), {}
    name, parameters = law_name(plan)
    found = prepare(str(folder / "stock"), name, CONTEXT, parameters)
    overrides = json.loads(json.dumps(found.overrides))  # as vLLM's command line has them
    return found.source, {"hf_overrides": overrides, "max_model_len": CONTEXT}


def random_texts(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def texts_for(edge):
    """Prompts of one token to the whole context, around the edge of plain RoPE, on both sides of every border."""
    edge = min(int(edge), CONTEXT // 2) if edge < CONTEXT else PRETRAINED
    around = {max(edge - NEW // 2, 2), edge, edge + 1, edge + 97}
    return random_texts(sorted({1, 17, PRETRAINED + 1, 1536, CONTEXT - NEW - 2} | around))


def child(name, folder):
    """Run one engine, and write what it answered and what transformers says of it."""
    plan = ENGINES[name]
    usual = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    usual |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for variable, value in (usual | plan.get("environment", {})).items():
        os.environ[variable] = value
    import vllm  # noqa: F401 (before transformers asks CUDA whether it is there, which a fork does not survive)

    cuda = torch.cuda.device_count() > 0
    torch.set_num_threads(max((os.cpu_count() or 1) // SIDE_BY_SIDE, 1))
    page = 16 if cuda else 32
    options = {"dtype": plan["dtype"], "skip_tokenizer_init": True, "seed": 0, "max_num_batched_tokens": 512}
    options |= {"max_num_seqs": 16, "kv_cache_memory_bytes": 2**28, "gpu_memory_utilization": 0.05}
    options |= plan.get("options", {})
    if "room" in plan:
        options |= {"num_gpu_blocks_override": plan["room"] // page, "block_size": page}
    if not cuda:  # the same program, as far as a machine without a GPU can run it
        plan = plan | {"dtype": "float32"}
        options |= {"dtype": "float32", "enforce_eager": True, "block_size": page}
    law = build(folder, plan)
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    texts = random_texts(range(530, 536)) if "room" in plan else texts_for(law.exact_up_to)
    new = 200 if "room" in plan else NEW
    adapters = [None, LoRARequest("adapter", 1, str(folder / "adapter"))] if plan.get("adapter") else [None]
    asked = [(text, adapter) for adapter in adapters for text in texts]
    source, told = served(folder, plan)
    cuda_was_started = torch.cuda.is_initialized()
    started = time.perf_counter()
    llm = LLM(source, **options | told)
    ready = time.perf_counter() - started

    def ask(given):
        greedy = SamplingParams(temperature=0, max_tokens=new, logprobs=2, detokenize=False, ignore_eos=True)
        prompts, over = [{"prompt_token_ids": text} for text, _ in given], [adapter for _, adapter in given]
        found = llm.generate(prompts, greedy, use_tqdm=False, **({"lora_request": over} if any(over) else {}))
        return [
            {
                "tokens": list(one.outputs[0].token_ids),
                "logs": [{token: entry.logprob for token, entry in row.items()} for row in one.outputs[0].logprobs],
                "cached": one.num_cached_tokens,
            }
            for one in found
        ]

    # One batch: pieces of long prompts beside the decoding of short ones. Again from the prefix cache; and alone.
    runs = {"first": ask(asked)}
    if "room" not in plan:
        runs |= {"again": ask(asked), "alone": [ask([one])[0] for one in asked]}
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    from vllm.compilation.counter import compilation_counter

    info = {"ready": ready, "graphs": mode.name, "blocks": blocks, "cuda_was_started": cuda_was_started}
    info["captured"] = compilation_counter.num_cudagraph_captured
    from rpe3d.serve import cuda as backend
    from rpe3d.serve import prompt

    info["fits"], info["trials"] = prompt.refusal(law, page) is None, list(backend.TRIALS.values())
    if "room" in plan:
        info["preempted"] = sum(one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions")
    llm.llm_engine.engine_core.shutdown()
    judged = time.perf_counter()
    # In an answer of 200 tokens rounding changes some choice: then most tokens are judged, not the one farthest off.
    summary = median if law.chooses and "room" in plan else max
    rows = [
        judge(folder, name, plan["dtype"], adapter is not None, text, [run[i] for run in runs.values()], summary)
        for i, (text, adapter) in enumerate(asked)
    ]
    info["judging"] = time.perf_counter() - judged
    if law.chooses and summary is max:  # rounding may change what is chosen at any length, and does not at all of them
        most = max(row["limit"] for row in rows)
        rows = [row | {"limit": most} if row["length"] > law.exact_up_to else row for row in rows]
    result = {"info": info, "rows": rows, "cached": [one["cached"] for one in runs.get("again", [])]}
    (folder / "result.json").write_text(json.dumps(result))


@cache
def loaded(folder, name, *what, dtype="float32", device="cpu"):
    """Load an engine's model into transformers: with its `law`, its `adapter`; `cold`: the law without temperature."""
    from transformers import AutoModelForCausalLM

    import rpe3d  # registers the rope type

    plan = ENGINES[name]
    saved = "law" in what and plan.get("comes", "saved") == "saved"
    made = AutoModelForCausalLM.from_pretrained(folder / ("law" if saved else "stock"), dtype=getattr(torch, dtype))
    if "law" in what and not saved:
        law, parameters = law_name(plan)
        rpe3d.extend(made, law, context=CONTEXT, **parameters | ({"growth": 0.0} if "cold" in what else {}))
    if "adapter" in what:
        from peft import PeftModel

        made = PeftModel.from_pretrained(made, folder / "adapter")
    return made.eval().to(device)


def logs_of(made, row):
    """Return the log-probabilities of every next token of a row."""
    with torch.no_grad():
        return made(torch.tensor([row], device=made.device)).logits[0].float().log_softmax(-1).cpu()


def judge(folder, name, dtype, adapted, text, answers, summary):
    """Compare the answers to one prompt with transformers: how far off, what rounding does, what a loss would cost.

    `summary` makes one number of those of an answer's tokens. `worth` has the distance to the model without its law,
    without its adapter, and without the law's temperature.
    """
    over = ("adapter",) if adapted else ()
    right, others = loaded(folder, name, "law", *over), {"law": loaded(folder, name, *over)}
    if adapted:
        others["adapter"] = loaded(folder, name, "law")
    if ENGINES[name].get("comes") == "named":
        others["temperature"] = loaded(folder, name, "law", "cold")
    far, noise, worth = 0.0, 0.0, dict.fromkeys(others, 0.0)
    for answer in {json.dumps(answer["tokens"]): answer for answer in answers}.values():
        whole = text + answer["tokens"]
        part = slice(len(text) - 1, len(whole) - 1)
        true = logs_of(right, whole)[part]
        same = answer["tokens"]
        for given in (one for one in answers if one["tokens"] == same):
            off = [
                max(abs(float(row[int(t)]) - value) for t, value in known.items())
                for row, known in zip(true, given["logs"], strict=True)
            ]
            off = [max(one, float(row.max() - row[token])) for one, row, token in zip(off, true, same, strict=True)]
            far = max(far, summary(off))
        places = torch.tensor(same)[:, None]
        if torch.cuda.device_count():
            near = logs_of(loaded(folder, name, "law", *over, dtype=dtype, device="cuda"), whole)[part]
            noise = max(noise, summary((near - true).gather(1, places).abs().flatten().tolist()))
        for lost, other in others.items():
            worth[lost] = max(worth[lost], summary((logs_of(other, whole)[part] - true).abs().amax(1).tolist()))
    limit = max(4 * noise, LEAST[dtype])
    return {"length": len(text), "far": far, "noise": noise, "limit": limit, "worth": worth}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run all engines, several at the same time, and return what each wrote.

    In a folder SERVE_LOGS, which outlives the tests, engines that have their results there already do not run again.
    """
    work = Path(os.environ["SERVE_LOGS"]) if "SERVE_LOGS" in os.environ else tmp_path_factory.mktemp("engines")
    waiting, running, until = [name for name in ENGINES if not (work / name / "result.json").exists()], {}, {}
    looked = time.monotonic()
    while waiting or running:
        halted, looked = time.monotonic() - looked, time.monotonic()
        if halted > HALTED:  # by `benchmarks/several.py`, and the engines with it
            until = {name: end + halted for name, end in until.items()}
        while waiting and len(running) < SIDE_BY_SIDE:
            name = waiting.pop(0)
            (work / name).mkdir(parents=True, exist_ok=True)
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
    """In one batch, again from the prefix cache, and alone; greedy tokens may differ where transformers' nearly tie.

    The oracle is `rpe3d.extend` of the same model in float32; of an adapter it is PEFT. Where the law, the adapter or
    the temperature is lost, the answers are much further off than any limit.
    """
    found = results[name]
    assert isinstance(found, dict), found
    wrong = [row for row in found["rows"] if row["far"] > row["limit"]]
    assert not wrong, (wrong, found["info"])
    beyond = [row for row in found["rows"] if row["length"] > PRETRAINED]
    assert all(row["worth"]["law"] > 4 * row["limit"] for row in beyond), "the law changes too little to be seen"
    longest = [row for row in beyond if row["length"] == max(row["length"] for row in beyond)]
    unseen = [lost for row in longest for lost, worth in row["worth"].items() if worth <= 4 * row["limit"]]
    assert not unseen, "something changes too little to be seen"
    assert name in PREEMPTED or max(found["cached"]) >= CONTEXT // 2


@pytest.mark.parametrize("name", PREEMPTED)
def test_sequences_that_a_full_cache_preempts_are_computed_again(results, name):
    """Six texts of 730 tokens in the end, in a cache of 3328 tokens; their answers are judged with all others."""
    found = results[name]
    assert isinstance(found, dict), found
    assert found["info"]["preempted"] > 0, found["info"]


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "apart"])  # which decides in its own process
def test_steps_are_captured_whole_where_a_kernel_takes_them(results, name):
    found = results[name]
    assert isinstance(found, dict), found
    whole = found["info"]["graphs"] in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL")
    assert whole == (name not in OUTSIDE), found["info"]
    assert found["info"]["captured"] > 0 or name in OUTSIDE, found["info"]


@pytest.mark.skipif(not HERE or torch.cuda.get_device_capability()[0] != 9, reason="FlashAttention 3 is for Hopper")
@pytest.mark.parametrize("name", [name for name in ENGINES if name != "apart"])  # which tries in its own process
def test_prompts_run_in_flash_attention_where_the_law_allows_it(results, name):
    """Where a trial failed, `rpe3d.attention` would answer as well, and no other test would tell."""
    found = results[name]
    assert isinstance(found, dict), found
    assert found["info"]["trials"] == ([None] if found["info"]["fits"] else [])


def test_an_engine_in_its_own_process_finds_cuda_untouched_here(results):
    found = results["apart"]
    assert isinstance(found, dict), found
    assert not found["info"]["cuda_was_started"]


if __name__ == "__main__":
    child(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # what ends badly after the result does not matter
