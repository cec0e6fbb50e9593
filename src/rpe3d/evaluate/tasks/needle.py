"""A needle in a haystack at every depth (after Kamradt 2023): RULER's needle, at given instead of random places.

Words, haystack and score are those of RULER's niah_single_2: a number for a word, hidden in a text. Samples go through
eleven depths from the first sentence to the last, so that rows of several lengths make a heat map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rpe3d.evaluate.tasks import ruler
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.fitting import spread
from rpe3d.evaluate.tasks.predictions import Record, Score, parts_of
from rpe3d.evaluate.tasks.ruler_build import CONFIG, Builder
from rpe3d.evaluate.tasks.sample import Sample

TASKS = ("number",)
DEFAULT = TASKS
RULER = {"number": "niah_single_2"}
DEPTHS = 11
SAMPLES = 55

record = ruler.record


def samples(task: str, chat: Chat, length: int, count: int | None, essay: str) -> list[Sample]:
    """Return `count` prompts of at most `length` tokens with their answers; None: five at each of eleven depths."""
    depths = [100 * depth for depth in spread(SAMPLES if count is None else count, DEPTHS)]
    builder = Builder(chat=chat, length=length, essay=essay, depths=depths)
    family = CONFIG["families"][CONFIG["tasks"][RULER[task]]["family"]]
    return [
        Sample(prompts=(prompt,), max_new=family["max_new"], gold={"outputs": outputs, "depth": round(depth)})
        for depth, (prompt, outputs, _) in zip(depths, builder.build(RULER[task], len(depths)), strict=True)
    ]


def score(task: str, records: Sequence[Record]) -> Score:
    """Return the percentage of needles found, and that of each depth."""
    name = RULER[task]
    each = [ruler.score(name, [one]).score / 100 for one in records]
    return replace(ruler.score(name, records), parts=parts_of(records, each, ["depth"]))
