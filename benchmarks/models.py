"""A whole model under a law against the stock model with SDPA, in one run: prefill, decode, memory.

    python benchmarks/models.py --model default --out benchmarks/results       # or --model FOLDER
    python benchmarks/models.py --model default --lengths 512 --new 8 --out DIR      # small enough for a CPU
    python benchmarks/models.py --model qwen.gguf --laws 3d-rpe:far=512 --lengths 131072 --texts BOOK --out DIR

Prompts are the beginning of a text: in a text neighbouring queries choose alike, in random tokens they do not. Batch 1;
bf16 on CUDA, fp32 elsewhere. The peers share their weights and take turns, there and back (A B C C B A ...); every
number is a median. Decoding is greedy and reads each token back, as `generate` does: with a growing cache, and with a
static one under torch.compile(mode="reduce-overhead"). Nothing is timed before a law has passed its checks: within its
window it is the stock model, and decoding is the full forward, each to twice the stock model's own rounding
(ten times it for decoding under a law that chooses keys: rounding can choose another block).
Writes models-<device>.csv.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

import beside
from rpe3d import ConfigError, extend, law_of
from rpe3d.evaluate.texts import check_tokens, read_texts, tokenize
from rpe3d.geometry import LawSpec, parse_laws
from rpe3d.models.load import load

LAWS = "3d-rpe,dca"
KEPT = 64  # last tokens whose logits a check compares
CUDA = torch.cuda.is_available()

Readings = dict[str, list[tuple[float, float]]]
"""By peer: tokens per second and peak MiB of every repeat."""


def peers(stock: Any, laws: Sequence[LawSpec], longest: int) -> dict[str, Any]:
    """The stock model, and one under each law with the same weights in memory."""
    stock.config._attn_implementation = "sdpa"
    context = max(4 * int(stock.config.max_position_embeddings), longest)
    shared = {id(p): p for p in stock.parameters()}
    made = {
        law.label: extend(copy.deepcopy(stock, dict(shared)), law.name, context=context, **law.parameters)
        for law in laws
    }
    return {"stock": stock, **made}


def measured(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a function returns, its seconds, and the peak of all memory meanwhile in MiB (0 without a GPU)."""
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = function()
    if CUDA:
        torch.cuda.synchronize()
    return result, time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**20 if CUDA else 0.0


def prompted(model: Any, ids: Tensor, **given: Any) -> Any:
    return model(ids, use_cache=True, logits_to_keep=1, **given)


def decoded(model: Any, out: Any, steps: int) -> None:
    """Greedy tokens after a prompt, each read back."""
    for _ in range(steps):
        token = out.logits[:, -1:].argmax(-1)
        token.item()
        out = model(token, past_key_values=out.past_key_values, use_cache=True)


class Compiled:
    """Decoding with a static cache, one compiled graph per step."""

    def __init__(self, model: Any, ids: Tensor, room: int) -> None:
        self.cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + room)
        self.token = prompted(model, ids, past_key_values=self.cache).logits.argmax(-1)
        self.position = torch.tensor([[ids.shape[1]]], device=ids.device)
        self.forward: Any = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.token.item()
            torch.compiler.cudagraph_mark_step_begin()
            given = {"position_ids": self.position, "past_key_values": self.cache, "use_cache": True}
            self.token = self.forward(self.token, **given).logits.argmax(-1)
            self.position = self.position + 1


def eager(models: dict[str, Any], ids: Tensor, new: int, repeat: int) -> dict[str, Readings]:
    """Prefill, and decoding with a growing cache."""
    found: dict[str, Readings] = {"prefill": defaultdict(list), "decode, eager": defaultdict(list)}
    for n in range(-1, repeat):  # the first round warms up
        for name, model in list(models.items())[:: -1 if n % 2 else 1]:
            out, seconds, first = measured(lambda model=model: prompted(model, ids))  # type: ignore[misc]
            _, later, second = measured(lambda model=model, out=out: decoded(model, out, new))  # type: ignore[misc]
            del out
            if n >= 0:
                found["prefill"][name].append((ids.shape[1] / seconds, first))
                found["decode, eager"][name].append((new / later, second))
    return found


def compiled(models: dict[str, Any], ids: Tensor, new: int, repeat: int) -> dict[str, Readings]:
    """Decoding with a static cache. All peers' caches are there at once, so each one's memory is what it added."""
    weights = sum(p.numel() * p.element_size() for p in models["stock"].parameters()) / 2**20
    found: dict[str, Readings] = {"decode, compiled": defaultdict(list)}
    ready: dict[str, tuple[Compiled, float]] = {}
    torch.compiler.reset()
    for name, model in models.items():
        before = torch.cuda.memory_allocated() / 2**20 if CUDA else weights
        made = Compiled(model, ids, (repeat + 1) * new)
        made.steps(min(new, 4))  # compiles
        _, _, peak = measured(lambda made=made: made.steps(min(new, 4)))  # type: ignore[misc]
        ready[name] = made, max(0.0, peak - before + weights)
    for _ in range(repeat):
        for name, (made, peak) in ready.items():
            _, seconds, _ = measured(lambda made=made: made.steps(new))  # type: ignore[misc]
            found["decode, compiled"][name].append((new / seconds, peak))
    return found


def relative(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth.double()).norm() / truth.double().norm())


def judge(what: str, ours: float, theirs: float, dtype: torch.dtype, times: float = 2) -> None:
    """End the run where an error is above twice (`times`) the stock model's and the rounding of the type."""
    most = times * (theirs + torch.finfo(dtype).eps)
    print(f"check {what}: {ours:.2e}, at most {most:.2e}", flush=True)
    if not ours <= most:
        raise SystemExit(f"{what} fails its check: {ours:.2e} > {most:.2e}")


def check(models: dict[str, Any], ids: Tensor) -> None:
    """Within its window a law is the stock model, judged by a more precise one; decoding is the full forward."""
    stock = models["stock"]
    precise = copy.deepcopy(stock).to(torch.float64 if stock.dtype == torch.float32 else torch.float32)
    laws: dict[str, Any] = {name: law_of(model) for name, model in models.items() if name != "stock"}
    for name, law in laws.items():
        near = ids[:, : int(min(law.exact_up_to, ids.shape[1]))]
        truth, theirs, ours = (m(near, logits_to_keep=KEPT).logits for m in (precise, stock, models[name]))
        what = f"{name}, {near.shape[1]} tokens within its window"
        judge(what, relative(ours, truth), relative(theirs, truth), stock.dtype)
    del precise
    apart = {name: step_error(model, ids) for name, model in models.items()}
    for name, law in laws.items():
        times = 10 if law.chooses else 2
        judge(f"{name}, decoding at {ids.shape[1]} tokens", apart[name], apart["stock"], stock.dtype, times)


def step_error(model: Any, ids: Tensor, steps: int = 8) -> float:
    """How far the logits of the last tokens are from the full forward's when they are decoded one by one."""
    full = model(ids, logits_to_keep=steps).logits
    out = prompted(model, ids[:, :-steps])
    parts = []
    for token in ids[:, -steps:].split(1, dim=1):
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        parts.append(out.logits)
    return relative(torch.cat(parts, 1), full)


def rows_of(model: str, tokens: int, found: dict[str, Readings]) -> list[dict[str, Any]]:
    """Medians, and each law's ratio to the stock model."""
    rows = []
    for what, readings in found.items():
        middle = {name: [statistics.median(column) for column in zip(*r, strict=True)] for name, r in readings.items()}
        for name in [name for name in middle if name != "stock"]:
            names = {"model": model, "what": what, "law": name}
            rows.append(beside.row(names, tokens, middle[name], middle["stock"], goal=True))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="`default`, a folder, or a .gguf file")
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV")
    parser.add_argument("--laws", type=parse_laws, default=LAWS, help=f"laws beside the stock model; default {LAWS}")
    parser.add_argument("--lengths", default="32768", help="tokens of the prompts")
    parser.add_argument(
        "--texts", nargs="+", default=[], help="what prompts are taken from; default: Python's reference"
    )
    parser.add_argument("--new", type=int, default=64, help="tokens that are decoded")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--parts", default="eager,compiled")
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    torch.manual_seed(0)
    longest = max(lengths)
    loaded = load(given.model)
    texts = [tokenize(loaded.tokenizer, text) for text in read_texts(given.texts)]
    check_tokens(texts, lengths)
    models = peers(loaded.model, given.laws, longest + (given.repeat + 1) * given.new)
    stock = models["stock"]
    ids = max(texts, key=lambda text: len(text.ids)).ids[None, :longest].to(stock.device)
    called = beside.called(stock)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        check(models, ids[:, : longest // 2])
        for length in lengths:
            for part in given.parts.split(","):
                try:
                    found = {"eager": eager, "compiled": compiled}[part](
                        models, ids[:, :length], given.new, given.repeat
                    )
                except RuntimeError as error:  # a machine without a compiler or with too little memory, say
                    print(f"{part} at {length} failed: {str(error).strip().splitlines()[0]}", file=sys.stderr)
                    continue
                rows += rows_of(called, length, found)
    beside.write(rows, given.out, "models", given.model)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error.problem}\nhint: {error.hint}")
