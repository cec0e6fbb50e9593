"""A layer of vLLM without an engine, over its pages: a prompt in pieces, and steps of sequences of unlike lengths.

    python benchmarks/pages.py --out benchmarks/results                  # on a GPU, with vLLM's CUDA build
    python benchmarks/pages.py --parts prompts --piece 2048 --out DIR

`prompts` times FlashAttention's calls under a law (`rpe3d.serve.prompt`), and `rpe3d.attention` over gathered keys,
which runs where those do not, against one plain FlashAttention call for each piece, as vLLM makes it. All pieces of a
prompt count. The calls are checked first (`prompt.fault`), then both ways against each other. Writes pages-cuda.csv.
`steps` times the kernel of a decoding step against FlashAttention's, for heads of three models and batches of like and
unlike lengths; one key head is checked first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attention as layers
from attention import Rows, add, keep, law_named, milliseconds
from rpe3d import make_law
from rpe3d.attention import Shared, attention
from rpe3d.geometry import Law
from rpe3d.serve import prompt

GOAL = 0.95
SCALE = 0.09
PARTS = ["prompts", "steps"]
SHAPES = {"32 / 8 x 128": (32, 8, 128, 8192), "12 / 2 x 128": (12, 2, 128, 32768), "9 / 3 x 64": (9, 3, 64, 8192)}
"""Query heads, key heads, their size and pretrained positions: a large layer, Qwen2.5-Coder-1.5B, SmolLM2-135M."""
BATCHES = {
    "1 x 32k": [32768],
    "8 x 32k": [32768] * 8,
    "16 x 32k": [32768] * 16,
    "64 x 4k": [4096] * 64,
    "64 x 512": [512] * 64,
    "5 x 20k": [20000] * 5,
    "1 x 128k": [131072],
    "8 x 128k": [131072] * 8,
    "128k + 7 x 512": [131072] + [512] * 7,
    "64k + 63 x 512": [65536] + [512] * 63,
}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One prompt in shuffled pages, its queries, and the pieces in which they come."""

    query: Tensor
    keys: Tensor
    values: Tensor
    pages: Tensor
    pieces: list[range]

    @property
    def page(self) -> int:
        return self.keys.shape[1]

    def held(self, length: int) -> Tensor:
        """Return the pages of the first so many tokens."""
        return self.pages[: -(-length // self.page)]


def random_layer(
    tokens: int, piece: int, *, heads: int, groups: int, dim: int, page: int, dtype: torch.dtype, device: str
) -> Layer:
    """Return a layer of noise; keys and values lie beside each other, as vLLM has them."""
    cache = torch.randn(-(-tokens // page), groups, page, 2 * dim, dtype=dtype, device=device).transpose(1, 2)
    keys, values = cache.split(dim, dim=-1)
    return Layer(
        query=torch.randn(tokens, heads, dim, dtype=dtype, device=device),
        keys=keys,
        values=values,
        pages=torch.randperm(len(keys), dtype=torch.int32, device=device),
        pieces=[range(n, min(n + piece, tokens)) for n in range(0, tokens, piece)],
    )


def plain(given: Layer, flash: prompt.Flash) -> Callable[[], Tensor]:
    """One causal call for each piece, as vLLM runs plain RoPE."""
    calls = [_plain_call(given, piece) for piece in given.pieces]

    def run() -> Tensor:
        out = torch.empty_like(given.query)
        for piece, call in zip(given.pieces, calls, strict=True):
            _flash(flash, given, piece, call, out)
        return out

    return run


def by_flash(given: Layer, law: Law, flash: prompt.Flash, processors: int) -> Callable[[], Tensor]:
    """Calls for each region; pieces within plain RoPE are one plain call. Layers share what is prepared here."""
    ready: list[Any] = []
    for piece in given.pieces:
        far = piece.stop > law.exact_up_to
        pages = given.held(piece.stop)
        made = prompt.Prompt(law, piece, pages, given.page, flash, processors=processors) if far else None
        ready.append(made or _plain_call(given, piece))

    def run() -> Tensor:
        out = torch.empty_like(given.query)
        for piece, made in zip(given.pieces, ready, strict=True):
            rows = slice(piece.start, piece.stop)
            if isinstance(made, prompt.Prompt):
                made(given.query[rows], given.keys, given.values, out[rows], SCALE)
            else:
                _flash(flash, given, piece, made, out)
        return out

    return run


def gathered(given: Layer, law: Law) -> Callable[[], Tensor]:
    """`rpe3d.attention` for each piece, over keys and values that are read from their pages into one piece."""
    ready = [Shared() for _ in given.pieces]

    def run() -> Tensor:
        out = torch.empty_like(given.query)
        for piece, attend in zip(given.pieces, ready, strict=True):
            pages = given.held(piece.stop)
            k, v = (x[pages].flatten(0, 1)[: piece.stop].transpose(0, 1)[None] for x in (given.keys, given.values))
            q = given.query[piece.start : piece.stop].transpose(0, 1)[None]
            where: dict[str, Any] = {"query_positions": piece, "key_positions": range(piece.stop)}
            rows = slice(piece.start, piece.stop)
            out[rows] = attend(q, k, v, law, scale=SCALE, rotated=True, **where)[0][0].transpose(0, 1)
        return out

    return run


def _plain_call(given: Layer, piece: range) -> dict[str, Any]:
    """Return the arguments of one plain call, on the device."""
    numbers = torch.tensor([0, len(piece), piece.stop], dtype=torch.int32).to(given.query.device)
    table = given.held(piece.stop)[None]
    return {
        "cu_seqlens_q": numbers[:2], "seqused_k": numbers[2:], "block_table": table,
        "max_seqlen_q": len(piece), "max_seqlen_k": piece.stop, "causal": True,
    }  # fmt: skip


def _flash(flash: prompt.Flash, given: Layer, piece: range, call: dict[str, Any], out: Tensor) -> None:
    """Make one plain call, which writes its rows of `out`."""
    rows = slice(piece.start, piece.stop)
    flash(given.query[rows], given.keys, given.values, softmax_scale=SCALE, out=out[rows], **call)


def prompts(rows: Rows, piece: int) -> None:
    """Time whole prompts in pieces."""
    from rpe3d.serve.cuda import flash_attention

    shape: dict[str, Any] = {"heads": layers.HEADS, "groups": layers.GROUPS, "dtype": torch.bfloat16}
    for name in layers.LAWS:
        law = law_named(name)
        found = prompt.fault(law, layers.PAGE, **shape, device=torch.device("cuda"), flash=flash_attention)
        print(f"check prompts {name}: {'right' if found is None else found}", flush=True)
        if found is not None:
            raise SystemExit(f"calls of FlashAttention fail their check under {name}")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for tokens in (32768, 131072):
        given = random_layer(tokens, piece, dim=layers.DIM, page=layers.PAGE, device="cuda", **shape)
        peer = milliseconds(plain(given, flash_attention))
        for name in layers.LAWS:
            law = law_named(name)
            ours = {"flash": by_flash(given, law, flash_attention, processors), "gathered": gathered(given, law)}
            error = layers.relative(ours["flash"](), ours["gathered"]())
            print(f"check prompts {name} {tokens}: {error:.2e} between the two", flush=True)
            if not error < 1e-2:  # both round to bf16
                raise SystemExit(f"calls of FlashAttention fail their check under {name} at {tokens} tokens")
            for impl, run in ours.items():
                goal = GOAL if impl == "flash" else None
                add(rows, "prompt, paged", name, tokens, 1, impl, milliseconds(run), "flash attention", peer, goal)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One query of each of some sequences, of any lengths, in shuffled pages."""

    query: Tensor
    keys: Tensor
    values: Tensor
    pages: Tensor
    lengths: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.query, self.keys, self.values, self.pages, self.lengths]


def random_batch(
    lengths: list[int], *, heads: int, groups: int, dim: int, page: int, longest: int, dtype: torch.dtype, device: str
) -> Batch:
    """Return a batch of noise, with a block table for sequences of `longest` tokens."""
    counts = [-(-n // page) for n in lengths]
    table = torch.zeros(len(lengths), -(-longest // page), dtype=torch.int32)
    for row, some in zip(table, torch.randperm(sum(counts), dtype=torch.int32).split(counts), strict=True):
        row[: len(some)] = some
    cache = torch.randn(sum(counts), groups, page, 2 * dim, dtype=dtype, device=device).transpose(1, 2)
    keys, values = cache.split(dim, dim=-1)
    return Batch(
        query=torch.randn(len(lengths), heads, 1, dim, dtype=dtype, device=device),
        keys=keys,
        values=values,
        pages=table.to(device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def step_error(given: Batch, law: Law, out: Tensor) -> float:
    """Return how far the first key head of the longest sequence is from the specification in float64."""
    row, n = int(given.lengths.argmax()), int(given.lengths.max())
    heads, groups, page = given.query.shape[1], given.keys.shape[2], given.keys.shape[1]
    held = given.pages[row, : -(-n // page)].long()
    k, v = (x[held, :, 0].flatten(0, 1)[:n].double()[None, None] for x in (given.keys, given.values))
    some = slice(0, heads // groups)
    where: dict[str, Any] = {"query_positions": range(n - 1, n), "key_positions": range(n)}
    q = given.query[row : row + 1, some].double()
    truth, _ = attention(q, k, v, law, scale=SCALE, rotated=True, impl="reference", **where)
    return layers.relative(out[row : row + 1, some], truth)


def steps(rows: Rows) -> None:
    """Time decoding steps in CUDA graphs, over more keys than the L2 holds."""
    from rpe3d.attention.decode import paged
    from rpe3d.serve.cuda import flash_attention

    page, longest = layers.PAGE, 131072
    for shape, (heads, groups, dim, pretrained) in SHAPES.items():
        law = make_law("3d-rpe", pretrained=pretrained, context=longest, head_dim=dim)
        for called, lengths in BATCHES.items():
            shapes: dict[str, Any] = {"heads": heads, "groups": groups, "dim": dim, "page": page, "longest": longest}
            copies = 4 if sum(lengths) * groups * dim * 4 < 2e8 else 1
            batches = [random_batch(lengths, **shapes, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]
            starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda")

            def ours(*given: Tensor, law: Law = law) -> Tensor:
                q, k, v, pages, seen = given
                return paged.attend(q, k, v, law, pages=pages, lengths=seen, scale=SCALE)[0]

            def peer(*given: Tensor, starts: Tensor = starts) -> Tensor:
                q, k, v, pages, seen = given
                out: Tensor = flash_attention(
                    q[:, :, 0], k, v, softmax_scale=SCALE, out=torch.empty_like(q[:, :, 0]), cu_seqlens_q=starts,
                    seqused_k=seen, block_table=pages, max_seqlen_q=1, max_seqlen_k=longest, causal=True,
                )  # fmt: skip
                return out

            error = step_error(batches[0], law, ours(*batches[0].tensors))
            if not error < 1e-2:
                raise SystemExit(f"a step of {called} with {shape} heads fails its check: {error:.2e}")
            sets = [one.tensors for one in batches]
            times = [layers.graph_milliseconds(one, sets) for one in (ours, peer)]
            what = f"step of {called}, {shape}"
            add(rows, what, "3d-rpe", max(lengths), len(lengths), "paged", times[0], "flash attention", times[1], GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--piece", type=int, default=8192, help="tokens of a prompt in one forward of vLLM's")
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV")
    given = parser.parse_args()
    if given.piece < 1:
        parser.error(f"--piece is {given.piece}, and has to be 1 or more")
    if not torch.cuda.is_available():
        raise SystemExit("layers over pages are timed on a GPU")
    if find_spec("vllm") is None:
        raise SystemExit("vllm is not installed: install its CUDA build, whose FlashAttention is the peer")
    torch.manual_seed(0)
    given.out.mkdir(parents=True, exist_ok=True)
    rows: Rows = []
    for part in given.parts:
        if part == "prompts":
            prompts(rows, given.piece)
        else:
            steps(rows)
        keep(rows, given.out / "pages-cuda", cuda=True)


if __name__ == "__main__":
    main()
