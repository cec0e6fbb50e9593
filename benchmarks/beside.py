"""Speed and memory beside the stock model's: rows of a result with their goals, and the file that holds them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stamp import COLUMNS, stamp

SPEED, MEMORY = 0.85, 1.1  # at least, at most
Measured = Sequence[float]
"""Tokens per second, and MiB at the peak (0 without a GPU)."""


def row(names: Mapping[str, str], tokens: int, ours: Measured, stock: Measured, *, goal: bool) -> dict[str, Any]:
    """Return the row of one peer, and print it with whether it reaches the goals where it has any."""
    (rate, peak), (stock_rate, stock_peak) = ours, stock
    memory = round(peak / stock_peak, 3) if stock_peak else None
    reached = rate / stock_rate >= SPEED and (memory or 0) <= MEMORY
    _, what, peer = names.values()
    print(
        f"{what:18} {peer:12} {tokens:7} {rate:11.1f} tokens/s, stock {stock_rate:11.1f}: {rate / stock_rate:6.3f};"
        f" {peak:7.0f} MiB, stock {stock_peak:7.0f}: {memory}  {('reached' if reached else 'MISSED') if goal else ''}",
        flush=True,
    )
    return {
        **names,
        "tokens": tokens,
        "tokens_per_s": round(rate, 1),
        "stock_tokens_per_s": round(stock_rate, 1),
        "speed": round(rate / stock_rate, 3),
        "speed_goal": SPEED if goal else None,
        "peak_mib": round(peak),
        "stock_peak_mib": round(stock_peak),
        "memory": memory,
        "memory_goal": MEMORY if goal else None,
    }


def called(stock: Any) -> str:
    """Return a model's class and size, as results name it."""
    return f"{type(stock).__name__}, {sum(p.numel() for p in stock.parameters()) / 1e6:.0f} M"


def write(rows: Sequence[Mapping[str, Any]], folder: Path, name: str, model: str) -> None:
    """Write `NAME-<device>.csv`; a model's folder is not named in it."""
    if not rows:
        raise SystemExit("nothing was measured")
    cuda = torch.cuda.is_available()
    origin = stamp(cuda=cuda)
    if model != "default":
        origin["recipe"] = origin["recipe"].replace(model, "FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}-{'cuda' if cuda else 'cpu'}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, (*COLUMNS, *rows[0]))
        writer.writeheader()
        writer.writerows(origin | dict(row) for row in rows)
