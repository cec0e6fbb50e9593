"""Attention under a law against plain attention, in one run: prefill, training, decode, paging, memory, growth.

    python benchmarks/attention.py --out benchmarks/results          # CUDA, or the CPU table where there is no GPU

No time is reported for an implementation that fails its check (error at most twice that of plain attention). Every
row is a ratio against a peer in the same run. Writes attention-<device>.csv and .png.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from rpe3d import Law, make_law
from rpe3d.attention import Shared, attention, blocked
from rpe3d.attention.problem import Prepared
from rpe3d.attention.problem import check as problem
from stamp import COLUMNS, stamp

Rows = list[dict[str, Any]]
Attention = Callable[..., Tensor]
NUMBERS = ("what", "law", "tokens", "batch", "impl", "ms", "peer", "peer_ms", "speed", "goal")
MODEL: dict[str, Any] = {"pretrained": 8192, "context": 262144, "head_dim": 128, "rope_theta": 500000.0}
LAWS: dict[str, dict[str, Any]] = {
    "3d-rpe": {"chunk": 512, "window": 2560, "reach": 4096, "focus": 1.0, "fade": 0.25},
    "dca": {},
}
PAGE = 16
HEADS, GROUPS, DIM = 32, 8, 128


def law_named(name: str, **model: Any) -> Law:
    return make_law(name, **(MODEL | LAWS[name] | model))


def vectors(
    tokens: int, *, queries: int | None = None, batch: int = 1, heads: int = HEADS, dim: int = DIM
) -> list[Tensor]:
    """Fresh random q, k, v in bf16 on the GPU."""
    shapes = [(batch, heads, queries or tokens, dim)] + [(batch, heads // 4, tokens, dim)] * 2
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def under(law: Law, impl: str = "blocked", **options: Any) -> Attention:
    """Return attention under a law, of vectors that stock RoPE has rotated, as a function of q, k and v.

    Library calls are prepared once for vectors that look alike, as for the layers of a model.
    """
    if impl != "blocked":
        return lambda q, k, v: attention(q, k, v, law, rotated=True, impl=impl, **options)[0]
    made: dict[Any, Prepared] = {}

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kind = tuple((x.shape, x.stride(), x.dtype, x.requires_grad) for x in (q, k, v))
        if kind not in made:
            made[kind] = blocked.prepare(problem(q, k, v, law, rotated=True, **options))
        return made[kind](q, k, v, None)[0]

    return layer


def milliseconds(function: Callable[..., Any], *tensors: Tensor, repeat: int = 15) -> float:
    """Median by CUDA events, calls queued one behind the other as the layers of a model are: no waiting between."""
    for _ in range(3):
        function(*tensors)
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    events[0].record()
    for event in events[1:]:
        function(*tensors)
        event.record()
    torch.cuda.synchronize()
    times: list[float] = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times)


def graph_milliseconds(function: Attention, sets: list[list[Tensor]], repeat: int = 30) -> float:
    """Median of a CUDA graph's replays, over sets of tensors larger than the L2 together: device time alone."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for tensors in sets:
            function(*tensors)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for tensors in sets:
                function(*tensors)
        ms = milliseconds(graph.replay, repeat=repeat)
    return ms / len(sets)


def plain(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = SDPBackend.CUDNN_ATTENTION) -> Tensor:
    """The machine's own causal attention; a single query sees all keys."""
    with sdpa_kernel(backend):
        return sdpa(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)


def chunkllama(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DCA the way its authors run it: flash calls per chunk, results stacked and merged by torch (forward only)."""
    flash, c = torch.ops.aten._scaled_dot_product_flash_attention, law_named("dca").to_dict()["chunk"]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    outs = [flash(q[:, :, :c], k[:, :, :c], v[:, :, :c], 0.0, True)[0]]
    for start in range(c, q.shape[2], c):
        here = slice(start, min(start + c, q.shape[2]))
        spans = [(here, True), (slice(start - c, start), False), (slice(0, start - c), False)]
        parts = [flash(q[:, :, here], k[:, :, s], v[:, :, s], 0.0, causal) for s, causal in spans if s.start < s.stop]
        lse = torch.stack([part[1] for part in parts])
        weight = torch.softmax(lse, dim=0).to(q.dtype)
        outs.append((torch.stack([part[0] for part in parts]) * weight[..., None]).sum(0))
    return torch.cat(outs, dim=2)


def relative(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth.double()).norm() / truth.double().norm())


def check(name: str, tokens: int, dim: int) -> None:
    """Forward and gradients against the float64 specification, as good as plain attention's twice over.

    Plain attention goes first: PyTorch keeps cuDNN's plans, and ours must not be run by one of plain attention's.
    """
    law = law_named(
        name,
        pretrained=1024,
        context=65536,
        head_dim=dim,
        **({"chunk": 128, "window": 640, "reach": 1024} if name == "3d-rpe" else {}),
    )
    q, k, v = (x.requires_grad_() for x in vectors(tokens, heads=8, dim=dim))
    weight = torch.randn_like(q)
    rope = make_law("rope", **MODEL | {"head_dim": dim})

    def errors(function: Callable[..., Tensor], truth: Callable[..., Tensor]) -> list[float]:
        results = []
        for f, dtype in ((function, torch.bfloat16), (truth, torch.float64)):
            leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
            out = f(*leaves)
            results.append([out.detach(), *torch.autograd.grad((out * weight.to(dtype)).sum(), leaves)])
        return [relative(a, b) for a, b in zip(*results, strict=True)]

    theirs = errors(plain, under(rope, "reference"))
    ours = errors(under(law), under(law, "reference"))
    what = f"{name} {tokens} x {dim}"
    print(f"check {what}: ours {[f'{e:.2e}' for e in ours]}, plain {[f'{e:.2e}' for e in theirs]}", flush=True)
    for a, b in zip(ours, theirs, strict=True):
        if not a <= 2 * b:
            raise SystemExit(f"failed: {what}: {a:.2e} > 2 x {b:.2e}")


def check_decode(law: Law, q: Tensor, k: Tensor, v: Tensor, *, library: Attention = plain) -> None:
    """A decoding step on the very problem that is timed, a sequence and a head group at a time, in float64."""
    out, _ = attention(q, k, v, law, rotated=True, impl="decode")
    peer = library(q, k, v)
    rope = make_law("rope", **MODEL | {"head_dim": q.shape[3]})
    group = q.shape[1] // k.shape[1]
    ours, theirs = [], []
    for b in {0, q.shape[0] - 1}:
        for g in (0, k.shape[1] - 1):
            heads = slice(g * group, (g + 1) * group)
            part = [x[b : b + 1, h].double() for x, h in ((q, heads), (k, slice(g, g + 1)), (v, slice(g, g + 1)))]
            truths = [under(each, "reference")(*part) for each in (law, rope)]
            ours.append(relative(out[b : b + 1, heads], truths[0]))
            theirs.append(relative(peer[b : b + 1, heads], truths[1]))
    verdict = f"decode {law.name} {k.shape[2]} x{q.shape[0]}: {max(ours):.2e}, plain {max(theirs):.2e}"
    print(f"check {verdict}", flush=True)
    if not max(ours) <= 2 * max(theirs):
        raise SystemExit(f"failed: {verdict}")


def check_long(name: str, tokens: int) -> None:
    """Rows of the very problem that is timed, against the specification in float64."""
    law = law_named(name)
    q, k, v = vectors(tokens)
    out, _ = attention(q, k, v, law, rotated=True, impl="blocked")
    for start in torch.randint(0, tokens - 8, (4,)).tolist():
        rows, keys = range(start, start + 8), range(start + 8)
        exact = under(law, "reference", query_positions=rows, key_positions=keys)
        truth = exact(*(x.double() for x in (q[:, :, start : start + 8], k[:, :, : start + 8], v[:, :, : start + 8])))
        error = relative(out[:, :, start : start + 8], truth)
        if not error < 1e-2:
            raise SystemExit(f"{name} fails its check at rows {rows} of {tokens}: {error:.2e}")


def prefill(rows: Rows) -> None:
    for tokens, goals in ((32768, (0.98, 1.7)), (131072, (1.03, 1.7))):
        q, k, v = vectors(tokens)
        repeat = 15 if tokens < 100000 else 6
        peer = milliseconds(plain, q, k, v, repeat=repeat)
        loop = milliseconds(chunkllama, q, k, v, repeat=repeat)
        for name in LAWS:
            check_long(name, tokens)
            law = law_named(name)
            ours = milliseconds(under(law), q, k, v, repeat=repeat)
            add(rows, "prefill", name, tokens, 1, "blocked", ours, "sdpa-cudnn", peer, goals[0])
            add(rows, "prefill", name, tokens, 1, "blocked", ours, "chunkllama-loop", loop, goals[1])
        again = milliseconds(plain, q, k, v, repeat=repeat)
        add(rows, "prefill", "rope", tokens, 1, "sdpa-cudnn again", again, "sdpa-cudnn", peer, None)


def training(rows: Rows, tokens: int = 32768) -> None:
    q, k, v = (x.requires_grad_() for x in vectors(tokens))
    do = torch.randn_like(q)

    def step(function: Attention) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(q, k, v), (q, k, v), do)

    peer = milliseconds(step(plain), repeat=8)
    for name in LAWS:
        ours = milliseconds(step(under(law_named(name))), repeat=8)
        add(rows, "forward+backward", name, tokens, 1, "blocked", ours, "sdpa-cudnn", peer, 0.92)


def decoding(rows: Rows) -> None:
    """One query against a cache. In CUDA graphs, as decoding is deployed; and eager, where the host's time counts."""
    clocks: dict[str, tuple[float | None, Callable[[Attention, list[list[Tensor]]], float]]] = {
        "decode": (1.0, graph_milliseconds),
        "decode, eager": (None, lambda f, sets: milliseconds(f, *sets[0], repeat=100)),
    }
    for batch in (1, 8):
        for tokens in (32768, 131072):
            sets = [vectors(tokens, queries=1, batch=batch) for _ in range(4 if batch == 1 else 2)]
            for name in LAWS:
                check_decode(law_named(name), *sets[0])
            for what, (goal, clock) in clocks.items():
                backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
                peers = {b.name.lower(): clock(partial(plain, backend=b), sets) for b in backends}
                best = min(peers, key=lambda name: peers[name])
                for name in LAWS:
                    ours = clock(under(law_named(name), "decode"), sets)
                    add(rows, what, name, tokens, batch, "decode", ours, f"sdpa-{best}", peers[best], goal)


def in_pages(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Contiguous keys [b, g, s, d] in shuffled pages, as vLLM has them: [pages, page, g, d], keys beside values."""
    b, g, s, d = k.shape
    table = torch.randperm(b * s // PAGE, device=k.device, dtype=torch.int32).view(b, -1)
    cache = torch.empty(b * s // PAGE, g, PAGE, 2 * d, dtype=k.dtype, device=k.device)
    for part, x in ((slice(0, d), k), (slice(d, None), v)):
        cache[table.long(), :, :, part] = x.unflatten(2, (-1, PAGE)).permute(0, 2, 1, 3, 4)
    keys, values = cache.transpose(1, 2).split(d, dim=-1)
    return keys, values, table, torch.full((b,), s, dtype=torch.int32, device=k.device)


def paged(law: Law, q: Tensor, k: Tensor, v: Tensor, pages: Tensor, lengths: Tensor) -> Tensor:
    """A decoding step over pages."""
    from rpe3d.attention.decode import paged as paged_kernel

    return paged_kernel.attend(q, k, v, law, pages=pages, lengths=lengths, scale=q.shape[3] ** -0.5)[0]


def paging(rows: Rows) -> None:
    """A decoding step over pages, against plain decode of contiguous keys. Right at two lengths first."""
    for batch, tokens in ((1, 4096), (8, 4096), (1, 131072), (8, 131072)):
        sets = [vectors(tokens, queries=1, batch=batch) for _ in range(4 if batch == 1 else 2)]
        pages = [[q, *in_pages(k, v)] for q, k, v in sets]
        for name in LAWS:
            law = law_named(name)
            check_decode(law, *sets[0])
            error = relative(paged(law, *pages[0]), under(law, "decode")(*sets[0]))
            print(f"check paged {name} {tokens} x{batch}: {error:.2e} from the decode of contiguous keys", flush=True)
            if not error < 5e-3:  # both round to bf16
                raise SystemExit(f"paged {name} fails its check at {tokens} tokens: {error:.2e}")
        if tokens < 65536:
            continue
        backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
        peers = {b.name.lower(): graph_milliseconds(partial(plain, backend=b), sets) for b in backends}
        best = min(peers, key=lambda name: peers[name])
        for name in LAWS:
            ours = graph_milliseconds(partial(paged, law_named(name)), pages)
            add(rows, "decode, paged", name, tokens, batch, "paged", ours, f"sdpa-{best}", peers[best], 0.9)


def memory(rows: Rows, tokens: int = 131072) -> None:
    def peak(function: Callable[..., Any]) -> float:
        q, k, v = vectors(tokens)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        result = function(q, k, v)
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() / 2**20

    peer = peak(plain)
    for name in LAWS:
        ours = peak(under(law_named(name)))
        add(rows, "peak MiB (not ms)", name, tokens, 1, "blocked", ours, "sdpa-cudnn", peer, 1 / 1.10)


def growth(rows: Rows) -> None:
    law = law_named("3d-rpe")
    for tokens in (16384, 32768, 65536, 131072, 262144):
        q, k, v = vectors(tokens)
        repeat = 6 if tokens < 100000 else 3
        peer = milliseconds(plain, q, k, v, repeat=repeat)
        torch.cuda.reset_peak_memory_stats()
        ours = milliseconds(under(law), q, k, v, repeat=repeat)
        extra = torch.cuda.max_memory_allocated() / 2**20
        add(rows, f"growth ({extra:.0f} MiB)", "3d-rpe", tokens, 1, "blocked", ours, "sdpa-cudnn", peer, None)


def on_cpu(rows: Rows) -> None:
    """fp32, 9 query heads, 3 key heads, head dimension 64 (SmolLM2-135M's)."""
    grouped = partial(sdpa, enable_gqa=True)
    with torch.no_grad():
        for tokens in (8192, 16384):
            q, k, v = (torch.randn(1, h, tokens, 64) for h in (9, 3, 3))
            for name in LAWS:
                law = law_named(name, head_dim=64)
                ours, peer = alternately([under(law), partial(grouped, is_causal=True)], [[q, k, v]], 4)
                add(rows, "prefill", name, tokens, 1, "blocked", ours, "sdpa-cpu", peer, 1 / 1.15)
        for tokens in (1024, 8192, 32768):
            # Six layers' vectors, as many as no cache holds.
            sets = [[torch.randn(1, h, n, 64) for h, n in ((9, 1), (3, tokens), (3, tokens))] for _ in range(6)]
            q, k, v = sets[0]
            for name in LAWS:
                law = law_named(name, head_dim=64)
                check_decode(law, q, k, v, library=grouped)
                layer, call, peer = alternately(
                    [partial(_layer, Shared(), law), under(law, "decode"), grouped], sets, 60
                )
                add(rows, "decode, a layer", name, tokens, 1, "decode", layer, "sdpa-cpu", peer, 0.85)
                add(rows, "decode, one call", name, tokens, 1, "decode", call, "sdpa-cpu", peer, None)


def _layer(shared: Shared, law: Law, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return a layer of a model, which shares its step with the others."""
    out: Tensor = shared(q, k, v, law, rotated=True)[0]
    return out


def alternately(functions: list[Attention], sets: list[list[Tensor]], repeat: int) -> list[float]:
    """The least milliseconds of each, called in turn: a busy machine disturbs all of them alike."""
    least, turns = [float("inf")] * len(functions), itertools.cycle(sets)
    for _ in range(repeat):
        for i, function in enumerate(functions):
            tensors = next(turns)  # not those that the function before has brought into the cache
            start = time.perf_counter()
            function(*tensors)
            least[i] = min(least[i], 1000 * (time.perf_counter() - start))
    return least


def add(
    rows: Rows,
    what: str,
    law: str,
    tokens: int,
    batch: int,
    impl: str,
    ms: float,
    peer: str,
    peer_ms: float,
    goal: float | None,
) -> None:
    speed = peer_ms / ms
    values = [what, law, tokens, batch, impl, round(ms, 4), peer, round(peer_ms, 4), round(speed, 3), goal]
    rows.append(dict(zip(NUMBERS, values, strict=True)))
    verdict = "" if goal is None else ("reached" if speed >= goal else "MISSED")
    print(
        f"{what:20} {law:8} {tokens:7} x{batch} {impl:10} {ms:9.3f}  {peer:24} {peer_ms:9.3f}  {speed:6.3f} {verdict}",
        flush=True,
    )


def keep(rows: Rows, stem: Path, *, cuda: bool) -> None:
    """All rows so far as the CSV."""
    with stem.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, (*COLUMNS, *NUMBERS))
        writer.writeheader()
        writer.writerows(stamp(cuda=cuda) | row for row in rows)


def draw(rows: Rows, path: Path) -> None:
    """Speed relative to the peer, a bar per row, with the goal marked."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row["goal"] is not None]
    figure = Figure(figsize=(9, 0.34 * len(shown) + 1), dpi=150, layout="constrained")
    axes = figure.subplots()
    labels = [f"{r['what']} {r['law']} {r['tokens'] // 1024}k x{r['batch']} / {r['peer']}" for r in shown]
    axes.barh(labels, [row["speed"] for row in shown], color="#0072B2")
    for i, row in enumerate(shown):
        axes.plot([row["goal"]] * 2, [i - 0.4, i + 0.4], color="#D55E00", linewidth=2)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("speed relative to the peer in the same run (orange: goal)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV and the plot")
    parser.add_argument("--parts", default="prefill,training,decoding,paging,memory,growth", help="CUDA parts to run")
    parser.add_argument("--cpu", action="store_true", help="the CPU table, even where there is a GPU")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: Rows = []
    cuda = torch.cuda.is_available() and not arguments.cpu
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"attention-{'cuda' if cuda else 'cpu'}"
    if cuda:
        for name in LAWS:
            for tokens, dim in ((700, 64), (700, DIM), (1024, DIM), (4000, DIM), (5000, DIM)):
                check(name, tokens, dim)
        parts = {f.__name__: f for f in (prefill, training, decoding, paging, memory, growth)}
        for part in arguments.parts.split(","):
            parts[part](rows)
            torch.cuda.empty_cache()
            keep(rows, stem, cuda=True)
    else:
        on_cpu(rows)
        keep(rows, stem, cuda=False)
    draw(rows, stem.with_suffix(".png"))


if __name__ == "__main__":
    main()
