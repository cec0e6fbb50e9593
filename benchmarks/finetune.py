"""Table 3 in kind: a model fine-tuned to a longer context in several ways, beside the same laws without training.

    python benchmarks/finetune.py --model default --data FOLDER --texts FILE... --out DIR
    python benchmarks/finetune.py --model default --data FOLDER --texts FILE... --out DIR --only 3d-rpe,yarn    # a part

Training is that of `rpe3d train lm`: LoRA on joined documents (with `--method lora-plus` also of embeddings and norms),
with the learning rate and the batch of the small recipes. Every way reads as many tokens in as many steps, the same
ones in the same order but for 3d-rpe-pose, whose windows are a sixteenth of the context, with positions spread over
25/8 of it (100k for 32k). Both rows of a way, trained and train-free, are under one law: that of the context it is
trained to, or of a window that is longer. The adapter is not merged. The measures are those of `rpe3d compare`.

The same command resumes where it was stopped, and parts add up: nothing is trained or measured twice. With `--minutes`
it stops at a checkpoint in time. A way whose rows are all in the CSV needs its adapter no more: with CSVs and run.json
alone, DIR can be carried to another machine, where the next way is trained.
Writes DIR/<way>/adapter, finetune-<device>.csv and .png, and training losses as finetune-loss-<device>.csv and .png.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune_results import Losses, Results, draw, draw_losses, show
from limit import Clock, TimeUpError, command
from rpe3d import evaluate, extend
from rpe3d.cli.arguments import need, size, sizes
from rpe3d.cli.terminal import progress_bar
from rpe3d.config import choice, whole
from rpe3d.drawing.palette import BLUE, BROWN, DOTTED, GREEN, ORANGE, PINK, PURPLE, SKY, Colour, Style
from rpe3d.evaluate.ranks import ranks
from rpe3d.evaluate.row import measure_row
from rpe3d.evaluate.tasks.probes import Bench
from rpe3d.evaluate.texts import Text, check_bytes, check_tokens, tokenize
from rpe3d.geometry import LawSpec, make_law
from rpe3d.models import as_stock, facts, load_adapter
from rpe3d.models.load import load
from rpe3d.text import opening
from stamp import stamp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PARTS = 16  # windows of PoSE in one of the others


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
    "3d-rpe-definition-pose": Way(law="3d-rpe-definition", colour=BROWN, skips=True),
    "3d-rpe-dual-chunk-pose": Way(law="3d-rpe-dual-chunk", colour=PINK, skips=True),
}
LOOKS = {
    name: Style(way.colour, width=2.2 if name == "3d-rpe" else 1.4, dash=DOTTED if way.skips else ())
    for name, way in WAYS.items()
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
        save_every=max(10, given.steps // 20),
    )


def trained(name: str, settings: Any, out: Path, losses: Losses, clock: Clock) -> tuple[Path, dict[str, Any]]:
    """The adapter, made by as many calls as it takes, and what it took; TimeUpError where it takes another."""
    from rpe3d.train import OutOfTime, train

    def note(text: str) -> None:
        print(f"note: {text}", file=sys.stderr)

    clock.check()
    adapter = None
    with progress_bar() as progress:
        try:
            adapter = train(settings, out / name, device=DEVICE, progress=progress, note=note, minutes=clock.left)
        except OutOfTime as stop:
            note(f"{name}: {stop}")
    with (out / name / "log.csv").open(newline="") as file:
        log = list(csv.DictReader(file))
    losses.replace(name, [float(step["loss"]) for step in log], settings.total_steps)
    tokens = sum(int(step["tokens"]) for step in log)
    seconds = statistics.median(int(step["tokens"]) / float(step["tokens_per_second"]) for step in log)
    ends = f"loss {float(log[0]['loss']):.4f}, in the end {float(log[-1]['loss']):.4f}"
    print(f"{name}: {len(log)} steps of {tokens // len(log)} tokens, {seconds:.2f} s a step; {ends}", flush=True)
    if adapter is None:
        raise TimeUpError
    return adapter, {"steps": len(log), "tokens": tokens, "s_per_step": round(seconds, 3)}


def measure(
    name: str,
    adapter: Path | None,
    given: argparse.Namespace,
    lengths: Sequence[int],
    texts: Sequence[Text],
    clock: Clock,
) -> Any:
    """Rows of a way at these lengths, one after the other: with its adapter, or train-free."""
    clock.check()
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
    with progress_bar() as bar:

        def progress(what: str, done: float, total: float) -> None:
            clock.check()
            bar(what, done, total)

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


def work(
    names: Sequence[str],
    given: argparse.Namespace,
    texts: Sequence[Text],
    results: Results,
    losses: Losses,
    clock: Clock,
) -> None:
    """Train and measure these ways, each as far as it is not done yet; what is measured is not trained again."""
    for name in names:
        way = WAYS[name]
        lengths = sorted({*given.lengths, *([way.context(given.context)] if way.skips else [])})
        try:
            if missing := results.missing(name, given.steps, lengths):
                adapter, about = trained(name, training(way, given), given.out, losses, clock)
                for found in measure(name, adapter, given, missing, texts, clock):
                    results.add(name, about, found)
            if not way.sparse and (missing := results.missing(name, 0, lengths)):
                for found in measure(name, None, given, missing, texts, clock):
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


def main() -> int:
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
    parser.add_argument("--minutes", type=float, help="stop cleanly before so many minutes are over, with status 3")
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
    clock = Clock(given.minutes)
    file = given.out / f"finetune-{DEVICE}.csv"
    with folder.locked(given.out):
        folder.check_run(given.out, asked(given, texts))
        folder.write_json(given.out / folder.ASKED, asked(given, texts))
        results, losses = Results(file, origin), Losses(file.with_stem(f"finetune-loss-{DEVICE}"), origin)
        try:
            with clock.limited():
                work(names, given, texts, results, losses, clock)
        finally:
            if not any(path.is_dir() for path in given.out.iterdir()) and not results.rows:
                (given.out / folder.ASKED).unlink()  # refused: the corrected command may come here
        told = f"{Path(given.model).name}: {given.steps} steps"
        if rows := results.sorted(list(WAYS)):
            show(rows)
            draw(rows, f"{told} (solid), train-free (dashed)", given.context, LOOKS, file.with_suffix(".png"))
        if losses.rows:
            draw_losses(losses.rows, f"{told}, training loss", LOOKS, losses.path.with_suffix(".png"))
    return clock.status()


if __name__ == "__main__":
    command(main)
