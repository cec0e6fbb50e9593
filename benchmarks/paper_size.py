"""The paper's training at its own size: Llama-2-7B's shape with random weights, on one GPU.

    python benchmarks/paper_size.py --out DIR --parts 32k                       # some 5 minutes on an H200
    python benchmarks/paper_size.py --out DIR --parts chats,100k --minutes 9    # the same command resumes
    python benchmarks/paper_size.py --out DIR --parts largest --laws rope,3d-rpe --minutes 9
    python benchmarks/paper_size.py --out DIR --shape tiny                      # seconds on a CPU

LoRA of rank 8 on q, k, v and o, embeddings and norms trained as well (`--method lora-plus`), bf16, gradient
checkpointing, batches of 8 windows, one in a forward: the Trainer, the attention and the settings of `rpe3d train`, on
random tokens and without checkpoints on disk. Speed and memory do not depend on the weights.

32k      windows of 32k (Table 3)
chats    conversations of 16k, of which the last quarter is learned (Table 1)
100k     windows of 32k with PoSE's positions up to 100k (Table 3)
largest  the longest window of which one forward and backward fits: lengths double until one does not, then halves

The time of a step is that of its 8 micro-steps, each the median of all but the first of a run, and of the optimizer.
The same command resumes where it was stopped: every case, and every length that was tried, is a row of
paper-size-<device>.csv. What 4 and 8 GPUs would need under FSDP2 is printed from these rows.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from finetune_results import Table
from limit import Clock, command
from paper_size_results import GIB, LARGEST, ROPE, Row, minutes_of, show
from rpe3d import extend
from rpe3d.cli.terminal import progress_bar
from rpe3d.config import choice, whole
from rpe3d.evaluate.memory import within_memory
from rpe3d.geometry import LawSpec, parse_laws
from rpe3d.train import Settings
from rpe3d.train.batches import Steps
from rpe3d.train.lora import trainable
from rpe3d.train.run import learn
from rpe3d.train.samples import IGNORED, Sample
from rpe3d.train.trainer import LawTrainer, training_arguments
from stamp import stamp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS = (
    "shape", "part", "law", "method", "tokens", "context", "batch", "micro_steps", "status", "micro_s", "update_s",
    "step_s", "tokens_per_s", "peak_gib", "frozen", "trained", "unit",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a model, and of the paper's training on it in windows of its pretrained length."""

    hidden: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    pretrained: int


SHAPES = {
    "llama-2-7b": Shape(hidden=4096, layers=32, heads=32, inner=11008, vocabulary=32000, pretrained=4096),
    "tiny": Shape(hidden=32, layers=2, heads=2, inner=48, vocabulary=320, pretrained=64),
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A training of the paper: lengths are in pretrained lengths of the model."""

    kind: str
    context: int
    length: int
    pose: int = 0


PARTS = {
    "32k": Part(kind="lm", context=8, length=8),
    "chats": Part(kind="sft", context=4, length=4),
    "100k": Part(kind="lm", context=25, length=8, pose=2),
}


def laws_of(shape: Shape) -> str:
    """RoPE, and the forms of 3D-RPE as the recipes have them: the paper's chunk of 3k is `window` of its code."""
    return f"{ROPE},3d-rpe,3d-rpe-definition,3d-rpe-dual-chunk=3d-rpe-dual-chunk:window={shape.pretrained * 3 // 4}"


def new_model(shape: Shape) -> Any:
    """Return a Llama of this shape with random weights, made where it is used; bf16 on a GPU."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.pretrained,
        use_cache=False,
    )
    with torch.device(DEVICE):
        model: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    return model


def samples(length: int, vocabulary: int, learned: float) -> Iterator[Sample]:
    """Yield windows of random tokens, of which so large a part at the end is learned."""
    draw = torch.Generator().manual_seed(0)
    given = length - int(learned * length)
    while True:
        ids = torch.randint(vocabulary, (length,), generator=draw).tolist()
        yield Sample(ids=ids, labels=[IGNORED] * given + ids[given:], name="random tokens", after={})


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training that is measured."""

    spec: LawSpec
    part: Part
    length: int
    context: int
    batch: int
    steps: int
    method: str

    def settings(self) -> Settings:
        """As `rpe3d train` is told it."""
        return Settings(
            kind=self.part.kind,
            model="random weights",
            context=self.context,
            length=self.length,
            data=["random tokens"],
            law=self.spec.name,
            parameters=self.spec.parameters,
            pose=self.part.pose,
            method=self.method,
            batch=self.batch,
            steps=self.steps,
            warmup=0,
        )


class Timed(LawTrainer):
    """The Trainer of `rpe3d train`, with a clock around its micro-steps and its optimizer's updates.

    From the second step on AdamW's moments lie beside the activations. They are not there yet in the first step, so
    that as many bytes are held instead.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.micro: list[float] = []
        self.updates: list[float] = []
        self.ended = 0.0
        weights = [p for p in self.model.parameters() if p.requires_grad]
        self.moments: Tensor | None = torch.empty(2 * sum(p.numel() for p in weights), device=weights[0].device)

    def training_step(self, *given: Any, **more: Any) -> Tensor:
        begun = now()
        loss: Tensor = super().training_step(*given, **more)
        self.ended = now()
        self.micro.append(self.ended - begun)
        return loss

    def check_step(self) -> None:
        self.moments = None  # the optimizer is about to make its own
        super().check_step()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Note the time of an update: the loss of a step is logged right after it."""
        if "loss" in logs:
            self.updates.append(now() - self.ended)
        super().log(logs, start_time)


class Beat(TrainerCallback):  # type: ignore[misc]
    """Shows every micro-step."""

    def __init__(self, progress: Any, total: int) -> None:
        self.progress = progress
        self.total = total
        self.done = 0

    def on_substep_end(self, *given: Any, **more: Any) -> None:
        self.done += 1
        self.progress(f"micro-step {self.done}", self.done, self.total)

    on_step_end = on_substep_end


def now() -> float:
    """Return the time when all work on the device is done."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measured(case: Case, shape: Shape, progress: Any) -> dict[str, Any]:
    """Train a new model as `rpe3d train` does, and return what it took."""
    settings = case.settings()
    base = new_model(shape)
    extend(base, settings.law, context=settings.context, **settings.parameters)
    model = trainable(base, settings)
    learned = 0.25 if settings.kind == "sft" else 1.0
    steps = Steps(samples=samples(case.length, shape.vocabulary, learned), settings=settings, done=0)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(settings, Path(folder), steps, DEVICE, DEVICE == "cuda")
        arguments.save_strategy = IntervalStrategy.NO
        trainer = Timed(model, arguments, steps, [Beat(progress, case.batch * case.steps)])
        learn(trainer, base, settings)
    micro, update = statistics.median(trainer.micro[1:] or trainer.micro), statistics.median(trainer.updates)
    seconds = case.batch * micro + update
    trainer.accelerator.free_memory()
    return {
        "micro_steps": len(trainer.micro),
        "status": "ok",
        "micro_s": f"{micro:.4f}",
        "update_s": f"{update:.4f}",
        "step_s": f"{seconds:.3f}",
        "tokens_per_s": f"{case.batch * case.length / seconds:.1f}",
        "peak_gib": f"{torch.cuda.max_memory_allocated() / GIB:.2f}" if DEVICE == "cuda" else "0",
        "frozen": sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "unit": sum(p.numel() * 2 for p in base.model.layers[0].parameters()),
    }


def tried(case: Case, shape: Shape) -> dict[str, Any]:
    """Return what a case measures; where memory runs out, that it did."""
    with progress_bar() as progress:
        found = within_memory(lambda: measured(case, shape, progress))
    gc.collect()
    torch.cuda.empty_cache()
    return found or {"status": "out of memory"}


def largest(fits: Callable[[int], bool], start: int, grain: int, most: int) -> int:
    """Return the largest multiple of `grain`, from `start` to `most`, that fits: doubled first, then halved; or 0."""
    good, length = 0, start
    while length <= most and fits(length):
        good, length = length, 2 * length
    bad = min(length, (most // grain + 1) * grain)
    while good and bad - good > grain:
        middle = (good + bad) // 2 // grain * grain
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def expected(case: Case, shape: Shape, rows: Sequence[Row]) -> float:
    """Return the minutes that a case will take: the estimate, times the most that a warm one was exceeded by so far."""
    there = [row for row in rows if row["status"] == "ok" and int(row["micro_steps"]) > 1]
    over = [float(row["micro_s"]) / 60 / minutes_of(shape, int(row["tokens"]), 1) for row in there]
    return max(over, default=1.5) * minutes_of(shape, case.length, case.batch * case.steps)


def work(specs: Sequence[LawSpec], parts: Sequence[str], given: argparse.Namespace, table: Table, clock: Clock) -> None:
    """Measure every law in every part, as far as that is not done yet."""
    shape = given.shape_of

    def row(name: str, case: Case) -> Row:
        about = {"shape": given.shape, "part": name, "law": case.spec.label, "method": case.method}
        about |= {"tokens": str(case.length), "context": str(case.context), "batch": str(case.batch)}
        for found in table.rows:
            if all(found[key] == value for key, value in about.items()):
                return found
        rows = [found for found in table.rows if found["shape"] == given.shape]
        minutes = expected(case, shape, rows)
        clock.check(60 * minutes if DEVICE == "cuda" else 0)
        print(f"{name}, {case.spec.label}, {case.length} tokens: about {minutes:.1f} minutes", file=sys.stderr)
        table.append(about | tried(case, shape))
        return table.rows[-1]

    for name in parts:
        for spec in specs:
            if name in PARTS:
                part = PARTS[name]
                length, context = part.length * shape.pretrained, part.context * shape.pretrained
                sizes = {"length": length, "context": context, "batch": given.batch, "steps": given.steps}
                row(name, Case(spec=spec, part=part, method=given.method, **sizes))
                continue

            def fits(length: int, spec: LawSpec = spec) -> bool:
                sizes = {"length": length, "context": length, "batch": 1, "steps": 1}
                return row(LARGEST, Case(spec=spec, part=PARTS["32k"], method=given.method, **sizes))["status"] == "ok"

            start, grain = (times * shape.pretrained for times in (8, 2))
            found = largest(fits, start, grain, given.most * shape.pretrained)
            print(f"largest window under {spec.label}: {found} tokens", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV")
    parser.add_argument("--shape", default="llama-2-7b", help=f"of {', '.join(SHAPES)}; default llama-2-7b")
    parser.add_argument(
        "--parts", default=",".join(PARTS), help=f"of {', '.join([*PARTS, LARGEST])}; default the first"
    )
    parser.add_argument("--laws", help="default rope and the three forms of 3D-RPE")
    parser.add_argument("--method", default="lora-plus", choices=("lora", "lora-plus"), help="default lora-plus")
    parser.add_argument("--batch", type=int, default=8, help="windows, and micro-steps, in a step; default 8")
    parser.add_argument("--steps", type=int, default=1, help="steps of a case; default 1")
    parser.add_argument("--most", type=int, default=256, help="pretrained lengths that `largest` tries; default 256")
    parser.add_argument("--minutes", type=float, help="start nothing that would not end in so many, with status 3")
    given = parser.parse_args()
    given.shape_of = SHAPES[choice("shape", given.shape, SHAPES)]
    for key in ("batch", "steps", "most"):
        whole(key, getattr(given, key))
    return given


def main() -> int:
    given = arguments()
    specs = parse_laws(given.laws or laws_of(given.shape_of))
    parts = [choice("part", name, [*PARTS, LARGEST]) for name in given.parts.split(",")]
    for spec in specs:
        spec.check(given.shape_of.pretrained)
    clock = Clock(given.minutes)
    given.out.mkdir(parents=True, exist_ok=True)
    table = Table(given.out / f"paper-size-{DEVICE}.csv", stamp(cuda=DEVICE == "cuda"), COLUMNS)
    with clock.limited():
        work(specs, parts, given, table, clock)
    if table.rows:
        show(table.rows)
    return clock.status()


if __name__ == "__main__":
    command(main)
