"""InfiniteBench's retrieval tasks (Zhang et al. 2024, arXiv 2402.13718): passkey, number string, key-value pairs.

Upstream makes them at 128k tokens; here they fill a context of any length, from a seed. Its files can be given instead.
Prompts are those that upstream gives to open models, without chat words, as for YaRN-Mistral, Yi and ChatGLM3.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.fitting import most, spread
from rpe3d.evaluate.tasks.kv import Pairs, drawn
from rpe3d.evaluate.tasks.predictions import Record, Score, check_fields, parts_of
from rpe3d.evaluate.tasks.sample import Sample

WORDS = json.loads((files(__package__) / "data" / "infinitebench.json").read_text(encoding="utf-8"))
TASKS = tuple(WORDS["tasks"])
DEFAULT = TASKS
SAMPLES = {"passkey": 590, "number_string": 590, "kv_retrieval": 500}
DEPTHS = 59
"""Number of places for the key in the filler, with ten samples at each."""
HINT = 'pass predictions in InfiniteBench\'s format: {"prediction": ..., "ground_truth": ...}'
DATA_HINT = "pass InfiniteBench's own files, with context, input and answer in each line"
SEPARATORS = re.compile("[\n:\"'.,?!{}]")
MISSING = "XXXXXXXXXX"


# --- prompts


def render(task: str, context: str, question: str) -> str:
    return str(WORDS["tasks"][task]["template"].format(context=context, input=question))


def samples(
    task: str, records: Sequence[Record] | None, chat: Chat, length: int, limit: int | None = None, seed: int = 0
) -> list[Sample]:
    """Return `limit` prompts (by default 590, or 500 for pairs) of upstream's records, or made from `seed`."""
    if records is not None:
        return _given(task, records, chat, length, limit)
    make = _pairs if task == "kv_retrieval" else _grass
    return make(task, chat, length, SAMPLES[task] if limit is None else limit, seed)


def _given(task: str, records: Sequence[Record], chat: Chat, length: int, limit: int | None) -> list[Sample]:
    """Return prompts of upstream's files, cut in the middle if they are longer than the context."""
    check_fields(records, {"context": str, "input": str}, DATA_HINT)
    made = []
    for number, one in enumerate(records[:limit], 1):
        prompt = render(task, one["context"], one["input"])
        ids = chat.encode(prompt)
        half = (length - _room(task)) // 2
        if len(ids) > length - _room(task):
            prompt = chat.tokenizer.decode(ids[:half] + ids[-half:], skip_special_tokens=True)
        answer = one.get("answer")
        answer = answer[0] if isinstance(answer, list) and answer else answer
        if not isinstance(answer, str):  # nothing that a model says would be equal to it
            raise ConfigError(f"record {number} has no answer that is a string", DATA_HINT)
        made.append(_sample(task, prompt, answer))
    return made


def _grass(task: str, chat: Chat, length: int, count: int, seed: int) -> list[Sample]:
    """Return prompts with a key in filler text, at 59 places or fewer from the beginning to the end."""
    words, noise = WORDS["tasks"][task], WORDS["noise"]

    def prompt(lines: int, before: int, key: str) -> str:
        context = noise * before + words["needle"].replace("{key}", key) + noise * (lines - before)
        return render(task, context, words["question"])

    lines = _most(task, chat, length, lambda n: prompt(n, n // 2, "8" * (5 if task == "passkey" else 10)))
    draw = random.Random(seed)
    made = []
    for depth in spread(count, DEPTHS):
        key = _key(task, draw)
        made.append(_sample(task, prompt(lines, round(depth * lines), key), key, depth))
    return made


def _key(task: str, draw: random.Random) -> str:
    """Return five digits; for a number string, five more are drawn, each next to its equal, as upstream draws them."""
    digits = [str(draw.randint(0, 9)) for _ in range(5)]
    for number in range(5 if task == "number_string" else 0):
        place = draw.randint(0, 5 + number - 1)
        digits.insert(place, digits[place])
    return "".join(digits)


def _pairs(task: str, chat: Chat, length: int, count: int, seed: int) -> list[Sample]:
    """Return prompts with a JSON object; the requested pair moves through it from sample to sample."""

    def prompt(pairs: Pairs, key: str) -> str:
        data = ", ".join(f'"{name}": "{value}"' for name, value in pairs)
        return render(task, f"JSON data:\n{{{data}}}", WORDS["tasks"][task]["question"].format(key=key))

    first, _ = drawn(random.Random(seed), 1)
    keys = _most(task, chat, length, lambda n: prompt(drawn(random.Random(seed), n)[0], first[0][0]))
    draw = random.Random(seed)
    made = []
    for number in range(count):
        pairs, _ = drawn(draw, keys)
        while True:
            place = int(number * len(pairs) / count)
            text = prompt(pairs, pairs[place][0])
            if len(pairs) == 1 or len(chat.encode(text)) + _room(task) <= length:
                break
            pairs.pop()
        made.append(_sample(task, text, pairs[place][1], number / count))
    return made


def _most(task: str, chat: Chat, length: int, prompt: Callable[[int], str]) -> int:
    found = most(lambda n: len(chat.encode(prompt(n))) + _room(task) <= length, 1)
    if found is None:
        raise ConfigError(f"infinitebench:{task} does not fit into {length} tokens of this tokenizer", "raise --length")
    return found


def _room(task: str) -> int:
    return int(WORDS["tasks"][task]["max_new"])


def _sample(task: str, prompt: str, answer: Any, depth: float | None = None) -> Sample:
    where = {} if depth is None else {"depth": round(100 * depth)}
    return Sample(prompts=(prompt,), max_new=_room(task), gold={"ground_truth": answer, **where})


def record(sample: Sample, said: Sequence[str]) -> dict[str, Any]:
    """Return a line of the predictions file."""
    return {"prediction": said[0], **sample.gold}


# --- scores


def score(task: str, records: Sequence[Record]) -> Score:
    """Return the percentage of right answers: the first number in an answer, or the value among its words."""
    said = "prediction" if "prediction" in records[0] else "pred"
    gold = "ground_truth" if "ground_truth" in records[0] else "label"
    check_fields(records, {said: str}, HINT)
    check_fields(records[:1], {gold: object}, HINT)
    right = [float(_right(task, one[said], one.get(gold, MISSING))) for one in records]
    value = round(100 * sum(right) / len(right), 2)
    empty = sum(not one[said].strip() for one in records)
    return Score(score=value, n=len(right), metric="accuracy", empty=empty, parts=parts_of(records, right, ["depth"]))


def _right(task: str, said: str, gold: Any) -> bool:
    if task == "kv_retrieval":
        return gold in SEPARATORS.sub(" ", said).split()
    number = re.search("[0-9]+", said)
    return bool((gold[0] if isinstance(gold, list) else gold) == (number[0] if number else ""))
