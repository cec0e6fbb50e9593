"""LongBench v1 (Bai et al. 2023, arXiv 2308.14508) as its repository renders, truncates and scores it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks import metrics
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.predictions import Record, Score, check_fields
from rpe3d.evaluate.tasks.sample import Sample

FEW_SHOT = ("trec", "triviaqa", "samsum", "lsht")
CODE = ("lcc", "repobench-p")
HINT = 'pass predictions in LongBench\'s format: {"pred": ..., "answers": [...], "all_classes": ..., "length": ...}'
DATA_HINT = "pass LongBench's own files, with context, input, answers, all_classes and length in each line"
SOURCE = "`data.zip` of the hub's data set THUDM/LongBench"


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task as the data file defines it."""

    category: str
    metric: str
    max_new: int
    prompt: str


def _tasks() -> dict[str, TaskSpec]:
    content = json.loads((files(__package__) / "data" / "longbench.json").read_text(encoding="utf-8"))
    return {name: TaskSpec(**task) for name, task in content["tasks"].items()}


TASKS = _tasks()
DEFAULT = tuple(name for name, task in TASKS.items() if task.category != "Chinese")
"""The paper's sixteen tasks."""


def longest(length: int) -> int:
    """Return how many prompt tokens fit a context of `length`: 3500 for 4k, 15500 for 16k (model2maxlen.json)."""
    return length // 1024 * 1000 - 500


def render(task: str, record: Record, chat: Chat, most: int, authors: bool = False) -> str:
    """Return the prompt, cut in the middle to `most` tokens, decoded again, and then wrapped in the chat's words.

    Few-shot and code tasks get no chat words; the 3D-RPE authors' own script adds them to code tasks (`authors`).
    """
    prompt = TASKS[task].prompt.format(context=record["context"], input=record["input"])
    ids = chat.encode(prompt)
    if len(ids) > most:
        half = most // 2
        prompt = "".join(chat.tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
    plain = FEW_SHOT if authors else FEW_SHOT + CODE
    return prompt if task in plain else chat.wrap(prompt)


def samples(
    task: str, records: Sequence[Record], chat: Chat, length: int, limit: int | None = None, authors: bool = False
) -> list[Sample]:
    """Return the first `limit` prompts of a task for a context of `length` tokens."""
    most = longest(length)
    if most < 2:
        raise ConfigError(f"LongBench has no room in a context of {length}", "raise --length to 1k or more")
    check_fields(records, {"context": str, "input": str, "answers": list}, DATA_HINT)
    return [
        Sample(
            prompts=(render(task, record, chat, most, authors),),
            max_new=TASKS[task].max_new,
            line_only=task == "samsum",
            gold={name: record.get(name) for name in ("answers", "all_classes", "length")},
        )
        for record in records[:limit]
    ]


def record(sample: Sample, said: Sequence[str]) -> dict[str, Any]:
    """Return a line of the predictions file."""
    return {"pred": said[0], **sample.gold}


def score(task: str, records: Sequence[Record]) -> Score:
    """Return 100 times the mean over samples of the best score over references, to two digits."""
    metric = getattr(metrics, TASKS[task].metric)
    check_fields(records, {"pred": str, "answers": list}, HINT)
    classes = records[-1].get("all_classes") or ()  # upstream takes the last line's for all
    if TASKS[task].metric == "classification" and not classes:
        raise ConfigError(f"{task} needs the names of all classes, and `all_classes` has none", HINT)
    named = isinstance(classes, (list, tuple)) and all(isinstance(name, str) for name in classes)
    if TASKS[task].metric == "classification" and not named:
        raise ConfigError(f"`all_classes` of record {len(records)} is not a list of texts", HINT)
    total = 0.0
    for one in records:
        said = one["pred"].lstrip("\n").split("\n")[0] if task in FEW_SHOT else one["pred"]
        total += max([0.0, *(metric(said, str(answer), classes) for answer in one["answers"])])
    empty = sum(not one["pred"].strip() for one in records)
    return Score(score=round(100 * total / len(records), 2), n=len(records), metric=TASKS[task].metric, empty=empty)
