"""LongBench v2 (Bai et al. 2024, arXiv 2412.15204): four choices, by their likelihood or by a generated answer.

Both ask with upstream's zero-shot prompt, cut in the middle as upstream cuts it. `generation` is upstream's protocol,
greedy. `choices` takes the likeliest of the four answers that the prompt asks for, so that a small model that does not
follow their form still has an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks.chat import TEMPLATE, Chat
from rpe3d.evaluate.tasks.predictions import Record, Score, check_fields, parts_of
from rpe3d.evaluate.tasks.sample import Sample

WORDS = json.loads((files(__package__) / "data" / "longbench_v2.json").read_text(encoding="utf-8"))
TASKS = ("choices", "generation")
DEFAULT = ("choices",)
KEPT = ("_id", "domain", "sub_domain", "difficulty", "length", "answer")
KINDS = ("difficulty", "length", "domain")
ANSWER = "The correct answer is ({letter})"
LETTERS = "ABCD"
HINT = 'pass predictions in LongBench v2\'s format: {"judge": true, "difficulty": ..., "length": ..., "domain": ...}'
DATA_HINT = "pass LongBench v2's own file, with context, question, choice_A to choice_D and answer in each record"
SOURCE = "`data.json` of the hub's data set THUDM/LongBench-v2"


def longest(length: int) -> int:
    """Return how many prompt tokens fit a context of `length`: upstream's 120,000 of 128k, in proportion."""
    return length * 120_000 // 131_072


def render(record: Record, chat: Chat, most: int) -> str:
    """Return the prompt, cut in the middle to `most` tokens and decoded again, before the chat's words are added."""
    prompt = str(WORDS["template"])
    parts = {"$DOC$": "context", "$Q$": "question", **{f"$C_{letter}$": f"choice_{letter}" for letter in LETTERS}}
    for mark, name in parts.items():
        prompt = prompt.replace(mark, record[name].strip())
    ids = chat.encode(prompt)
    if len(ids) > most:
        prompt = chat.tokenizer.decode(ids[: most // 2] + ids[-most // 2 :], skip_special_tokens=True)
    return prompt


def samples(task: str, records: Sequence[Record], chat: Chat, length: int, limit: int | None = None) -> list[Sample]:
    """Return the first `limit` questions for a context of `length` tokens, with room for chat and answer."""
    most = min(longest(length), length - WORDS["max_new"] - len(chat.encode(chat.wrap(""))))
    if most < 500:
        raise ConfigError(f"LongBench v2 has no room in a context of {length}", "raise --length to 1k or more")
    fields = ("context", "question", *(f"choice_{letter}" for letter in LETTERS), *KEPT)
    check_fields(records, dict.fromkeys(fields, str), DATA_HINT)
    before = "" if chat.form == TEMPLATE else "\n\n" if chat.form == "none" else " "
    return [
        Sample(
            prompts=(chat.wrap(render(record, chat, most)) + (before if task == "choices" else ""),),
            max_new=WORDS["max_new"],
            gold={name: record[name] for name in KEPT},
            choices=tuple(ANSWER.format(letter=letter) for letter in LETTERS) if task == "choices" else (),
        )
        for record in records[:limit]
    ]


def record(sample: Sample, said: Sequence[str]) -> dict[str, Any]:
    """Return a line of the predictions file."""
    response = said[0].strip()
    pred = extracted(response)
    return {**sample.gold, "response": response, "pred": pred, "judge": pred == sample.gold["answer"]}


def extracted(response: str) -> str | None:
    """Return the letter that an answer names in the form that the prompt asks for."""
    plain = response.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", plain) or re.search(r"The correct answer is ([A-D])", plain)
    return found[1] if found else None


def score(task: str, records: Sequence[Record]) -> Score:
    """Return the percentage of right answers to one digit, and that of each difficulty, length and domain."""
    check_fields(records, {"judge": bool, "difficulty": str, "length": str}, HINT)
    right = [float(one["judge"]) for one in records]
    empty = sum(not str(one.get("response", "-")).strip() for one in records)
    parts = parts_of(records, right, KINDS, digits=1)
    value = round(100 * sum(right) / len(right), 1)
    return Score(score=value, n=len(right), metric="accuracy", empty=empty, parts=parts)
