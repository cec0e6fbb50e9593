"""Find the scales of `dpe` for a model, by its authors' published detection (LuLuLuyi/DPE, effective_length_detection).

The pairs of dimensions are cut into eight groups. For each group in turn, the trial scales show a text of T tokens as
T, T / 2, T / 4 ... positions, down to 1024, while all other groups have the scale 2 (T div L_p), which shows half of
the pretrained length. Each trial asks for four numbers hidden in a text of T tokens, with greedy decoding and without a
chat template. Its score is the share of them in the answer: RULER's niah_multivalue has the authors' wording. A group
takes its best scale.

Departures. The authors publish a table to be read by eye; here, of scales with equal scores, the one nearest to the
scale of the other groups is taken. For a pretrained length below 8192, the fewest positions are an eighth of it. The
script leaves 16 of 64 pairs of each head, those with the smallest norms, at their true distance; here all pairs are
scaled, as in the authors' first example, because a law is the same for all heads. The haystack is the user's text, not
Graham's essays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rpe3d.evaluate.grid import Progress
from rpe3d.evaluate.tasks import ruler
from rpe3d.evaluate.tasks.chat import Chat
from rpe3d.evaluate.tasks.generate import generator
from rpe3d.evaluate.tasks.sample import Sample
from rpe3d.evaluate.under import under
from rpe3d.geometry import Law, make_law
from rpe3d.geometry.laws.dpe import GROUPS

TASK = "niah_multivalue"
FEWEST = 1024
SAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The score, 0 to 100, of a scale in one group."""

    group: int
    scale: int
    score: float


def base_scale(pretrained: int, context: int) -> int:
    """Return the scale of the groups that are not being tried: 2 (T div L_p)."""
    return 2 * (context // pretrained)


def candidates(pretrained: int, context: int) -> list[int]:
    """Return the scales that show T, T / 2, T / 4 ... positions, by integer division as in a shell, down to 1024."""
    fewest, length, scales = min(FEWEST, max(1, pretrained // 8)), context, []
    while length >= fewest:
        scales.append(context // length)
        length //= 2
    return scales


def search(pretrained: int, context: int, groups: int, score: Callable[[tuple[int, ...]], float]) -> list[Trial]:
    """Score every candidate in every group; scales that occur again are not scored again."""
    base, known, trials = base_scale(pretrained, context), {}, []
    for group in range(groups):
        for scale in candidates(pretrained, context):
            scales = tuple(scale if n == group else base for n in range(groups))
            if scales not in known:
                known[scales] = score(scales)
            trials.append(Trial(group=group, scale=scale, score=known[scales]))
    return trials


def best(trials: Sequence[Trial], base: int) -> tuple[int, ...]:
    """Return the best scale of every group; of those with equal scores, the nearest to `base` by ratio."""

    def rank(trial: Trial) -> tuple[float, float, int]:
        return trial.score, -abs(math.log(trial.scale / base)), trial.scale

    groups = sorted({trial.group for trial in trials})
    return tuple(max((one for one in trials if one.group == group), key=rank).scale for group in groups)


def questions(tokenizer: Any, context: int, count: int, essay: str) -> list[Sample]:
    """Return texts of at most `context` tokens, with the question at the end, and their answers."""
    return ruler.samples(TASK, Chat(tokenizer=tokenizer, form="none"), context, count, essay)


def detect(
    model: Any, tokenizer: Any, facts: dict[str, Any], context: int, samples: Sequence[Sample], progress: Progress
) -> tuple[Law, list[Trial]]:
    """Return `dpe` with the scales found for a model, and all trials. The model is left as it was."""
    pretrained = facts["pretrained"]
    base = base_scale(pretrained, context)
    groups = min(GROUPS, make_law("dpe", context=context, **facts).rotary.pairs)
    answer = generator(model, Chat(tokenizer=tokenizer, form="none"))
    others = set(candidates(pretrained, context)) - {base}
    total, done = groups * len(others) + (base in candidates(pretrained, context)), 0

    def score(scales: tuple[int, ...]) -> float:
        nonlocal done
        progress(f"scales {'-'.join(map(str, scales))}", done, total)
        law = make_law("dpe", context=context, scales=scales, **facts)
        with under(model, law):
            said = answer([sample.prompts[0] for sample in samples], samples[0].max_new, False)
        done += 1
        records = [ruler.record(sample, [text]) for sample, text in zip(samples, said, strict=True)]
        return ruler.score(TASK, records).score

    trials = search(pretrained, context, groups, score)
    progress("done", done, done)
    return make_law("dpe", context=context, scales=best(trials, base), **facts), trials
