"""The loop of `rpe3d eval` against lm-eval's `generate_until`, in one run: samples per minute of LongBench prompts.

    pip install lm-eval==0.4.13      # no dependency of ours
    python benchmarks/evaluation.py --model default --data DIR --out benchmarks/results
    python benchmarks/evaluation.py --model default --data DIR --task longbench:trec --length 2k --samples 8 --out DIR

Both have the same model in memory, under the same law, the same prompts, batch size and most new tokens, and they end
at the same tokens. They take turns (A B B A ...), and every number is a median. Tokenizing and decoding count; making
prompts (cutting them, chat words) and scoring do not. Nothing is timed before the two have said the same: whole answers
in float32. In bfloat16 their batches are padded otherwise and so rounded otherwise: there it is the first words, and
`same` says how many answers are the same to the end. Writes evaluation-<device>.csv.
"""

from __future__ import annotations

import argparse
import copy
import csv
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rpe3d.cli.arguments import laws, size, sizes
from rpe3d.config import ConfigError
from rpe3d.evaluate.ranks import Ranks
from rpe3d.evaluate.settings import Ask
from rpe3d.evaluate.tasks import parse_tasks, title
from rpe3d.evaluate.tasks.chat import chat_of
from rpe3d.evaluate.tasks.generate import generator
from rpe3d.evaluate.tasks.measure import Means, predict, samples_of
from rpe3d.evaluate.tasks.predictions import Predictions, read_records
from rpe3d.evaluate.tasks.questions import load as load_data
from rpe3d.evaluate.tasks.sample import Sample
from rpe3d.evaluate.under import laws_of, own_length, under
from rpe3d.models.load import load
from stamp import COLUMNS, stamp

PLACE = ("lm_eval", "model", "task", "law", "length", "batch", "samples", "same")
NUMBERS = (*PLACE, "samples_per_minute", "lm_eval_samples_per_minute", "speed", "speed_goal")
SPEED = 1.0  # at least
ALIKE = 0.9  # of the answers, at least
WORDS = 4  # of an answer that must be the same in half precision
CUDA = torch.cuda.is_available()


def ours(means: Means, task: tuple[str, str], length: int) -> tuple[list[str], float]:
    """Answers, and samples per minute, as a row of `rpe3d eval` has them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "predictions.jsonl"
        pace = predict(means, task, length, Predictions(path=file, made_from="benchmark"), lambda part: None).pace
        records = sorted(read_records(file), key=lambda record: int(record["index"]))
    assert pace is not None
    return [record["pred"] for record in records], pace


def theirs(lm: Any, samples: Sequence[Sample]) -> tuple[list[str], float]:
    """Answers, and samples per minute, of lm-eval's own loop."""
    instance = import_module("lm_eval.api.instance").Instance
    requests = []
    for i, sample in enumerate(samples):
        stop = {"max_gen_toks": sample.max_new, "until": ["\n"] if sample.line_only else [], "do_sample": False}
        asked = (sample.prompts[0], stop)
        requests.append(instance(request_type="generate_until", doc={}, arguments=asked, idx=i))
    began = time.perf_counter()
    said = lm.generate_until(requests, disable_tqdm=True)
    return said, 60 * len(samples) / (time.perf_counter() - began)


def check(what: str, said: Sequence[str], other: Sequence[str], words: int | None) -> int:
    """How many answers are the same; ends the run where too few begin with the same words."""
    alike = sum(a.split()[:words] == b.split()[:words] for a, b in zip(said, other, strict=True))
    same = sum(a == b for a, b in zip(said, other, strict=True))
    print(f"check {what}: {same} of {len(said)} answers are the same, {alike} begin alike", flush=True)
    if alike < ALIKE * len(said):
        raise SystemExit(f"{what}: only {alike} of {len(said)} answers agree, and {ALIKE:.0%} must")
    return same


def row(means: Means, task: tuple[str, str], length: int, law: str, batch: int, repeat: int) -> dict[str, Any]:
    """Our loop and theirs on the samples of a task, under the law that the model is under."""
    samples = samples_of(means, task, length)
    tokens = max(len(means.chat.encode(sample.prompts[0])) for sample in samples) + samples[0].max_new
    lm = import_module("lm_eval.models.huggingface").HFLM(
        pretrained=means.model,
        tokenizer=copy.deepcopy(means.chat.tokenizer),  # it sets a padding token
        max_length=tokens + 1,
        batch_size=batch,
    )
    words = None if means.model.dtype == torch.float32 else WORDS
    what = f"{title(task)}, {law}, batch {batch}"
    same = check(what, ours(means, task, length)[0], theirs(lm, samples)[0], words)  # which warms up
    turns = (lambda: ours(means, task, length)[1]), (lambda: theirs(lm, samples)[1])
    rates: tuple[list[float], list[float]] = [], []
    for n in range(repeat):
        for who in (0, 1) if n % 2 == 0 else (1, 0):
            rates[who].append(turns[who]())
    mine, peer = map(statistics.median, rates)
    speed = round(mine / peer, 3)
    verdict = "reached" if speed >= SPEED else "MISSED"
    print(f"{what}: {mine:.2f} samples a minute, lm-eval {peer:.2f}: {speed}  {verdict}", flush=True)
    for name, readings in zip(("ours", "lm-eval"), rates, strict=True):
        print(f"  {name:8} {' '.join(f'{rate:.2f}' for rate in readings)}", flush=True)
    values = [version("lm_eval"), called(means.model), title(task), law, length, batch, len(samples), same]
    return dict(zip(NUMBERS, [*values, round(mine, 3), round(peer, 3), speed, SPEED], strict=True))


def called(model: Any) -> str:
    return f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="`default`, or a folder")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with LongBench's files, as `rpe3d eval` has it"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV")
    parser.add_argument("--task", default="longbench:multi_news")
    parser.add_argument("--laws", default="rope,3d-rpe")
    parser.add_argument("--length", type=size, help="context that prompts are cut to; default the model's own")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--batch", type=sizes, default="1,4", help="prompts at once, one size after the other")
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    try:
        import_module("lm_eval.models.huggingface")
    except ImportError as error:
        raise SystemExit(f"this compares with lm-eval ({error}): pip install lm-eval==0.4.13") from None
    (task,) = parse_tasks([given.task])
    if task[0] != "longbench":
        raise SystemExit(f"{given.task} is no task of LongBench: give --task longbench:NAME")
    data = {task: load_data(*task, given.data)}
    loaded = load(given.model)
    model: Any = loaded.model
    chat, _ = chat_of("auto", loaded.tokenizer, Path(given.model).name)
    length = given.length or own_length(model)
    entries = laws(given.laws)
    given.out.mkdir(parents=True, exist_ok=True)
    origin = stamp(cuda=CUDA)
    origin["recipe"] = origin["recipe"].replace(str(given.data), "DATA")
    if given.model != "default":
        origin["recipe"] = origin["recipe"].replace(given.model, "FOLDER")
    rows: list[dict[str, Any]] = []
    for (label, _), law in laws_of(model, entries, [length]).items():
        if isinstance(law, Exception):
            raise law
        for batch in given.batch:
            ask = Ask(tasks=[task], lengths=[length], limit=given.samples, batch=batch)
            answers = generator(model, chat)
            means = Means(model=model, chat=chat, generate=answers, ask=ask, data=data, texts={}, ranks=Ranks())
            with under(model, law):
                rows.append(origin | row(means, task, length, label, batch, given.repeat))
            with (given.out / f"evaluation-{'cuda' if CUDA else 'cpu'}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, (*COLUMNS, *NUMBERS))
                writer.writeheader()
                writer.writerows(rows)  # as they come: a row takes minutes


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"error: {error.problem}\nhint: {error.hint}") from None
