"""Speed of the fused rotation against Hugging Face's and against a copy, on a GPU.

    PYTHONPATH=src python benchmarks/rotary.py --out DIR          # writes DIR/rotary.csv, prints a table
    PYTHONPATH=src python benchmarks/rotary.py --sweep            # tile shapes instead

32 query heads, 8 key heads, head dim 128, bf16, batch 1. Layout "hf" is [b, t, h, d] in memory, seen as
[b, h, t, d], as Hugging Face's attention makes it; "contiguous" is [b, h, t, d]. The copy limit clones what the
direction reads: no rotation that writes new tensors can be faster. Every implementation allocates its outputs.
torch.compile of the bare function makes the gradients at its boundary contiguous first, and that is timed too.

Nothing is timed that is not right: on fresh random data, the largest error against complex128 must be at most
twice that of Hugging Face's eager function, forward and backward.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from rpe3d.rotation import cos_sin, kernel, rotate
from stamp import COLUMNS, stamp

DEVICE = "cuda"
Q_HEADS, K_HEADS, DIM = 32, 8, 128
LAYOUTS = ("hf", "contiguous")
DIRECTIONS = ("forward", "backward", "forward+backward")
IMPLS = ("ours", "hf-eager", "hf-compile", "copy")
NUMBERS = ("triton", "layout", "direction", "tokens", "impl", "ms", "speed_vs_copy", "speed_vs_hf_eager")
Pair = tuple[Tensor, Tensor]
Function = Callable[[Tensor, Tensor], Pair]
hugging_face: Callable[..., Pair] = apply_rotary_pos_emb


@dataclass(frozen=True)
class Case:
    """One set of inputs, and every way to turn them."""

    layout: str
    tokens: int
    inputs: Pair
    grads: Pair
    angles: Tensor
    functions: dict[str, Function]


def make_case(layout: str, tokens: int) -> Case:
    """Fresh random inputs. Hugging Face's function gets the table its models make: bf16, one entry per dimension."""

    def heads(count: int) -> Tensor:
        x = torch.randn(1, tokens, count, DIM, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
        return x if layout == "hf" else x.contiguous()

    frequencies = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64, device=DEVICE) / DIM)
    angles = torch.arange(tokens, dtype=torch.float64, device=DEVICE)[:, None] * frequencies
    cos, sin = cos_sin(angles)
    wide = torch.cat((angles, angles), -1)[None]
    hf_cos, hf_sin = wide.cos().bfloat16(), wide.sin().bfloat16()
    torch.compiler.reset()  # each case is compiled for its own shape, never for dynamic ones
    compiled = torch.compile(hugging_face, dynamic=False)

    def ours(q: Tensor, k: Tensor) -> Pair:
        q, turned = rotate(q, k, cos, sin, impl="triton")
        assert turned is not None
        return q, turned

    functions: dict[str, Function] = {
        "ours": ours,
        "hf-eager": lambda q, k: hugging_face(q, k, hf_cos, hf_sin),
        "hf-compile": lambda q, k: compiled(q, k, hf_cos, hf_sin),
    }
    inputs, grads = ((heads(Q_HEADS), heads(K_HEADS)) for _ in range(2))
    return Case(layout, tokens, inputs, grads, angles, functions)


def run(function: Function, case: Case) -> tuple[Pair, Pair]:
    """Outputs and gradients of one implementation."""
    q, k = (x.detach().requires_grad_() for x in case.inputs)
    out = function(q, k)
    return out, torch.autograd.grad(out, (q, k), case.grads)  # type: ignore[return-value]


def error(got: Tensor, x: Tensor, angles: Tensor, sign: int) -> float:
    """Largest |got - x e^{±i angle}|, the truth in complex128."""
    pairs = DIM // 2
    turn = torch.polar(torch.ones_like(angles), sign * angles)
    exact = torch.view_as_real(torch.complex(x[..., :pairs].double(), x[..., pairs:].double()) * turn)
    return max((got[..., i * pairs : (i + 1) * pairs] - exact[..., i]).abs().max().item() for i in (0, 1))


def errors(function: Function, case: Case) -> list[float]:
    """Of q, k and their gradients. A NaN compares as an error."""
    out, grads = run(function, case)
    forward = [error(y, x, case.angles, 1) for y, x in zip(out, case.inputs, strict=True)]
    return forward + [error(y, x, case.angles, -1) for y, x in zip(grads, case.grads, strict=True)]


def gate(case: Case) -> list[str]:
    """The implementations that may be timed. Ours runs on memory full of NaN, and must compile to one graph."""
    limit = errors(case.functions["hf-eager"], case)
    right = ["hf-eager"]
    for name in ("ours", "hf-compile"):
        torch.use_deterministic_algorithms(name == "ours")  # which fills fresh memory with NaN
        found = errors(case.functions[name], case)
        torch.use_deterministic_algorithms(False)
        good = all(mine <= 2 * theirs for mine, theirs in zip(found, limit, strict=True))
        verdict = "right" if good else "WRONG, not timed"
        numbers = " ".join(f"{mine:.2g}/{theirs:.2g}" for mine, theirs in zip(found, limit, strict=True))
        print(f"{case.layout} {case.tokens} {name}: {verdict}; error/eager of q k dq dk: {numbers}", file=sys.stderr)
        if good:
            right.append(name)
    return right


def check_one_graph(case: Case) -> bool:
    """torch.compile(fullgraph=True) of ours gives the same bits."""
    compiled = torch.compile(case.functions["ours"], fullgraph=True)
    plain, graph = run(case.functions["ours"], case), run(compiled, case)
    same = all(torch.equal(a, b) for x, y in zip(plain, graph, strict=True) for a, b in zip(x, y, strict=True))
    print(f"{case.layout} compiled to one graph: {'same bits' if same else 'DIFFERENT bits'}", file=sys.stderr)
    return same


def calls(name: str, case: Case) -> dict[str, Callable[[], object]]:
    """What is timed for each direction."""
    if name == "copy":
        once = [x.clone for x in case.inputs]
        back = [x.clone for x in case.grads]
        return {
            "forward": lambda: [f() for f in once],
            "backward": lambda: [f() for f in back],
            "forward+backward": lambda: [f() for f in once + back],
        }
    function = case.functions[name]
    leaves = tuple(x.detach().requires_grad_() for x in case.inputs)
    out = function(*leaves)
    return {
        "forward": lambda: function(*case.inputs),
        "backward": lambda: torch.autograd.grad(out, leaves, case.grads, retain_graph=True),
        "forward+backward": lambda: torch.autograd.grad(function(*leaves), leaves, case.grads),
    }


def milliseconds(call: Callable[[], object], *, graph: bool = True, samples: int = 20, repeats: int = 4) -> list[float]:
    """Device time of one call. From replays of a CUDA graph of a few, what the host does between launches is left out.

    On the current stream, which must be that of the forward whose backward is called. Inputs are larger than the L2.
    """
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    if graph:
        with torch.cuda.graph(captured, stream=torch.cuda.current_stream()):
            for _ in range(repeats):
                call()
        captured.replay()
    marks = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        if graph:
            captured.replay()
        else:
            for _ in range(repeats):
                call()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / repeats for start, end in marks]


def copy_milliseconds(call: Callable[[], object]) -> list[float]:
    """The limit, so the faster of two ways: large copies are slower inside a graph, small ones outside it."""
    return min(milliseconds(call), milliseconds(call, graph=False), key=statistics.median)


def compare(tokens: list[int]) -> tuple[list[dict[str, object]], bool]:
    """Rows of the CSV, and whether every implementation was right."""
    rows: list[dict[str, object]] = []
    good, noise = True, 0.0
    for layout in LAYOUTS:
        for count in tokens:
            case = make_case(layout, count)
            names = [*gate(case), "copy"]
            good &= len(names) == len(IMPLS)
            if count == min(tokens):
                good &= check_one_graph(case)
            timed = {name: calls(name, case) for name in IMPLS if name in names}
            for direction in DIRECTIONS:
                clocks = {name: copy_milliseconds if name == "copy" else milliseconds for name in timed}
                rounds = [{n: clocks[n](c[direction]) for n, c in timed.items()} for _ in range(2)]
                ms = {name: statistics.median(rounds[0][name] + rounds[1][name]) for name in timed}
                for name in timed:
                    twice = [statistics.median(r[name]) for r in rounds]
                    noise = max(noise, abs(twice[0] - twice[1]) / ms[name])
                    rows.append(
                        {
                            "triton": triton.__version__,
                            "layout": layout,
                            "direction": direction,
                            "tokens": count,
                            "impl": name,
                            "ms": round(ms[name], 4),
                            "speed_vs_copy": round(ms["copy"] / ms[name], 3),
                            "speed_vs_hf_eager": round(ms["hf-eager"] / ms[name], 2),
                        }
                    )
            del case, timed
    print(f"largest difference between two rounds of the same thing: {noise:.1%}", file=sys.stderr)
    return rows, good


def table(rows: list[dict[str, object]]) -> str:
    """Milliseconds side by side; then the speed of ours (and of torch.compile) relative to the copy limit."""
    lines = [
        f"{'layout':10} {'direction':16} {'tokens':>7}" + "".join(f"{n:>11}" for n in IMPLS) + "  ours/copy comp/copy"
    ]
    groups: dict[tuple[object, ...], dict[object, dict[str, object]]] = {}
    for row in rows:
        groups.setdefault((row["layout"], row["direction"], row["tokens"]), {})[row["impl"]] = row
    for (layout, direction, tokens), by in groups.items():
        ms = "".join(f"{by[n]['ms'] if n in by else '-':>11}" for n in IMPLS)
        speeds = "".join(f"{by[n]['speed_vs_copy'] if n in by else '-':>10}" for n in ("ours", "hf-compile"))
        lines.append(f"{layout:10} {direction:16} {tokens:>7}{ms} {speeds}")
    return "\n".join(lines)


def sweep(tokens: int) -> None:
    """Every tile that gives each thread one or two vectors of 16 bytes, best first, per layout."""
    for layout in LAYOUTS:
        case = make_case(layout, tokens)
        if "ours" not in gate(case):
            sys.exit(f"error: the kernel is wrong on layout {layout}, so no tile of it is timed")
        xs, table_ = list(case.inputs), cos_sin(case.angles)
        expected = kernel.launch(xs, *table_)
        copy = statistics.median(milliseconds(lambda xs=xs: [x.clone() for x in xs]))  # type: ignore[misc]
        found = []
        for num_warps in (1, 2, 4, 8):
            one = kernel.tile(DIM // 2, 0, 2, num_warps=num_warps)[0]
            for block_t in (one, 2 * one):
                for block_h in (1, 2, 4, 8, 16):

                    def call(t: int = block_t, h: int = block_h, w: int = num_warps) -> list[Tensor]:
                        return kernel.launch(xs, *table_, block_t=t, block_h=h, num_warps=w)  # noqa: B023

                    if all(torch.equal(a, b) for a, b in zip(call(), expected, strict=True)):
                        ms = statistics.median(milliseconds(call, samples=8))
                        found.append((ms, block_t, block_h, num_warps))
                    else:
                        print(f"WRONG: block_t {block_t} block_h {block_h} num_warps {num_warps}", file=sys.stderr)
        default = (*kernel.tile(DIM // 2, 0, 2), 4)
        print(f"{layout}, {tokens} tokens, copy {copy:.4f} ms; block_t block_h num_warps ms speed/copy")
        for place, (ms, *shape) in enumerate(sorted(found), 1):
            if place <= 8 or tuple(shape) == default:
                mark = " (the rule's)" if tuple(shape) == default else ""
                print(f"{place:3} {shape[0]:>7} {shape[1]:>7} {shape[2]:>7} {ms:.4f} {copy / ms:.3f}{mark}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder for rotary.csv")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768, 131072])
    parser.add_argument("--sweep", action="store_true", help="time tile shapes at 32768 tokens instead")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: no CUDA device, and times of Triton's interpreter mean nothing: run this on a GPU")
    torch.cuda.set_stream(torch.cuda.Stream())  # graphs are captured on a stream that is not the default one
    if args.sweep:
        sweep(32768)
        return
    rows, good = compare(args.tokens)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "rotary.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, (*COLUMNS, *NUMBERS))
            writer.writeheader()
            writer.writerows(stamp(cuda=True) | row for row in rows)
    print(table(rows))
    if not good:
        sys.exit("error: an implementation failed its check and was not timed; see above")


if __name__ == "__main__":
    main()
