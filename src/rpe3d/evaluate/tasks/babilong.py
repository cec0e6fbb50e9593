"""BABILong's tasks qa1 to qa10 (Kuratov et al. 2024, arXiv 2406.10149): bAbI's facts hidden in a long text.

Questions are upstream's own files, one for each length, or bAbI's, whose facts `babilong_build` mixes into a text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks.babilong_build import Mixer
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.predictions import Record, Score, check_fields
from rpe3d.evaluate.tasks.sample import Sample

WORDS = json.loads((files(__package__) / "data" / "babilong.json").read_text(encoding="utf-8"))
TASKS = tuple(WORDS["tasks"])
DEFAULT = TASKS
LEADERBOARD = TASKS[:5]
"""Tasks that upstream's leaderboard takes the mean of."""
MAX_NEW: int = WORDS["max_new"]
SAMPLES = 100
HINT = 'pass predictions in BABILong\'s format: a CSV, or JSONL, with "target", "output" and "question"'
DATA_HINT = "pass BABILong's own files, with input, question and target, or bAbI's"
SOURCE = "bAbI's qaN_*_test.txt (tasks_1-20_v1-2/en-10k), or the hub's RMT-team/babilong as qaN/4k.json"


def largest(length: int) -> int:
    """Return how many tokens of facts and text fit a context of `length`: 3700 for 4k (data/create_tasks.py)."""
    return length // 1024 * 1000 - 300


def render(task: str, context: str, question: str) -> str:
    """Return the prompt with upstream's instruction, examples and answer format."""
    words = {name: WORDS["tasks"][task][name] for name in ("instruction", "examples", "post_prompt")}
    return str(WORDS["template"].format(**words, context=context.strip(), question=question)).strip()


def samples(
    task: str,
    records: Sequence[Record],
    chat: Chat,
    length: int,
    limit: int | None = None,
    seed: int = 0,
    texts: Sequence[str] = (),
) -> list[Sample]:
    """Return the first `limit` prompts of upstream's records, or of bAbI's drawn by `seed` (100 without a limit)."""
    if records and "facts" in records[0]:
        records = _mixed(task, records, chat, length, SAMPLES if limit is None else limit, seed, texts)
    check_fields(records, {"input": str, "question": str, "target": str}, DATA_HINT)
    return [
        Sample(
            prompts=(chat.wrap(render(task, record["input"], record["question"])),),
            max_new=MAX_NEW,
            gold={"target": record["target"], "question": record["question"]},
        )
        for record in records[:limit]
    ]


def _mixed(
    task: str, records: Sequence[Record], chat: Chat, length: int, count: int, seed: int, texts: Sequence[str]
) -> list[Record]:
    """Return questions with their facts hidden in a text, which leaves room for the prompt's words and the answer."""
    asked = max((record["question"] for record in records), key=len)
    room = length - MAX_NEW - len(chat.encode(chat.wrap(render(task, "", asked))))
    size = min(largest(length), room)
    if size < 100:
        raise ConfigError(f"BABILong has no room in a context of {length}", "raise --length to 1k or more")
    return Mixer(tokenizer=chat.tokenizer, texts=texts, size=size, seed=seed).mixed(records, count)


def record(sample: Sample, said: Sequence[str]) -> dict[str, Any]:
    """Return a line of the predictions file."""
    return {"target": sample.gold["target"], "output": said[0].strip(), "question": sample.gold["question"]}


def score(task: str, records: Sequence[Record]) -> Score:
    """Return the percentage of answers that name the right label of the task and no other."""
    check_fields(records, {"target": str, "output": str, "question": str}, HINT)
    labels = {label.lower() for label in WORDS["tasks"][task]["labels"]}
    right = sum(_right(one["target"], one["output"], one["question"], labels) for one in records)
    empty = sum(not one["output"].strip() for one in records)
    return Score(score=round(100 * right / len(records), 2), n=len(records), metric="accuracy", empty=empty)


def _right(target: str, output: str, question: str, labels: set[str]) -> bool:
    """Return whether the first sentence names only the target, labels of the question aside (qa8 may have several)."""
    said = output.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
    named = {label for label in labels if label in said} - {label for label in labels if label in question.lower()}
    wanted = target.lower()
    if "," in wanted and len(wanted) > 3:
        parts = wanted.split(",")
        return all(part in named for part in parts) and len(named) == len(parts)
    return named == {wanted}
