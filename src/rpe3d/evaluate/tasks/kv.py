"""Key-value retrieval (Liu et al. 2023, arXiv 2307.03172, Lost in the Middle): look up one of many random keys.

Records are made from a seed as in upstream's script, or read from upstream's files. As in its experiments, the key is
at one of five places: 0, 34, 69, 104 and 139 of 140 keys.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Sequence
from fractions import Fraction
from importlib.resources import files
from typing import Any

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.fitting import most
from rpe3d.evaluate.tasks.predictions import Record, Score, check_fields, parts_of
from rpe3d.evaluate.tasks.sample import Sample

WORDS = json.loads((files(__package__) / "data" / "kv.json").read_text(encoding="utf-8"))
KEYS = {"75_keys": 75, "140_keys": 140, "300_keys": 300}
TASKS = ("fill", *KEYS)
"""As many keys as fit into the context, or upstream's three numbers of them."""
DEFAULT = ("fill",)
SAMPLES = 500
PLACES = 5
MAX_NEW: int = WORDS["max_new"]
HINT = 'pass predictions in upstream\'s format: {"value": ..., "model_answer": ...}'
DATA_HINT = "pass upstream's own files, with ordered_kv_records, key and value in each line"

Pairs = list[tuple[str, str]]


def render(pairs: Sequence[Sequence[str]], key: str) -> str:
    """Return the prompt: a JSON object with one pair per line, and the key."""
    lines = ",\n ".join(f'"{name}": "{value}"' for name, value in pairs)
    return str(WORDS["template"].format(formatted_kv_records="{" + lines + "}", key=key))


def drawn(draw: random.Random, count: int) -> tuple[Pairs, tuple[str, str]]:
    """Return `count` pairs of random UUIDs and the one to look up, drawn in upstream's order."""
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        key, value = (str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(2))
        pairs[key] = value
    return list(pairs.items()), draw.choice(list(pairs.items()))


def samples(
    task: str, records: Sequence[Record] | None, chat: Chat, length: int, limit: int | None = None, seed: int = 0
) -> list[Sample]:
    """Return the first `limit` prompts of upstream's records, or as many drawn by `seed` (500 without a limit)."""
    if records is not None:
        given = [_read(one, number) for number, one in enumerate(records[:limit], 1)]
    else:
        draw, keys = random.Random(seed), KEYS.get(task) or _most(chat, length, seed)
        given = [drawn(draw, keys) for _ in range(SAMPLES if limit is None else limit)]
    whole = records is not None or task in KEYS
    depths = _depths(len(given))
    return [_sample(*one, depth, chat, length, whole) for one, depth in zip(given, depths, strict=True)]


def _depths(count: int) -> list[Fraction]:
    """Return the place of each sample's key: five places in turn, or fewer if there are fewer samples."""
    places = min(count, PLACES)
    if places == 1:
        return [Fraction(1, 2)]
    return [Fraction(number % places, places - 1) for number in range(count)]


def _read(record: Record, number: int) -> tuple[Pairs, tuple[str, str]]:
    """Return the pairs of one of upstream's records and the pair that it asks for."""
    check_fields([record], {"ordered_kv_records": list, "key": str, "value": str}, DATA_HINT)
    pairs = [tuple(pair) for pair in record["ordered_kv_records"] if isinstance(pair, list) and len(pair) == 2]
    asked = (record["key"], record["value"])
    if len(pairs) != len(record["ordered_kv_records"]) or asked not in pairs:
        raise ConfigError(f"record {number} does not hold the pair that it asks for among its pairs", DATA_HINT)
    return pairs, asked


def _most(chat: Chat, length: int, seed: int) -> int:
    """Return how many pairs fit into a context, judged by the first that the seed draws."""

    def fits(count: int) -> bool:
        pairs, (key, _) = drawn(random.Random(seed), count)
        return _tokens(chat, pairs, key) <= length

    found = most(fits, 2)
    if found is None:
        raise _no_room(length)
    return found


def _sample(pairs: Pairs, asked: tuple[str, str], depth: Fraction, chat: Chat, length: int, whole: bool) -> Sample:
    """Return a prompt with the pair at a depth; others are dropped until it fits, unless all are wanted."""
    others = [pair for pair in pairs if pair != asked]
    while True:
        at = int(depth * len(others))
        shown = [*others[:at], asked, *others[at:]]
        if _tokens(chat, shown, asked[0]) <= length:
            break
        if whole or len(others) < 2:
            raise _no_room(length, f"{len(shown)} keys do")
        others.pop()
    gold = {"key": asked[0], "value": asked[1], "keys": len(shown), "depth": round(100 * depth)}
    return Sample(prompts=(chat.wrap(render(shown, asked[0])),), max_new=MAX_NEW, gold=gold)


def _tokens(chat: Chat, pairs: Sequence[Sequence[str]], key: str) -> int:
    return len(chat.encode(chat.wrap(render(pairs, key)))) + MAX_NEW


def _no_room(length: int, what: str = "key-value retrieval does") -> ConfigError:
    return ConfigError(f"{what} not fit into {length} tokens of this tokenizer", "raise --length")


def record(sample: Sample, said: Sequence[str]) -> dict[str, Any]:
    """Return a line of the predictions file."""
    return {**sample.gold, "model_answer": said[0]}


def score(task: str, records: Sequence[Record]) -> Score:
    """Return the percentage of answers that contain the value, ignoring case."""
    check_fields(records, {"value": str, "model_answer": str}, HINT)
    right = [float(one["value"].lower() in one["model_answer"].lower()) for one in records]
    empty = sum(not one["model_answer"].strip() for one in records)
    value = round(100 * sum(right) / len(right), 2)
    return Score(score=value, n=len(right), metric="accuracy", empty=empty, parts=parts_of(records, right, ["depth"]))
