"""A training step under a law against the same step with stock RoPE and SDPA, in one run: speed and memory.

    python benchmarks/train.py --model default --out benchmarks/results       # or --model FOLDER
    python benchmarks/train.py --model default --lengths 256 --repeat 1 --out DIR      # minutes on a CPU

A step is the forward, the next-token loss, the backward and AdamW on one window of random tokens: LoRA of rank 8 on q,
k, v and o, bf16 autocast on CUDA, fp32 elsewhere, as `rpe3d train` does it. The peers share their frozen weights and
take turns (A B C A B C ...); every number is a median. Nothing is timed before 3d-rpe has passed its check: on a text
within its window the loss of step 0 and its gradients are the stock model's, to twice its own rounding.
Writes train-<device>.csv.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import beside
from rpe3d import extend, law_of
from rpe3d.evaluate.texts import default_texts, tokenize
from rpe3d.models.load import load
from rpe3d.train.attention import TrainingAttention, training_attention
from rpe3d.train.lora import trainable
from rpe3d.train.settings import Settings

CUDA = torch.cuda.is_available()


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A way to train: a law, or stock RoPE with SDPA, and LongLoRA's attention."""

    law: str | None = None
    sparse: bool = False


PEERS = {
    "stock": Peer(),
    "3d-rpe": Peer(law="3d-rpe"),
    "linear": Peer(law="linear"),
    "s2 + linear": Peer(law="linear", sparse=True),
}
SETTINGS = {"checkpointing": True, "activations kept": False}
"""Whether a backward computes activations again."""


class Trained:
    """A peer with its adapter and optimizer."""

    def __init__(self, stock: Any, peer: Peer, context: int) -> None:
        frozen = {id(p): p for p in stock.parameters()}
        model = copy.deepcopy(stock, frozen)
        self.peer = peer
        if peer.law is not None:
            extend(model, peer.law, context=context)
        self.base = model
        torch.manual_seed(0)
        settings = Settings(kind="lm", model="default", context=context, data=["random tokens"])
        self.model = trainable(model, settings).train()
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=2e-5, betas=(0.9, 0.95))

    def loss(self, ids: Tensor, autocast: bool = CUDA) -> Tensor:
        """The next-token loss, with its backward done."""
        law = law_of(self.base)
        group = ids.shape[1] // 4 if self.peer.sparse else None
        with ExitStack() as stack:
            if law is not None and (group or law.needs_attention):
                stack.enter_context(training_attention(self.base, TrainingAttention(group=group)))
            with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
                loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        return loss.detach()

    def step(self, ids: Tensor) -> None:
        self.loss(ids)
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradients as they are at step 0."""
        loss = self.loss(ids)
        found = torch.cat([p.grad.flatten().double() for p in self.weights if p.grad is not None])
        self.optimizer.zero_grad()
        return loss.double(), found

    def checkpointing(self, on: bool) -> None:
        name = "activation" if hasattr(self.base, "activation_checkpointing_enable") else "gradient"  # from 5.23 on
        if on:
            getattr(self.base, f"{name}_checkpointing_enable")({"use_reentrant": False})
        else:
            getattr(self.base, f"{name}_checkpointing_disable")()


def check(stock: Any, peers: dict[str, Trained], text: Tensor) -> None:
    """Within its window 3d-rpe is stock RoPE, in loss and gradients, judged by a model in float32 or float64.

    On a text, not on random tokens: of those the gradients can hang on a single one, and bfloat16 says nothing of them.
    """
    law: Any = law_of(peers["3d-rpe"].base)
    near = text[:, : law.window + law.chunk]
    precise = copy.deepcopy(stock).to(torch.float32 if CUDA else torch.float64)
    precise.config._attn_implementation = "eager"  # every product written out: no kernel judges a kernel
    exact = Trained(precise, Peer(), law.context)
    with torch.no_grad():  # the same adapter, wherever each one's random start came from
        for mine, given in zip(exact.weights, peers["stock"].weights, strict=True):
            mine.copy_(given)
    truth = (exact.loss(near, autocast=False).double(), grads_of(exact))
    theirs, ours = peers["stock"].gradients(near), peers["3d-rpe"].gradients(near)
    for what, a, b, t in zip(("loss", "gradients"), ours, theirs, truth, strict=True):
        error, theirs_error = (float((x - t).norm() / t.norm()) for x in (a, b))
        most = min(0.1, 2 * (theirs_error + torch.finfo(torch.bfloat16 if CUDA else torch.float32).eps))
        told = f"{error:.2e}, stock's {theirs_error:.2e}, at most {most:.2e}"
        print(f"check {what} of step 0, {near.shape[1]} tokens: {told}", flush=True)
        if not error <= most:
            raise SystemExit(f"3d-rpe fails its check of the {what}: {error:.2e} > {most:.2e}")


def grads_of(trained: Trained) -> Tensor:
    found = torch.cat([p.grad.flatten().double() for p in trained.weights if p.grad is not None])
    trained.optimizer.zero_grad()
    return found


def timed(trained: Trained, ids: Tensor) -> tuple[float, float]:
    """Tokens per second of a step, and the peak of all memory in MiB (0 without a GPU)."""
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    trained.step(ids)
    if CUDA:
        torch.cuda.synchronize()
    rate = ids.shape[1] / (time.perf_counter() - start)
    return rate, torch.cuda.max_memory_allocated() / 2**20 if CUDA else 0.0


def measure(peers: dict[str, Trained], ids: Tensor, repeat: int) -> dict[str, list[float]]:
    """Median rate and peak of every peer."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for n in range(-1, repeat):  # the first round warms up
        for name, trained in peers.items():
            reading = timed(trained, ids)
            if n >= 0:
                found[name].append(reading)
    return {name: [statistics.median(column) for column in zip(*r, strict=True)] for name, r in found.items()}


def rows_of(model: str, setting: str, tokens: int, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Each peer's ratio to stock RoPE."""
    rows = []
    for name, ours in found.items():
        if name != "stock":
            names = {"model": model, "setting": setting, "peer": name}
            rows.append(beside.row(names, tokens, ours, found["stock"], goal=name == "3d-rpe"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="`default`, or a folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV")
    parser.add_argument("--lengths", default="32768", help="tokens of a window")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--peers", default=",".join(PEERS), help="some of the peers; stock and 3d-rpe always")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    given = parser.parse_args()
    lengths = [int(length) for length in given.lengths.split(",")]
    torch.manual_seed(0)
    loaded = load(given.model)
    stock: Any = loaded.model
    stock.config._attn_implementation = "sdpa"
    context = max(4 * int(stock.config.max_position_embeddings), *lengths, 0)
    names = [
        "stock",
        "3d-rpe",
        *(name for name in PEERS if name in given.peers.split(",") and name not in ("stock", "3d-rpe")),
    ]
    peers = {name: Trained(stock, PEERS[name], context) for name in names}
    ids = torch.randint(3, stock.config.vocab_size, (1, max(lengths)), device=stock.device)
    called = beside.called(stock)
    check(stock, peers, tokenize(loaded.tokenizer, default_texts()[0]).ids[None].to(stock.device))
    rows: list[dict[str, Any]] = []
    for length in lengths:
        for setting in given.settings.split(","):
            for trained in peers.values():
                trained.checkpointing(SETTINGS[setting])
            try:
                rows += rows_of(called, setting, length, measure(peers, ids[:, :length], given.repeat))
            except torch.OutOfMemoryError as error:
                print(f"{setting} at {length} failed: {str(error).strip().splitlines()[0]}", file=sys.stderr)
    beside.write(rows, given.out, "train", given.model)


if __name__ == "__main__":
    main()
