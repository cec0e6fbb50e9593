"""Mix the facts of bAbI's questions into the sentences of a text, as booydar/babilong does.

Draws come in upstream's order, each from its own generator, here with a seed (upstream's texts and questions have
none). Two things differ: the text is the user's instead of PG19, and its sentences end at a full stop, question mark or
exclamation mark instead of where nltk's Punkt ends them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rpe3d.config import ConfigError
from rpe3d.evaluate.tasks.predictions import Record
from rpe3d.text import encode

SHORTEST = 10
"""Minimum number of tokens in a sentence; shorter ones are left out."""
PER_FACT = 8
"""Tokens of context per line of a question's story; longer stories are left out."""
TRIES = 1000
PLAIN = "pass bAbI's own files: `1 Mary moved to the hall.`, and questions with tabs before the answer and the facts"


def stories(text: str, name: str) -> list[Record]:
    """Return bAbI's questions, each with all facts before it."""
    questions: list[Record] = []
    facts: list[str] = []
    for number, line in enumerate(text.replace("\r\n", "\n").strip().split("\n"), 1):
        place, _, rest = line.partition(" ")
        said, *answer = rest.split("\t")
        if not place.isdigit() or not said:
            raise ConfigError(f"line {number} of {name} is not a line of bAbI", PLAIN)
        if place == "1":
            facts = []
        if answer:
            questions.append({"facts": list(facts), "question": said, "target": answer[0]})
        else:
            facts.append(said)
    if not questions:
        raise ConfigError(f"{name} has no questions", PLAIN)
    return questions


@dataclass(kw_only=True)
class Mixer:
    """Mixes facts into a text of `size` tokens, facts included."""

    tokenizer: Any
    texts: Sequence[str]
    size: int
    seed: int
    waiting: list[str] = field(default_factory=list)
    """Sentences left over from the last sample."""

    def __post_init__(self) -> None:
        self.drawn_texts, self.drawn_places = (np.random.default_rng(self.seed) for _ in range(2))

    def mixed(self, questions: Sequence[Record], count: int) -> list[Record]:
        """Return `count` questions drawn by the seed, each with its facts in a separate text.

        The last question that is short enough is never drawn, as in upstream's counting.
        """
        short = [one for one in questions if len(one["facts"]) + 1 <= self.size // PER_FACT]
        if len(short) < 2:
            raise ConfigError(f"no story fits into {self.size} tokens", "raise --length")
        order = list(range(len(short) - 1))
        np.random.RandomState(self.seed).shuffle(order)
        return [self._mix(short[number]) for number in order[:count]]

    def _mix(self, question: Record) -> Record:
        facts = [encode(self.tokenizer, f" {fact}") for fact in question["facts"]]
        left = self.size - sum(map(len, facts))
        if left < 0:
            raise ConfigError(f"a story of {len(facts)} facts does not fit into {self.size} tokens", "raise --length")
        text = self._sentences(left)
        places = sorted(self.drawn_places.choice(range(len(text) + 1), len(facts)))
        pieces: list[list[int]] = []
        for number in range(len(text) + 1):
            pieces += [fact for fact, place in zip(facts, places, strict=True) if place == number]
            pieces += text[number : number + 1]
        whole = self.tokenizer.decode([token for piece in pieces for token in piece])
        return {"input": whole.strip(), "question": question["question"], "target": question["target"]}

    def _sentences(self, size: int) -> list[list[int]]:
        """Return sentences of `size` tokens in total; the last is cut."""
        taken: list[list[int]] = []
        total = 0
        for _ in range(TRIES):
            for number, sentence in enumerate(self.waiting):
                tokens = encode(self.tokenizer, f" {sentence}")
                if len(tokens) < SHORTEST:
                    continue
                taken.append(tokens)
                total += len(tokens)
                if total >= size:
                    self.waiting = self.waiting[number + 1 :]
                    taken[-1] = tokens[: len(tokens) - (total - size)] if total - size < len(tokens) else []
                    return taken
            self.waiting = self._more(size)
        raise ConfigError("the haystack has hardly any sentence of ten tokens", "pass prose to --texts")

    def _more(self, size: int) -> list[str]:
        """Return the complete sentences of a stretch of text that starts anywhere."""
        text = self.texts[int(self.drawn_texts.choice(len(self.texts)))]
        text = text[int(self.drawn_texts.choice(len(text))) :]
        return re.split(r"(?<=[.!?])\s+", text[: size * 10])[1:-1]
