"""Table 3 in kind: a model fine-tuned to a longer context in several ways, beside the same laws without training.

    python benchmarks/finetune.py --model default --data FOLDER --texts FILE... --out DIR
    python benchmarks/finetune.py --model default --data FOLDER --texts FILE... --out DIR --only 3d-rpe,yarn    # a part

Training is that of `rpe3d train lm`: LoRA on joined documents (with `--method lora-plus` also of embeddings and norms),
with the learning rate and the batch of the small recipes. Every way reads as many tokens in as many steps, the same
ones in the same order but for 3d-rpe-pose, whose windows are a sixteenth of the context, with positions spread over
25/8 of it (100k for 32k). Both rows of a way, trained and train-free, are under one law: that of the context it is
trained to, or of a window that is longer. The adapter is not merged. The measures are those of `rpe3d compare`.

The same command goes on where it was stopped, and parts add up: nothing is trained or measured twice.
Writes DIR/<way>/adapter, finetune-<device>.csv and finetune-<device>.png.
"""

from __future__ import annotations

import argparse
import csv
import gc
import io
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rpe3d import evaluate, extend
from rpe3d.cli.arguments import need, size, sizes
from rpe3d.cli.terminal import progress_bar
from rpe3d.config import ConfigError, choice, whole
from rpe3d.drawing.axes import Paint, boldest_last, labels, line, short
from rpe3d.drawing.palette import BLUE, BROWN, DASHED, GREEN, ORANGE, PINK, PURPLE, SKY, SOFT, Colour, Style
from rpe3d.evaluate.plots import SHOWN, Panel, Plot, png
from rpe3d.evaluate.ranks import ranks
from rpe3d.evaluate.row import measure_row
from rpe3d.evaluate.tasks.probes import Bench
from rpe3d.evaluate.texts import Text, check_bytes, check_tokens, tokenize
from rpe3d.geometry import LawSpec, make_law
from rpe3d.models import as_stock, facts, load_adapter
from rpe3d.models.load import load
from rpe3d.text import opening
from stamp import COLUMNS, stamp

MEASURED = ("ppl", "tail_ppl", "copy_nll", "passkey")
NUMBERS = ("law", "steps", "tokens", "length", *MEASURED, "windows", "copies", "passkeys", "context", "s_per_step")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARTS = 16  # windows of PoSE in one of the others
Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model is trained: under a law, with LongLoRA's attention, or with PoSE; and its colour in the plot."""

    law: str
    colour: Colour
    sparse: bool = False
    skips: bool = False

    def context(self, trained: int) -> int:
        """What it is trained to."""
        return trained * 25 // 8 if self.skips else trained


WAYS = {
    "3d-rpe": Way(law="3d-rpe", colour=ORANGE),
    "3d-rpe-definition": Way(law="3d-rpe-definition", colour=BROWN),
    "3d-rpe-dual-chunk": Way(law="3d-rpe-dual-chunk", colour=PINK),
    "linear": Way(law="linear", colour=SKY),
    "yarn": Way(law="yarn", colour=BLUE),
    "linear-s2": Way(law="linear", colour=GREEN, sparse=True),
    "3d-rpe-pose": Way(law="3d-rpe", colour=PURPLE, skips=True),
}
USUAL = [name for name, way in WAYS.items() if not way.skips]


def training(way: Way, given: argparse.Namespace) -> Any:
    """The way as `rpe3d train lm` is told it."""
    from rpe3d.train import Settings

    parts = PARTS if way.skips else 1
    return Settings(
        kind="lm",
        model=given.model,
        context=way.context(given.context),
        length=given.context // parts,
        data=[given.data],
        law=way.law,
        pack=True,
        steps=given.steps,
        batch=given.batch * parts,
        micro_batch=parts,
        learning_rate=given.learning_rate,
        method=given.method,
        warmup=min(20, given.steps // 5),
        attention="s2" if way.sparse else "full",
        pose=2 if way.skips else 0,
        save_every=10,
    )


def trained(name: str, settings: Any, out: Path) -> tuple[Path, dict[str, Any]]:
    """The adapter, made by as many calls as it takes, and what it took."""
    from rpe3d.train import train

    def note(text: str) -> None:
        print(f"note: {text}", file=sys.stderr)

    with progress_bar() as progress:
        adapter = train(settings, out / name, device=DEVICE, progress=progress, note=note)
    with (out / name / "log.csv").open(newline="") as file:
        log = list(csv.DictReader(file))
    tokens = sum(int(step["tokens"]) for step in log)
    seconds = statistics.median(int(step["tokens"]) / float(step["tokens_per_second"]) for step in log)
    losses = f"loss {float(log[0]['loss']):.4f}, in the end {float(log[-1]['loss']):.4f}"
    print(f"{name}: {len(log)} steps of {tokens // len(log)} tokens, {seconds:.2f} s a step; {losses}", flush=True)
    return adapter, {"steps": len(log), "tokens": tokens, "s_per_step": round(seconds, 3)}


def measure(
    name: str, adapter: Path | None, given: argparse.Namespace, lengths: Sequence[int], texts: Sequence[Text]
) -> Any:
    """Rows of a way at these lengths, one after the other: with its adapter, or train-free."""
    way = WAYS[name]
    context = way.context(given.context)
    loaded = load(given.model, device=DEVICE)
    model: Any = loaded.model
    if adapter is not None:
        load_adapter(extend(model, way.law, context=context), adapter)  # into the model's own layers
        model.eval()
    known = facts(as_stock(model))
    tokens = [tokenize(loaded.tokenizer, text) for text in texts]
    check_tokens(tokens, lengths)
    label = f"{name}, {'train-free' if adapter is None else 'trained'},"
    settings = evaluate.Settings(laws=[way.law], lengths=lengths)
    with progress_bar() as progress:
        bench = Bench(
            model=model,
            tokenizer=loaded.tokenizer,
            texts=tokens,
            first=opening(loaded.tokenizer),
            settings=settings,
            measures=settings.measures,
            ranks=ranks(),
            progress=progress,
        )
        bench.total = sum(bench.work(length) for length in lengths)
        for length in lengths:
            law = make_law(way.law, context=max(context, length), **known)
            yield measure_row(bench, LawSpec(label=label, name=way.law, parameters={}), length, law)


class Results:
    """The CSV: whole after every row."""

    def __init__(self, path: Path, origin: dict[str, str]) -> None:
        self.path = path
        self.origin = origin
        self.rows: list[Row] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))

    def missing(self, name: str, steps: int, lengths: Sequence[int]) -> list[int]:
        """The lengths at which a way has not been measured."""
        there = {int(row["length"]) for row in self.rows if (row["law"], row["steps"]) == (name, str(steps))}
        return [length for length in lengths if length not in there]

    def add(self, name: str, about: dict[str, Any], found: dict[str, Any]) -> None:
        """A measured row; one that failed is said, and left to the next call."""
        from rpe3d.train.folder import write

        if found["status"] != "ok":
            print(f"{found['law']} at {found['length']}: {found['status']}", file=sys.stderr, flush=True)
            return
        counts = {kind: len(found[kind]) for kind in ("windows", "copies", "passkeys")}
        measured = {key: round(found[key], 4) for key in MEASURED}
        row = {**about, **measured, **counts, "law": name, "length": found["length"], "context": found["context"]}
        self.rows.append(self.origin | {key: str(row.get(key, "")) for key in NUMBERS})
        text = io.StringIO()
        writer = csv.DictWriter(text, (*COLUMNS, *NUMBERS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write(self.path, text.getvalue())

    def sorted(self) -> list[Row]:
        order = list(WAYS)
        return sorted(self.rows, key=lambda r: (order.index(r["law"]), int(r["steps"]), int(r["length"])))


def show(rows: Sequence[Row]) -> None:
    print(f"\n{'law':18} {'steps':>6} {'length':>7} {'ppl':>9} {'tail ppl':>9} {'copy nll':>9} {'passkey':>8}")
    for row in rows:
        measured = " ".join(f"{float(row[key]):9.2f}" for key in MEASURED[:3])
        print(
            f"{row['law']:18} {row['steps']:>6} {row['length']:>7} {measured} {row['passkey']:>5}/{row['passkeys']}",
            flush=True,
        )


def draw(rows: Sequence[Row], title: str, context: int, path: Path) -> None:
    """Perplexity by length: a line for every way with training, and a dashed one for its law without."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    curves: dict[bool, dict[str, list[tuple[int, float]]]] = {False: defaultdict(list), True: defaultdict(list)}
    for row in rows:
        curves[row["steps"] != "0"][row["law"]].append((int(row["length"]), float(row["ppl"])))
    looks = {name: Style(way.colour, width=2.2 if name == "3d-rpe" else 1.4) for name, way in WAYS.items()}
    lengths = sorted({int(row["length"]) for row in rows})
    values = [float(row["ppl"]) for row in rows]

    def lines(axes: Any, paint: Paint) -> None:
        for learned, by_name in curves.items():
            for name in boldest_last(by_name, looks):
                style = looks[name] if learned else looks[name]._replace(dash=DASHED, width=1.0)
                line(axes, paint, style, *zip(*by_name[name], strict=True))
        axes.set_yscale("log")
        axes.set_ylim(0.95 * min(values), 1.05 * min(max(values), SHOWN * min(values)))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.4g}"))
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, labels=[short(length) for length in lengths])
        axes.margins(x=0)
        axes.minorticks_off()
        axes.axvline(context, color=paint(SOFT), linestyle=":", linewidth=1)
        axes.set_xlabel(f"tokens in a window (dotted: trained to {short(context)})")
        labels(axes, paint, looks, {name: ends[-1][1] for name, ends in (curves[False] | curves[True]).items()})

    panel = Panel(title=title, alt="Line chart of perplexity by length.", size=(430, 300), draw=lines)
    path.write_bytes(png(Plot(name="finetune", caption="", panels=[panel])))


def work(names: Sequence[str], given: argparse.Namespace, texts: Sequence[Text], results: Results) -> None:
    """Train and measure these ways, each as far as it is not done yet."""
    for name in names:
        way = WAYS[name]
        lengths = sorted({*given.lengths, *([way.context(given.context)] if way.skips else [])})
        try:
            adapter, about = trained(name, training(way, given), given.out)
            if missing := results.missing(name, about["steps"], lengths):
                for found in measure(name, adapter, given, missing, texts):
                    results.add(name, about, found)
            if not way.sparse and (missing := results.missing(name, 0, lengths)):
                for found in measure(name, None, given, missing, texts):
                    results.add(name, {"steps": 0, "tokens": 0}, found)
        except torch.OutOfMemoryError as error:
            print(f"{name} failed: {str(error).strip().splitlines()[0]}", file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def asked(given: argparse.Namespace, texts: Sequence[Text]) -> dict[str, Any]:
    """What all rows of a folder share."""
    kept = {key: getattr(given, key) for key in ("model", "data", "context", "steps", "batch", "learning_rate")}
    if given.method != "lora":
        kept["method"] = given.method
    return {**kept, "device": DEVICE, "texts": {text.name: text.sha256 for text in texts}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="`default`, or a folder")
    parser.add_argument("--data", required=True, help="a folder of texts, or a file, to train on")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="to measure on; none of the data")
    parser.add_argument("--out", type=Path, required=True, help="a folder of its own, for adapters, CSV and plot")
    parser.add_argument("--only", "--laws", default=",".join(USUAL), help=f"of {', '.join(WAYS)}; default all but pose")
    parser.add_argument("--context", type=size, default=32768, help="tokens to train to; default 32k")
    parser.add_argument("--steps", type=int, default=100, help="default 100")
    parser.add_argument("--batch", type=int, default=2, help="windows in a step; default 2")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="default 2e-4")
    parser.add_argument("--method", default="lora", choices=("lora", "lora-plus"), help="default lora")
    parser.add_argument("--lengths", type=sizes, default="8k,16k,32k,64k", help="default 8k,16k,32k,64k")
    given = parser.parse_args()
    need("train", "transformers", "peft", "accelerate", "rich", "matplotlib")
    from rpe3d.train import folder

    names = [choice("way", name, WAYS) for name in given.only.split(",")]
    whole("steps", given.steps)
    settings = [training(WAYS[name], given) for name in names]  # wrong ones are refused before any work
    texts = evaluate.read_texts(given.texts)
    check_bytes(texts, [*given.lengths, *(one.context for one in settings if one.pose)])
    origin = stamp(cuda=DEVICE == "cuda")
    for path in (given.model, given.data, *map(str, given.texts)):
        origin["recipe"] = origin["recipe"].replace(f" {path}", f" {Path(path).resolve().name}")
    file = given.out / f"finetune-{DEVICE}.csv"
    with folder.locked(given.out):
        folder.check_run(given.out, asked(given, texts))
        folder.write_json(given.out / folder.ASKED, asked(given, texts))
        results = Results(file, origin)
        try:
            work(names, given, texts, results)
        finally:
            if not any(path.is_dir() for path in given.out.iterdir()):  # refused: the corrected command may come here
                (given.out / folder.ASKED).unlink()
        if rows := results.sorted():
            show(rows)
            title = f"{Path(given.model).name}: {given.steps} steps (solid), train-free (dashed)"
            draw(rows, title, given.context, file.with_suffix(".png"))


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error.problem}\nhint: {error.hint}")
