"""Estimates for `paper_size.py`, of minutes before it measures and of several GPUs after, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, str]
GPUS = (4, 8)
ROPE, LARGEST = "rope", "largest"
GIB = 2**30
FLOPS = 0.4 * 990e12  # a second: 40 % of an H200's dense bf16
BANDWIDTH = 300e9  # bytes a second and GPU in a collective: two thirds of NVLink's 450 GB/s in one direction
TRAINED_BYTES = 4 + 4 + 8
"""Bytes of a trained weight: itself and its gradient in float32, and AdamW's two moments."""


def minutes_of(shape: Any, length: int, micro_steps: int) -> float:
    """Return the minutes of so many micro-steps of one window, with LoRA and gradient checkpointing.

    Forward, forward again and the gradients of activations are 6 operations a weight and token; causal attention is
    half of 4 t^2 d a layer in a forward, and two and a half forwards in a backward.
    """
    matrices = 4 * shape.hidden**2 + 3 * shape.hidden * shape.inner
    weights = shape.layers * matrices + shape.vocabulary * shape.hidden
    attention = 4.5 * shape.layers * 2 * length * shape.hidden
    return float(micro_steps * length * (6 * weights + attention) / FLOPS / 60)


def fsdp(row: Row, gpus: int) -> dict[str, float]:
    """Return what each of several GPUs would hold, and how long a step would take, from a row of one GPU.

    Weights, gradients and moments are divided; activations are one window's on each GPU, as measured: the peak less
    what will be divided. Two layers are gathered in bfloat16 at a time, the one at work and the one that comes. Every
    micro-step gathers all weights twice, for the forward and for the backward, which computes its forward again in the
    same place; trained weights' gradients are summed once a step in float32. Exchange may hide behind computation:
    the time is that of both one after the other.
    """
    frozen, trained = int(row["frozen"]), int(row["trained"])
    divided = frozen + TRAINED_BYTES * trained
    activations = max(0.0, float(row["peak_gib"]) * GIB - divided)
    gathered = 2 * int(row["unit"])
    micro_steps = -(-int(row["batch"]) // gpus)
    sent = (gpus - 1) / gpus * (micro_steps * 2 * (frozen + 2 * trained) + 4 * trained)
    exchange = sent / BANDWIDTH
    return {
        "gpus": gpus,
        "divided_gib": divided / gpus / GIB,
        "gathered_gib": gathered / GIB,
        "activations_gib": activations / GIB,
        "gib": (divided / gpus + gathered + activations) / GIB,
        "exchange_s": exchange,
        "step_s": micro_steps * float(row["micro_s"]) + float(row["update_s"]) / gpus + exchange,
    }


def show(rows: Sequence[Row]) -> None:
    """Print every row beside RoPE's of the same part and length, and what several GPUs would need."""
    stock = {(row["part"], row["tokens"]): row for row in rows if row["law"] == ROPE and row["status"] == "ok"}
    head = ("part", "law", "tokens", "micro-step s", "step s", "tokens/s", "of rope", "peak GiB")
    print("\n{:8} {:20} {:>8} {:>13} {:>9} {:>9} {:>8} {:>9}".format(*head))
    for row in rows:
        told = f"{row['part']:8} {row['law']:20} {row['tokens']:>8} "
        if row["status"] != "ok":
            print(f"{told}{row['status']:>13}")
            continue
        other = stock.get((row["part"], row["tokens"]))
        ratio = f"{float(row['tokens_per_s']) / float(other['tokens_per_s']):.3f}" if other else ""
        print(f"{told}{row['micro_s']:>13} {row['step_s']:>9} {row['tokens_per_s']:>9} {ratio:>8} {row['peak_gib']:>9}")
    for row in rows:
        if row["status"] == "ok" and row["part"] != LARGEST and float(row["peak_gib"]):
            for gpus in GPUS:
                print(told_of(row, fsdp(row, gpus)), flush=True)


def told_of(row: Row, found: Mapping[str, float]) -> str:
    return (
        f"on paper, {row['part']} under {row['law']} on {found['gpus']:.0f} GPUs (FSDP2): "
        f"{found['gib']:.1f} GiB each ({found['divided_gib']:.1f} divided, {found['gathered_gib']:.1f} gathered, "
        f"{found['activations_gib']:.1f} activations), {found['step_s']:.1f} s a step, of which at most "
        f"{found['exchange_s']:.1f} s exchange"
    )
