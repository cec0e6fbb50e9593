"""Needles in prose: numbers hidden in a text, and how likely a model finds them when it is asked at the end.

A window has up to eight needles at even depths, RULER's words for one, and ends with a question and its answer for
each, in another order. What the answers cost in nats, which are a few tokens each, tells laws apart that a count of
right answers would not (LongRoPE2, arXiv 2502.20082, fits by the same tokens).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rpe3d.evaluate.grid import Progress
from rpe3d.evaluate.likelihood import token_nll
from rpe3d.evaluate.texts import Tokens
from rpe3d.text import encode

MOST = 8
SHARE = 1 / 4
"""Of a window, that needles and questions may be."""
WORDS = (
    "amber", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jacket", "kettle",
    "ladder", "mirror", "orchard", "pepper", "quarry",
)  # fmt: skip
LINE = "\nOne of the special magic numbers for {word} is: {number}.\n"
QUESTION = (
    "\nWhat is the special magic number for {word} mentioned in the text? The special magic number for {word} is:"
)


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """A window with needles in it, and where the answers stand."""

    tokens: Tensor
    answers: list[range]


def make_hidden(
    texts: Sequence[Tokens], tokenizer: Any, length: int, seed: int, first: tuple[int, ...] = ()
) -> Hidden | None:
    """Make a window of `length` tokens; None where fewer than two needles and their questions fit into a quarter.

    All texts are one ring, and the window starts anywhere on it.
    """
    draw = random.Random(seed)
    numbers = {word: draw.randrange(10**6, 10**7) for word in draw.sample(WORDS, MOST)}
    lines = {word: encode(tokenizer, LINE.format(word=word, number=number)) for word, number in numbers.items()}
    asked = {word: encode(tokenizer, QUESTION.format(word=word)) for word in numbers}
    told = {word: encode(tokenizer, QUESTION.format(word=word) + f" {number}") for word, number in numbers.items()}
    count = min(MOST, int(length * SHARE) // max(len(lines[word]) + len(told[word]) for word in numbers))
    if count < 2:
        return None
    words = list(numbers)[:count]
    ring = torch.cat([text.ids for text in texts])
    body = length - len(first) - sum(len(lines[word]) + len(told[word]) for word in words)
    text = ring.roll(-draw.randrange(len(ring)))[:body].tolist()
    cuts = [body * (2 * i + 1) // (2 * count) for i in range(count)]
    made = [*first]
    for word, start, end in zip(words, [0, *cuts], cuts, strict=False):
        made += [*text[start:end], *lines[word]]
    made += text[cuts[-1] :]
    answers = []
    for word in draw.sample(words, count):
        answers.append(range(len(made) + len(asked[word]), len(made) + len(told[word])))
        made += told[word]
    return Hidden(tokens=torch.tensor(made, dtype=ring.dtype), answers=answers)


def needles_nll(
    model: Any,
    texts: Sequence[Tokens],
    tokenizer: Any,
    length: int,
    seeds: Sequence[int],
    first: tuple[int, ...],
    progress: Progress,
) -> float | None:
    """Return the mean loss of the answers' tokens over all trials; None where the windows are too short for needles."""
    losses = []
    for done, seed in enumerate(seeds):
        progress(f"needles {done + 1} of {len(seeds)}", done, len(seeds))
        trial = make_hidden(texts, tokenizer, length, seed, first)
        if trial is None:
            return None
        last = len(trial.tokens) - trial.answers[0].start
        found = token_nll(model, trial.tokens[None], last)[0].double().cpu()
        before = len(trial.tokens) - last
        losses.append(
            fmean(float(found[answer.start - before : answer.stop - before].mean()) for answer in trial.answers)
        )
    progress("done", len(seeds), len(seeds))
    return fmean(losses)
