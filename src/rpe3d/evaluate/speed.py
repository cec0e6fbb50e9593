"""Measure what a law costs: speed and memory of a prompt and of decoding after it, against the stock model.

A row: {"law": label, "what": "prefill" | "decode", "length": tokens in the prompt, "tokens_per_second",
"stock_tokens_per_second", "speed": their ratio, "mib": peak memory on a GPU, "stock_mib", "memory": their ratio}. The
last three are null without a GPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rpe3d.config import ConfigError
from rpe3d.evaluate.grid import Progress
from rpe3d.evaluate.under import laws_of
from rpe3d.geometry import LawSpec
from rpe3d.models import extend, restore

STOCK = "stock"
MEASURED = ("prefill", "decode")
Reading = tuple[float, float]
"""Tokens per second, and peak memory in MiB (0 without a GPU)."""


def check_labels(laws: Sequence[LawSpec]) -> list[str]:
    """Return the labels of the rows, the stock model first; refuse two laws with the same label."""
    names = [STOCK, *(entry.label for entry in laws)]
    for i, name in enumerate(names):
        if name in names[:i]:
            hint = "give it once, or name one of the two: NAME=law"
            raise ConfigError(f"law {name!r} is given twice", hint)
    return names


@torch.no_grad()
def measure_speed(
    model: Any, laws: Sequence[LawSpec], *, length: int, new: int, repeat: int, context: int, progress: Progress
) -> list[dict[str, Any]]:
    """Return one row per law and measure: its rate, the stock model's, their ratio, and the same for memory.

    The stock model and the laws take turns, `repeat` times after a warm-up round; numbers are medians. The prompt is
    random tokens; decoding is greedy with a growing cache and reads every token back, as `generate` does.
    """
    draw = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.get_text_config().vocab_size)
    prompt = torch.randint(0, vocabulary, (1, length), generator=draw).to(model.device)
    names = check_labels(laws)
    for entry in laws:
        laws_of(model, [entry], [context])  # refuses what does not fit the model, before anything is measured
    readings: dict[tuple[str, str], list[Reading]] = {(what, name): [] for what in MEASURED for name in names}
    total = (repeat + 1) * len(names)
    for turn in range(total):
        name = names[turn % len(names)]
        progress(f"{name}, {'warming up' if turn < len(names) else f'round {turn // len(names)}'}", turn, total)
        if name != STOCK:
            entry = laws[names.index(name) - 1]
            extend(model, entry.name, context=context, **entry.parameters)
        try:
            found = _one(model, prompt, new)
        finally:
            if name != STOCK:
                restore(model)
        if turn >= len(names):
            for what, reading in found.items():
                readings[what, name].append(reading)
    progress("done", total, total)
    return [_row(what, name, length, readings) for name in names[1:] for what in MEASURED]


def _one(model: Any, prompt: Tensor, new: int) -> dict[str, Reading]:
    gc.collect()
    out, seconds, peak = _timed(model, lambda: model(prompt, use_cache=True, logits_to_keep=1))

    def decode() -> None:
        step = out
        for _ in range(new):
            token = step.logits[:, -1:].argmax(-1)
            token.item()
            step = model(token, past_key_values=step.past_key_values, use_cache=True)

    _, later, second = _timed(model, decode)
    return {"prefill": (prompt.shape[1] / seconds, peak), "decode": (new / later, second)}


def _timed(model: Any, function: Callable[[], Any]) -> tuple[Any, float, float]:
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(model.device)
        torch.cuda.reset_peak_memory_stats(model.device)
    start = time.perf_counter()
    result = function()
    if cuda:
        torch.cuda.synchronize(model.device)
    seconds = time.perf_counter() - start
    return result, seconds, torch.cuda.max_memory_allocated(model.device) / 2**20 if cuda else 0.0


def _row(what: str, name: str, length: int, readings: dict[tuple[str, str], list[Reading]]) -> dict[str, Any]:
    (rate, peak), (stock, stock_peak) = (
        [median(column) for column in zip(*readings[what, peer], strict=True)] for peer in (name, STOCK)
    )
    row = {"law": name, "what": what, "length": length}
    row |= {"tokens_per_second": round(rate, 2), "stock_tokens_per_second": round(stock, 2)}
    row |= {"speed": round(rate / stock, 3)}
    memory = {"mib": round(peak), "stock_mib": round(stock_peak), "memory": round(peak / stock_peak, 3)} if peak else {}
    return row | {"mib": None, "stock_mib": None, "memory": None} | memory
