"""RULER's tasks (Hsieh et al. 2024, arXiv 2404.06654): their prompts for a model, and how they are scored.

The prompts are generated on the fly by `ruler_build`, with upstream's seed and in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.predictions import Record, Score, check_fields
from rpe3d.evaluate.tasks.ruler_build import CONFIG, SAMPLES, Builder
from rpe3d.evaluate.tasks.sample import Sample

TASKS = tuple(CONFIG["tasks"])
DEFAULT = tuple(task for task in TASKS if not task.startswith("qa"))
"""Tasks made only of words: the two question-answering tasks need data sets."""
HINT = 'pass predictions in RULER\'s format: {"index": ..., "pred": ..., "outputs": [...]}'


def samples(task: str, chat: Chat, length: int, count: int | None, essay: str) -> list[Sample]:
    """Return `count` prompts of at most `length` tokens with their answers; None: 500, as upstream."""
    if task not in DEFAULT:
        raise ConfigError(f"ruler:{task} needs data sets that cannot be generated here", f"choose {', '.join(DEFAULT)}")
    builder = Builder(chat=chat, length=length, essay=essay)
    made = builder.build(task, SAMPLES if count is None else count)
    max_new = CONFIG["families"][CONFIG["tasks"][task]["family"]]["max_new"]
    return [
        Sample(prompts=(prompt,), max_new=max_new, gold={"outputs": outputs, "length": size})
        for prompt, outputs, size in made
    ]


def record(sample: Sample, said: Sequence[str]) -> dict[str, Any]:
    """Return a line of the predictions file."""
    return {"pred": said[0], **sample.gold}


def score(task: str, records: Sequence[Record]) -> Score:
    """Return the percentage of the answers found in the prediction; for question answering, whether any is."""
    check_fields(records, {"pred": str, "outputs": list}, HINT)
    total = 0.0
    for number, one in enumerate(records, 1):
        if not one["outputs"]:
            raise ConfigError(f"record {number} has no outputs", HINT)
        found = [float(str(answer).lower() in one["pred"].lower()) for answer in one["outputs"]]
        total += max(found) if task.startswith("qa") else sum(found) / len(found)
    metric = "string_match_part" if task.startswith("qa") else "string_match_all"
    empty = sum(not one["pred"].strip() for one in records)
    return Score(score=round(total / len(records) * 100, 2), n=len(records), metric=metric, empty=empty)
