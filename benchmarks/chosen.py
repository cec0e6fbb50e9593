"""Attention whose queries choose their far keys against plain attention: prefill, decode, training, memory, growth.

    python benchmarks/chosen.py --out benchmarks/results          # needs a GPU
    python benchmarks/chosen.py --out DIR --parts variants --lengths 32768,131072   # other constants, one by one
    python benchmarks/chosen.py --out DIR --parts variants --variants "as it is" "3 stages"   # some of them

Vectors are such that neighbouring tokens are alike, as in a text: what a tile of queries must load is the union of
what they choose, and a column says how many times one query's choice it is. No time is reported for kernels that fail
their check against the specification in float64. Every row is a ratio against a peer in the same run. `--parts piece`
has the last 32k of a million tokens. Training is a forward and its backward; `mib` is the peak of both, with vectors
and gradients. Writes chosen-cuda.csv. Variants are prompts with one constant of the kernels changed, each with the time
of its kernels.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attention import Attention, graph_milliseconds, milliseconds, plain
from rpe3d import Law, make_law
from rpe3d.attention import Memory, chosen
from rpe3d.attention.problem import check
from rpe3d.attention.reference import attend
from rpe3d.testing import eager
from stamp import COLUMNS, stamp

HEADS, GROUPS, DIM = 32, 8, 128
NUMBERS = (
    "what",
    "far",
    "block",
    "tokens",
    "batch",
    "ms",
    "peer",
    "peer_ms",
    "speed",
    "goal",
    "union",
    "mib",
    "peer_mib",
)
MODEL: dict[str, Any] = {"pretrained": 8192, "context": 1048576, "head_dim": DIM, "rope_theta": 500000.0}
OWN: dict[str, Any] = {"chunk": 512, "window": 2560, "reach": 4096, "focus": 0, "fade": 0, "block": 16}
PREFILL = {16384: None, 32768: 1.3, 65536: None, 131072: 2.5, 262144: 4.0}
DECODE = {32768: None, 131072: 3.0}
TRAIN = [32768, 65536]
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "tiles of 16 queries": {"shape": (16, 1)},
    "tiles of 32 queries, no halves": {"shape": (32, 1)},
    "32 keys at a time": {"block_n": 32},
    "32 keys at a time, 3 stages": {"block_n": 32, "num_stages": 3},
    "3 stages": {"num_stages": 3},
    "8 warps": {"num_warps": 8},
    "groups from 1024 blocks on": {"select.DIRECT": 1024},
    "groups always": {"select.DIRECT": 0},
    "512 levels to a warp": {"select.PER_WARP": 512},
    "search in 128 registers": {"select.REGISTERS": 128},
    "search in 255 registers": {"select.REGISTERS": 255},
    "levels of 64 rows": {"select.ROWS": 64},
    "levels of 128 blocks at a time": {"select.COLUMNS": 128},
    "levels in 2 stages": {"select.STAGES": 2},
    "levels of 256 blocks to a program": {"select.SPAN": 256},
    "levels of 1024 blocks to a program": {"select.SPAN": 1024},
    "levels of 64 blocks to a program": {"select.SPAN": 64},
    "unions of 1024 words at a time": {"select.WORDS": 1024},
    "unions of 4096 words at a time": {"select.WORDS": 4096},
    "near keys in one kernel": {"near": "kernel"},
    "near keys in library calls": {"near": "calls"},
    "levels that stay in the cache": {"LEVELS": 2**25},
    "half as many levels": {"LEVELS": 2**27},
    "twice the room": {"SHARES": (7 / 160, 23 / 160)},
    "half the room": {"SHARES": (7 / 640, 23 / 640)},
}
"""Options of `Kernels`, and constants of `chosen` and `chosen.select`."""
Rows = list[dict[str, Any]]


def alike(heads: int, tokens: int, batch: int = 1) -> Tensor:
    """Return vectors of tokens that share most of their length with their neighbours: sums of 64, and some noise."""
    made = []
    for _ in range(heads):
        slow = torch.randn(batch, 1, tokens + 64, DIM, device="cuda").cumsum(2)
        near = (slow[:, :, 64:] - slow[:, :, :-64]) / 8
        made.append((near + 0.25 * torch.randn_like(near)).to(torch.bfloat16))
    return torch.cat(made, 1)


def relative(x: Tensor, truth: Tensor) -> Tensor:
    error: Tensor = (x.double() - truth).norm(dim=-1) / truth.norm(dim=-1)
    return error


def check_rows(law: Law, out: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: list[int], rows: int) -> None:
    """Hold rows of the very problem that is timed to the specification in float64, one key head of them.

    The error of almost all rows is that of rounding to bfloat16; one in a hundred may have chosen another block whose
    score is the same to rounding.
    """
    group, first = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    errors = []
    for start in starts:
        end = first + start + rows
        part = q[:1, :group, start : start + rows], k[:1, :1, :end], v[:1, :1, :end]
        exact = [x.double() for x in part]
        truth, _ = attend(check(exact[0], exact[1], exact[2], law, rotated=True))
        errors.append(relative(out[:1, :group, start : start + rows], truth).flatten())
    error = torch.cat(errors)
    most = float(error.quantile(0.99))
    print(f"check {k.shape[2]} x{q.shape[0]}: median {float(error.median()):.1e}, 99 % {most:.1e}", flush=True)
    if not most < 1e-2:
        raise SystemExit(f"rows of {k.shape[2]} tokens fail their check: {most:.2e}")


def peak(function: Callable[..., Any], *tensors: Tensor) -> float:
    """Return the most MiB that are allocated while a function runs, its arguments and result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = function(*tensors)
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() / 2**20


def union(made: chosen.Kernels, q: Tensor, k: Tensor) -> float:
    """Return how many times one query's blocks a tile of the last queries loads."""
    selection, last = made.selection, made._stretches(range(q.shape[2]), GROUPS, made.room)[-1]
    last = made._pieces(last, GROUPS, made.levels)[-1]
    unions = selection.room(q.shape[0], GROUPS, last, q.device)
    found = selection.summaries(k, selection.choosable(q.shape[2] - 1))
    work = [(last, [last])]
    selection.unite(unions, q, k, found[1], found[0], work, first=last.start, there=range(q.shape[2]))
    return float(unions.ends[..., 2].double().mean()) / selection.choice.most


def prefill(rows: Rows, law: Any, lengths: list[int]) -> None:
    for tokens in lengths:
        q, k, v = (alike(heads, tokens) for heads in (HEADS, GROUPS, GROUPS))
        made = chosen.Kernels(check(q, k, v, law, rotated=True))

        def ours(q: Tensor, k: Tensor, v: Tensor, made: chosen.Kernels = made) -> Tensor:
            return made(q, k, v, None)[0]

        check_rows(law, ours(q, k, v), q, k, v, [3100, tokens // 2 + 5, tokens - 40], 32)
        repeat = 8 if tokens < 100000 else 3
        peer = milliseconds(plain, q, k, v, repeat=repeat)
        mine = milliseconds(ours, q, k, v, repeat=repeat)
        extra = {"union": round(union(made, q, k), 2), "mib": peak(ours, q, k, v), "peer_mib": peak(plain, q, k, v)}
        add(rows, "prefill", law, tokens, 1, mine, "sdpa-cudnn", peer, PREFILL.get(tokens), **extra)


def piece(rows: Rows, law: Any) -> None:
    """Time the last queries of a million tokens, as a document is read in pieces; the peer sees all keys."""
    tokens, queries = 1048576, 32768
    q, k, v = alike(HEADS, queries), alike(GROUPS, tokens), alike(GROUPS, tokens)
    made = chosen.Kernels(check(q, k, v, law, rotated=True))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return made(q, k, v, None)[0]

    def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa(q, k, v, enable_gqa=True)

    check_rows(law, ours(q, k, v), q, k, v, [5, queries - 40], 32)
    mine, other = milliseconds(ours, q, k, v, repeat=3), milliseconds(peer, q, k, v, repeat=3)
    mib = {"mib": peak(ours, q, k, v), "peer_mib": peak(peer, q, k, v)}
    add(rows, f"prefill, the last {queries}", law, tokens, 1, mine, "sdpa-cudnn", other, None, **mib)


@contextmanager
def changed(constants: dict[str, Any]) -> Iterator[None]:
    """Have other constants in `chosen` and `chosen.select` for a while."""
    from rpe3d.attention.chosen import select

    owners: dict[str, Any] = {name: select if name.startswith("select.") else chosen for name in constants}
    before = {name: getattr(owner, name.removeprefix("select.")) for name, owner in owners.items()}

    def put(values: dict[str, Any]) -> None:
        for name, owner in owners.items():
            setattr(owner, name.removeprefix("select."), values[name])

    put(constants)
    try:
        yield
    finally:
        put(before)


def by_kernel(function: Callable[..., Any], *tensors: Tensor, repeat: int = 3) -> dict[str, float]:
    """Return the milliseconds that each kernel of a call takes, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeat):
            function(*tensors)
        torch.cuda.synchronize()
    times = {x.key: x.self_device_time_total / 1000 / repeat for x in profile.key_averages()}
    return dict(sorted(times.items(), key=lambda x: -x[1]))


def variants(rows: Rows, law: Any, lengths: list[int], names: Sequence[str]) -> None:
    for tokens in lengths:
        q, k, v = (alike(heads, tokens) for heads in (HEADS, GROUPS, GROUPS))
        peer = milliseconds(plain, q, k, v, repeat=5)
        mib = {"peer_mib": peak(plain, q, k, v)}
        for name in names:
            change = VARIANTS[name]
            constants = {key: x for key, x in change.items() if key.rsplit(".", maxsplit=1)[-1].isupper()}
            with changed(constants):
                options = {key: x for key, x in change.items() if key not in constants}
                made = chosen.Kernels(check(q, k, v, law, rotated=True), **options)

                def ours(q: Tensor, k: Tensor, v: Tensor, made: chosen.Kernels = made) -> Tensor:
                    return made(q, k, v, None)[0]

                check_rows(law, ours(q, k, v), q, k, v, [3100, tokens - 40], 32)
                mine = milliseconds(ours, q, k, v, repeat=5)
                extra = {"union": round(union(made, q, k), 2), "mib": peak(ours, q, k, v), **mib}
                add(rows, f"prefill, {name}", law, tokens, 1, mine, "sdpa-cudnn", peer, None, **extra)
                for kernel, ms in list(by_kernel(ours, q, k, v).items())[:9]:
                    print(f"    {ms:8.3f} {kernel[:100]}", flush=True)


def differentiated(attention: Attention, weight: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of attention, forward and backward."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in vectors]
        return torch.autograd.grad(attention(*leaves), leaves, weight)


def solved(law: Law, solve: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output of the specification, or of what is written plainly."""
    out: Tensor = solve(check(q, k, v, law, rotated=True))[0]
    return out


def check_gradients(law: Law, ours: Attention, q: Tensor, k: Tensor, v: Tensor, starts: list[int], rows: int) -> None:
    """Hold what some rows give to dq, dk and dv of the very problem that is timed to the specification in float64.

    One key head of them, by the 2x rule: in norm, at most twice the error of attention that is written plainly in
    bfloat16, and rounding.
    """
    group = q.shape[1] // k.shape[1]
    for start in starts:
        here, end = (slice(1), slice(group), slice(start, start + rows)), start + rows
        keys = (slice(1), slice(1), slice(end))
        weight = torch.zeros_like(q)
        weight[here] = torch.randn_like(weight[here])
        dq, dk, dv = differentiated(ours, weight, q, k, v)
        if dk[keys].shape[2] < dk.shape[2] and any(bool(x[:1, :1, end:].any()) for x in (dk, dv)):
            raise SystemExit(f"rows before {end} give a gradient to later keys")

        parts = weight[here], q[here], k[keys], v[keys]
        truths = differentiated(partial(solved, law, attend), *(x.double() for x in parts))
        plainly = differentiated(partial(solved, law, eager), *parts)
        for name, found, truth, usual in zip("qkv", (dq[here], dk[keys], dv[keys]), truths, plainly, strict=True):
            error, most = (float((x.double() - truth).norm() / truth.norm()) for x in (found, usual))
            print(f"check {k.shape[2]} from {start}: d{name} {error:.1e}, plainly {most:.1e}", flush=True)
            if not error <= 2 * (most + torch.finfo(q.dtype).eps):
                raise SystemExit(f"d{name} of {k.shape[2]} tokens fails its check: {error:.2e}, plainly {most:.2e}")


def train(rows: Rows, law: Any, lengths: list[int]) -> None:
    for tokens in lengths:
        q, k, v = (alike(heads, tokens) for heads in (HEADS, GROUPS, GROUPS))
        made = chosen.Kernels(check(q, k, v, law, rotated=True))

        def ours(q: Tensor, k: Tensor, v: Tensor, made: chosen.Kernels = made) -> Tensor:
            return made(q, k, v, None)[0]

        check_gradients(law, ours, q, k, v, [3100, tokens // 2 + 5, tokens - 40], 32)
        weight = torch.randn_like(q)
        mine, peer = (partial(differentiated, attention, weight) for attention in (ours, plain))
        times = [milliseconds(x, q, k, v, repeat=5) for x in (mine, peer)]
        extra = {"union": round(union(made, q, k), 2), "mib": peak(mine, q, k, v), "peer_mib": peak(peer, q, k, v)}
        add(rows, "forward+backward", law, tokens, 1, times[0], "sdpa-cudnn", times[1], None, **extra)
        del weight, mine, peer


def decode(rows: Rows, law: Any, trusted: bool) -> None:
    """One query against a cache in CUDA graphs, as decoding is deployed; each cache has its memory.

    trusted: nobody looks whether keys have changed, as where an engine owns its pages.
    """
    from rpe3d.attention.chosen.step import Step

    for tokens, goal in DECODE.items():
        for batch in (1, 8):
            sets = []
            for _ in range(4 if batch == 1 else 2):
                k, v = (alike(GROUPS, tokens, batch) for _ in range(2))
                sets.append([alike(HEADS, 1, batch), k, v])
            q, k, v = sets[0]
            step = Step(check(q, k, v, law, rotated=True), trusted=trusted)
            memories = {id(one[1]): Memory() for one in sets}

            def ours(q: Tensor, k: Tensor, v: Tensor, step: Any = step, memories: Any = memories) -> Tensor:
                out: Tensor = step(q, k, v, None, memories[id(k)])[0]
                return out

            check_rows(law, ours(q, k, v), q, k, v, [0], 1)
            backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
            peers = {b.name.lower(): graph_milliseconds(partial(plain, backend=b), sets) for b in backends}
            best = min(peers, key=lambda name: peers[name])
            mine = graph_milliseconds(ours, sets)
            kept = sum(memory.nbytes for memory in memories.values()) / len(sets)
            mib = {"mib": kept / 2**20, "peer_mib": 2 * sets[0][1].nbytes / 2**20}
            what = "decode, trusted" if trusted else "decode"
            add(rows, what, law, tokens, batch, mine, f"sdpa-{best}", peers[best], goal, **mib)


def decode_paged(rows: Rows, law: Any) -> None:
    """One query of each sequence over shuffled pages, with summaries kept by page, as vLLM runs it in CUDA graphs.

    A step is a launch that summarizes what was written, and three that score, choose and attend. The peer reads keys
    that lie in one piece.
    """
    from rpe3d.attention.chosen.paged import Steps

    for tokens, goal in {32768: None, 131072: 2.0}.items():
        for batch in (1, 8):
            pages, sets, scale = tokens // 16, [], DIM**-0.5
            device = torch.device("cuda", torch.cuda.current_device())
            steps = Steps(law, device, sequences=batch, heads=HEADS, groups=GROUPS, longest=tokens, page=16)
            starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
            lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
            paged = {}
            for _ in range(4 if batch == 1 else 2):
                k, v = (alike(GROUPS, tokens, batch) for _ in range(2))
                table = torch.randperm(batch * pages, device=device).view(batch, pages).int()
                caches = []
                for x in (k, v):
                    cache = torch.empty(batch * pages, 16, GROUPS, DIM, dtype=x.dtype, device=device)
                    cache[table.long()] = x.transpose(1, 2).unflatten(1, (pages, 16))
                    caches.append(cache)
                kept = steps.layout.empty(batch * pages, GROUPS, DIM, device)
                slots = (table.long()[:, :, None] * 16 + torch.arange(16, device=device)).flatten()
                steps.summarize(
                    caches[0], kept, pages=table, starts=starts * tokens, lengths=lengths, slots=slots, most=tokens
                )
                last = slots.view(batch, tokens)[:, -1].contiguous()
                sets.append([alike(HEADS, 1, batch), k, v])
                paged[id(k)] = (*caches, kept, table, last)

            def ours(q: Tensor, k: Tensor, v: Tensor, steps: Any = steps, paged: Any = paged) -> Tensor:
                keys, values, kept, table, last = paged[id(k)]
                where = {"pages": table, "lengths": lengths}  # noqa: B023 (called at once)
                steps.summarize(keys, kept, starts=starts, slots=last, most=1, **where)  # noqa: B023
                out = torch.empty_like(q)
                steps(q, keys, values, out, kept, scale=scale, **where)  # noqa: B023
                return out

            q, k, v = sets[0]
            check_rows(law, ours(q, k, v), q, k, v, [0], 1)
            backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
            peers = {b.name.lower(): graph_milliseconds(partial(plain, backend=b), sets) for b in backends}
            best = min(peers, key=lambda name: peers[name])
            mine = graph_milliseconds(ours, sets)
            mib = {"mib": steps.layout.nbytes(GROUPS, DIM) * batch * pages / 2**20, "peer_mib": 2 * k.nbytes / 2**20}
            add(rows, "decode, pages", law, tokens, batch, mine, f"sdpa-{best}", peers[best], goal, **mib)


def add(
    rows: Rows, what: str, law: Any, tokens: int, batch: int, ms: float, peer: str, peer_ms: float, goal: float | None,
    **extra: float,
) -> None:  # fmt: skip
    speed = peer_ms / ms
    values = [what, law.far, law.block, tokens, batch, round(ms, 4), peer, round(peer_ms, 4), round(speed, 3), goal]
    row = dict(zip(NUMBERS, values, strict=False)) | {name: round(x, 2) for name, x in extra.items()}
    rows.append(row)
    verdict = "" if goal is None else ("reached" if speed >= goal else "MISSED")
    print(
        f"{what:26} {tokens:7} x{batch} {ms:9.3f} {peer:22} {peer_ms:9.3f} {speed:6.3f} {verdict} {extra}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV")
    parser.add_argument("--far", type=int, default=128, help="blocks that a query chooses")
    parser.add_argument("--lengths", default=",".join(map(str, PREFILL)), help="tokens of prompts")
    parser.add_argument("--trained", default=",".join(map(str, TRAIN)), help="tokens of texts that are trained on")
    parser.add_argument("--parts", default="decode,prefill,train")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    given = parser.parse_args()
    torch.manual_seed(0)
    law = make_law("3d-rpe", **MODEL, **OWN, far=given.far)
    rows: Rows = []
    with torch.no_grad():
        for part in given.parts.split(","):
            if part == "decode":
                decode(rows, law, False)
                decode(rows, law, True)
                decode_paged(rows, law)
            elif part == "variants":
                variants(rows, law, [int(n) for n in given.lengths.split(",")], given.variants)
            elif part == "piece":
                piece(rows, law)
            elif part == "train":
                train(rows, law, [int(n) for n in given.trained.split(",")])
            else:
                prefill(rows, law, [int(n) for n in given.lengths.split(",")])
            torch.cuda.empty_cache()
            given.out.mkdir(parents=True, exist_ok=True)
            with (given.out / "chosen-cuda.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, (*COLUMNS, *NUMBERS))
                writer.writeheader()
                writer.writerows(stamp(cuda=True) | row for row in rows)


if __name__ == "__main__":
    main()
